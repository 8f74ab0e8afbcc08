"""The chart's alerts and dashboards, and every query in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
OPERATIONS = ROOT / "docs" / "operations.md"
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


def scaled_objects(file: Path) -> list[dict[str, Any]]:
    """Return KEDA's objects of a page or of a file of manifests."""
    text = file.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [
        one
        for block in (blocks if file.suffix == ".md" else [text])
        if "kind: ScaledObject" in block
        for one in yaml.safe_load_all(block)
        if one["kind"] == "ScaledObject"
    ]


def scaling_queries() -> dict[str, str]:
    """Return the queries of KEDA's triggers in docs/operations.md and in examples, by object."""
    return {
        f"ScaledObject {one['metadata']['name']}": trigger["metadata"]["query"]
        for file in (OPERATIONS, *sorted((ROOT / "examples").glob("*.yaml")))
        for one in scaled_objects(file)
        for trigger in one["spec"]["triggers"]
    }


def selectors(expression: str) -> list[str]:
    """Return what a query reads: metrics of ours, of vLLM and of the router, with their labels."""
    return ["".join(found) for found in _SELECTOR.findall(expression)]
