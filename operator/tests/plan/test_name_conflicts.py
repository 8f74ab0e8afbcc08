"""An object of somebody else is never applied over, nor one that is still being deleted."""

from __future__ import annotations

import copy
from typing import Any

from pdcluster_operator.plan.connectors import build_connector_configmap
from pdcluster_operator.plan.name_conflicts import (
    NAME_CONFLICT,
    STILL_BEING_DELETED,
    why_not_applied,
)
from pdcluster_operator.plan.types import ConnectorBundle


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
        assert refusal.reason == NAME_CONFLICT == "NameConflict"
        assert "Service tiny exists and does not belong to this PDCluster" in refusal.message


def test_an_object_of_the_former_cluster_of_that_name_is_waited_for() -> None:
    live = service("ours", deletionTimestamp="2026-01-01T00:00:00Z")
    refusal = why_not_applied(service("ours"), live)
    assert refusal is not None
    assert refusal.reason == STILL_BEING_DELETED == "StillBeingDeleted", "as docs/api.md says"
    theirs = service("theirs", deletionTimestamp="2026-01-01T00:00:00Z")
    refusal = why_not_applied(service("ours"), theirs)
    assert refusal is not None
    assert refusal.reason == NAME_CONFLICT, "whose it is comes first"


def test_what_somebody_made_immutable_is_named_with_the_remedy() -> None:
    refusal = why_not_applied(service("ours"), {**service("ours"), "immutable": True})
    assert refusal is not None
    assert refusal.reason == "Immutable"
    assert "Service tiny is immutable" in refusal.message
    assert "delete it" in refusal.message
    assert "spec.rollout.renew" in refusal.message
    assert why_not_applied(service("ours"), {**service("ours"), "immutable": False}) is None


OWNER = {"kind": "PDCluster", "uid": "theirs", "controller": True}
SHARED = build_connector_configmap("ns", ConnectorBundle("c" * 64, b"bytes"))


def changed(**fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(SHARED), **fields}


def test_a_shared_configmap_is_ours_by_its_content_whoever_wrote_it() -> None:
    relabelled = changed()
    relabelled["metadata"] = {"name": SHARED["metadata"]["name"], "labels": {"by": "hand"}}
    for live in (None, SHARED, relabelled):
        assert why_not_applied(SHARED, live) is None


def test_another_content_of_that_name_is_left_alone() -> None:
    owned = changed(metadata={**SHARED["metadata"], "ownerReferences": [OWNER]})
    for live in (
        changed(binaryData={"connector.pyz": "b3RoZXI="}),
        changed(data={"more": "of it"}),
        changed(immutable=False),
        owned,
    ):
        refusal = why_not_applied(SHARED, live)
        assert refusal is not None
        assert refusal.reason == NAME_CONFLICT
        assert "does not hold this operator's connector" in refusal.message


def test_a_shared_configmap_that_is_being_deleted_is_waited_for() -> None:
    dying = changed()
    dying["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    refusal = why_not_applied(SHARED, dying)
    assert refusal is not None
    assert refusal.reason == STILL_BEING_DELETED
