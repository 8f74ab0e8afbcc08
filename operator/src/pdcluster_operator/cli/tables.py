"""Tables of pods, links and conditions, for a terminal and for a pipe alike."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from pdcluster_connector.protocol.launcher_documents import LinkReport
from pdcluster_operator.cli.columns import Columns
from pdcluster_operator.cli.snapshot import Condition, PodLine, Snapshot

STYLES = {
    "True": "green",
    "False": "red",
    "Unknown": "yellow",
    "Ready": "green",
    "Died": "red",
    "Established": "green",
    "Passed": "green",
    "Failed": "red",
    "Pending": "yellow",
}


def pods_table(pods: Iterable[PodLine]) -> Columns:
    """Return what every pod is doing."""
    table = Columns("POD", "ROLE", "ADDRESS", "STATE", "DOING", one_line=True)
    for pod in pods:
        again = f" (start {pod.restarts + 1})" if pod.restarts else ""
        state = _styled(pod.state + again, pod.state)
        table.add(pod.name, pod.role, pod.address, state, pod.doing)
    return table


def links_table(links: Iterable[tuple[str, LinkReport]]) -> Columns:
    """Return every pair of engines: whether KV can move, how fast, and whether a canary passed."""
    table = Columns("PREFILL", "DECODE", "STATE", "SHARDS", "GB/s", "CANARY", "REASON")
    for decode, link in links:
        canary = link.canary.state.value
        reason = link.canary.message or " ".join(filter(None, (link.reason, link.message)))
        speed = f"{link.bytes_per_second / 1e9:.2f}" if link.bytes_per_second else ""
        table.add(
            short(link.prefill),
            short(decode),
            _styled(link.state.value, link.state),
            link.shards,
            speed,
            _styled(canary, canary),
            reason,
        )
    return table


def conditions_table(conditions: Iterable[Condition]) -> Columns:
    """Return the cluster's conditions, as ``kubectl describe`` shows them."""
    table = Columns("CONDITION", "STATUS", "REASON", "MESSAGE")
    for condition in conditions:
        table.add(
            condition.type,
            _styled(condition.status, condition.status),
            condition.reason,
            condition.message,
        )
    return table


def waiting_for(snapshot: Snapshot) -> str:
    """Return what the cluster waits for, in one line: the conditions that do not hold."""
    # Progressing and Available only repeat what the other conditions say.
    parts = [
        f"{c.type}={c.status} {c.reason}{': ' if c.message else ''}{c.message}"
        for c in snapshot.missing
        if c.type not in {"Progressing", "Available"} and c.reason != "WaitingForEngines"
    ]
    return "; ".join(parts) or next(
        (f"{c.type}={c.status} {c.reason}: {c.message}" for c in snapshot.missing),
        "the operator's first status",
    )


def short(engine: str) -> str:
    """``prefill/0`` for a logical id ``namespace.cluster.prefill.revision.0``."""
    parts = engine.split(".")
    return f"{parts[2]}/{parts[4]}" if len(parts) == 5 else engine


def _styled(text: str, key: str) -> Text:
    return Text(text, style=STYLES.get(key, ""))
