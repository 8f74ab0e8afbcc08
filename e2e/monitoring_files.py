"""The chart's alerts and dashboards, and every query in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "charts" / "pdcluster" / "files"
ALERTS = FILES / "prometheus" / "alerts.yaml"
DASHBOARDS = {path.stem: path for path in sorted((FILES / "dashboards").glob("*.json"))}
_SELECTOR = re.compile(r"\b((?:pdcluster_(?!dev_)|vllm:|vllm_router_)\w+)(\{[^}]*\})?")


def alerts() -> list[dict[str, Any]]:
    """Return the alerts, in the order of their file."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels(name: str) -> Iterator[dict[str, Any]]:
    """Yield the panels of a dashboard, and those in its rows."""
    for panel in json.loads(DASHBOARDS[name].read_text())["panels"]:
        yield from [panel, *panel.get("panels", ())]


def expressions() -> dict[str, str]:
    """Return every query of every dashboard and alert, by where it stands."""
    found = {rule["alert"]: rule["expr"] for rule in alerts()}
    for name in DASHBOARDS:
        for panel in panels(name):
            for target in panel.get("targets", ()):
                found[f"{name}/{panel['title']}/{target['refId']}"] = target["expr"]
    return found


def scaling_queries() -> dict[str, str]:
    """Return the queries of KEDA's triggers in docs/operations.md and in examples, by object."""
    page = (ROOT / "docs" / "operations.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    texts = [*blocks, *(one.read_text() for one in sorted((ROOT / "examples").glob("*.yaml")))]
    return {
        f"ScaledObject {one['metadata']['name']}": trigger["metadata"]["query"]
        for text in texts
        if "kind: ScaledObject" in text
        for one in yaml.safe_load_all(text)
        if one["kind"] == "ScaledObject"
        for trigger in one["spec"]["triggers"]
    }


def selectors(expression: str) -> list[str]:
    """Return what a query reads: metrics of ours, of vLLM and of the router, with their labels."""
    return ["".join(found) for found in _SELECTOR.findall(expression)]
