"""When a child must not be applied although it is wanted.

Two reasons: another object has the child's name, or an object of that name is still being
deleted.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster_operator.plan.deletions import is_being_deleted
from pdcluster_operator.plan.model import Manifest
from pdcluster_operator.plan.ownership import controller_uid

NAME_CONFLICT = "NameConflict"
STILL_BEING_DELETED = "StillBeingDeleted"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an apply is not tried: the reason and the message of a condition."""

    reason: str
    message: str


def why_not_applied(desired: Manifest, live: Manifest | None) -> Refusal | None:
    """Return why ``desired`` must not be applied over ``live``; None if it may be.

    Args:
        live: the object of that kind and name on the server; None if there is none.
    """
    if live is None:
        return None
    kind, name = str(desired["kind"]), str(desired["metadata"]["name"])
    if controller_uid(desired) != controller_uid(live):
        return name_conflict(kind, name)
    if is_being_deleted(live):
        return Refusal(STILL_BEING_DELETED, f"{kind} {name} is still being deleted")
    return None


def name_conflict(kind: str, name: str) -> Refusal:
    """Return the refusal for an object that has the name of a child and another owner."""
    return Refusal(
        NAME_CONFLICT,
        f"{kind} {name} exists and does not belong to this PDCluster: "
        "rename it, or give the PDCluster another name",
    )
