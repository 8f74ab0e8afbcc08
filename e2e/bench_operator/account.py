"""What the audit log says of the operator's writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import Any

Line = dict[str, Any]
NO_CHILDREN = frozenset({"pdclusters", "events", "leases"})


def is_dry_run(line: Line) -> bool:
    """Whether a request wrote nothing."""
    return "dryRun=" in line["requestURI"]


def is_child(line: Line) -> bool:
    """Whether a write concerns what a PDCluster owns."""
    return line["objectRef"]["resource"] not in NO_CHILDREN


def name_of(line: Line) -> tuple[str, str]:
    """Return resource and name of what was written."""
    name = line["objectRef"].get("name") or line["requestObject"]["metadata"]["name"]
    return line["objectRef"]["resource"], name


def of_operator(lines: Iterable[Line], namespace: str) -> list[Line]:
    """Return the operator's requests that wrote, or tried to write, in a namespace."""
    return [
        line
        for line in lines
        if line["user"]["username"] == "operator"
        and line["objectRef"].get("namespace") == namespace
    ]


def by_resource(lines: Iterable[Line]) -> dict[str, int]:
    """Count requests by resource, with its subresource; dry runs apart."""
    counts: Counter[str] = Counter()
    for line in lines:
        what = line["objectRef"]
        part = f"/{what['subresource']}" if what.get("subresource") else ""
        dry = " (dry run)" if is_dry_run(line) else ""
        counts[f"{what['resource']}{part}{dry}"] += 1
    return dict(counts)


def span(lines: Iterable[Line]) -> tuple[float, float]:
    """Return when the first and the last of these requests ended, in seconds since the epoch."""
    moments = [moment_of(line) for line in lines]
    return min(moments), max(moments)


def moment_of(line: Line) -> float:
    """Return when a request ended."""
    return datetime.fromisoformat(line["stageTimestamp"]).timestamp()
