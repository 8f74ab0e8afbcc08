"""Children that something else changes as soon as they are applied.

A mutating webhook may add a sidecar to a pod template, or write another registry's name into an
image. The live object is then never as wanted, and to apply it again changes nothing. Such a
rewrite is noted from the answer to an apply, told once, and left as it is.
"""

from __future__ import annotations

import json

from pdcluster_operator.api.conditions import StatusReason
from pdcluster_operator.plan.model import Event, Manifest, Rewrite
from pdcluster_operator.plan.objects.contents import without_contents
from pdcluster_operator.plan.objects.drift import applied_hash, differences, is_applied

MAX_SHOWN_FIELDS = 5


def rewrite_of(live: Manifest, desired: Manifest) -> Rewrite | None:
    """Return how ``live`` differs from ``desired`` (stamped); None if it does not."""
    found = tuple(
        (path, json.dumps(value, sort_keys=True, default=str))
        for path, value in differences(without_contents(live), without_contents(desired))
    )
    return Rewrite(applied_hash(desired), found) if found else None


def is_settled(live: Manifest | None, desired: Manifest, noted: Rewrite | None) -> bool:
    """Whether applying ``desired`` (stamped) would change nothing.

    Args:
        noted: what became of the last apply of this object; None if it went as wanted.
    """
    if live is None or is_applied(live, desired):
        return live is not None
    return noted is not None and rewrite_of(live, desired) == noted


def rewritten_event(desired: Manifest, rewrite: Rewrite) -> Event:
    """Return the event that tells of a rewrite."""
    paths = [path for path, _ in rewrite.fields]
    shown = ", ".join(paths[:MAX_SHOWN_FIELDS])
    if len(paths) > MAX_SHOWN_FIELDS:
        shown += f" and {len(paths) - MAX_SHOWN_FIELDS} more"
    return Event(
        "Warning",
        StatusReason.REWRITTEN,
        f"{desired['kind']} {desired['metadata']['name']}: something else, such as a mutating "
        f"webhook, changes what the operator applies: {shown}. The operator leaves that change",
    )
