"""Compares the tables of our own metrics in docs/metrics.md with the code.

After an intended change, write the tables again and read the difference:

    PDCLUSTER_REGENERATE=1 python -m pytest -k metrics_page
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
HEAD = "| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n"
UNITS = ("bytes", "seconds")
NAME = re.compile(r"^\| `([a-zA-Z0-9_:]+)` \|", re.MULTILINE)


def documented(begins: str = "") -> set[str]:
    """The names in the page's tables that begin with a prefix."""
    return {name for name in NAME.findall(PAGE.read_text()) if name.startswith(begins)}


def check_section(name: str, metrics: Iterable[MetricWrapperBase], common: set[str]) -> None:
    """Fail if the table of a section differs from what the code registers.

    Args:
        name: the section's mark in the page.
        metrics: the registered metrics.
        common: labels that every metric has; the page names them once.
    """
    table = HEAD + "".join(sorted(_row(metric, common) for metric in metrics))
    text = PAGE.read_text()
    mark, end = f"<!-- {name} -->\n", "<!-- end -->"
    before, _, rest = text.partition(mark)
    shown, _, after = rest.partition(end)
    if os.environ.get("PDCLUSTER_REGENERATE"):
        PAGE.write_text(before + mark + table + end + after)
        shown = table
    assert shown == table, f"docs/metrics.md differs; if it is meant, see {__file__}"


def _row(metric: MetricWrapperBase, common: set[str]) -> str:
    described: Metric = metric.describe()[0]
    name = described.name
    unit = next((unit for unit in UNITS if name.endswith(f"_{unit}")), "")
    shown = f"{name}_total" if described.type == "counter" else name
    labels = [f"`{label}`" for label in metric._labelnames if label not in common]
    text = described.documentation
    return f"| `{shown}` | {described.type} | {unit} | {', '.join(labels)} | {text} |\n"
