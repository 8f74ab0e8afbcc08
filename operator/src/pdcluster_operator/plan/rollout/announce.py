"""The progress of a rollout in one line, as ``pdcluster rollout status`` prints it."""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster_operator.api.conditions import (
    ConditionType,
    Status,
    StatusReason,
    find_condition,
)
from pdcluster_operator.plan.types import Manifest

WITHOUT_AN_END = frozenset(
    {
        StatusReason.NOT_ACCEPTED,
        StatusReason.PAUSED,
        StatusReason.TEMPLATE_REFUSED,
        StatusReason.INSUFFICIENT_CAPACITY,
        StatusReason.PROGRESS_DEADLINE_EXCEEDED,
    }
)
"""With one of these reasons, Progressing stays False until somebody does something."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """Where a rollout stands.

    Attributes:
        line: for people.
        complete: whether nothing is left to do; None while it goes on.
    """

    line: str
    complete: bool | None


def announce(cluster: Manifest) -> Announcement:
    """Return how far the rollout of a PDCluster's spec is."""
    status, metadata = cluster.get("status") or {}, cluster["metadata"]
    generation = metadata.get("generation", 0)
    if status.get("observedGeneration", 0) < generation:
        return Announcement(f"waits until the operator sees generation {generation}", None)
    counts = (
        f"prefill {status.get('prefill')} ready, decode {status.get('decode')} ready, "
        f"links {status.get('links')}"
    )
    ready = find_condition(status, ConditionType.READY)
    progressing = find_condition(status, ConditionType.PROGRESSING)
    if progressing.get("reason") == StatusReason.COMPLETE:
        why = "" if ready.get("status") == Status.TRUE else f"; {ready.get('message')}"
        return Announcement(f"complete: {counts}{why}", True)
    accepted = find_condition(status, ConditionType.ACCEPTED)
    if accepted.get("status") == Status.FALSE:
        return Announcement(f"not accepted: {accepted.get('message')}", False)
    why = f"{progressing.get('reason')}: {progressing.get('message')}"
    held = progressing.get("status") == Status.FALSE
    if held and progressing.get("reason") in WITHOUT_AN_END:
        return Announcement(f"{counts}; {why}", False)
    return Announcement(f"{counts}; {why}", None)
