"""An object of somebody else is never applied over, nor one that is still being deleted."""

from __future__ import annotations

from typing import Any

from pdcluster_operator.plan.name_conflicts import (
    NAME_CONFLICT,
    STILL_BEING_DELETED,
    why_not_applied,
)


def service(*owners: str, **metadata: Any) -> dict[str, Any]:
    references = [
        {"kind": "PDCluster", "uid": uid, "controller": uid == owners[-1]} for uid in owners
    ]
    return {
        "kind": "Service",
        "metadata": {"name": "tiny", "ownerReferences": references, **metadata},
    }


def test_a_free_name_and_our_own_object_are_applied() -> None:
    assert why_not_applied(service("ours"), None) is None
    assert why_not_applied(service("ours"), service("ours")) is None
    assert why_not_applied(service("ours"), service("theirs", "ours")) is None


def test_an_object_of_another_owner_or_of_nobody_is_left_alone() -> None:
    nobodys = service()
    del nobodys["metadata"]["ownerReferences"]
    users = service("ours", "theirs")  # it goes with the cluster, and is controlled by nobody of us
    for live in (service("theirs"), service(), nobodys, users):
        refusal = why_not_applied(service("ours"), live)
        assert refusal is not None
        assert refusal.reason == NAME_CONFLICT
        assert "Service tiny exists and does not belong to this PDCluster" in refusal.message


def test_an_object_of_the_former_cluster_of_that_name_is_waited_for() -> None:
    live = service("ours", deletionTimestamp="2026-01-01T00:00:00Z")
    refusal = why_not_applied(service("ours"), live)
    assert refusal is not None
    assert refusal.reason == STILL_BEING_DELETED
    theirs = service("theirs", deletionTimestamp="2026-01-01T00:00:00Z")
    refusal = why_not_applied(service("ours"), theirs)
    assert refusal is not None
    assert refusal.reason == NAME_CONFLICT, "whose it is comes first"
