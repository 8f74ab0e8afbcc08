"""The stage of a PDCluster, and when it has to be read before children are created."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.plan.lifecycle import (
    FIRST_CHILDREN_SECONDS,
    JUST_REPORTED_SECONDS,
    is_changed,
    is_new,
    needs_live_check,
)
from pdcluster_operator.plan.types import Apply, Delete, TryOut, WriteTicketKey, creates


def cluster(observed: int | None, available: str = "", generation: int = 2) -> dict[str, Any]:
    conditions = [{"type": "Available", "status": available}] if available else []
    status = {} if observed is None else {"observedGeneration": observed, "conditions": conditions}
    return {"metadata": {"generation": generation}, "status": status}


@pytest.mark.parametrize(
    ("live", "has_children", "stage"),
    [
        (cluster(None), False, "new"),
        ({"metadata": {}, "status": None}, False, "new"),
        ({"metadata": {}}, True, ""),
        (cluster(None), True, ""),
        (cluster(1), True, "changed"),
        (cluster(1, "True"), False, "changed"),
        (cluster(2), True, ""),
        (cluster(2, "False"), True, ""),
        (cluster(2, "Unknown"), False, ""),
        (cluster(2, "True"), True, ""),
        ({"metadata": {"generation": 2}, "status": {"model": "m"}}, True, ""),
    ],
)
def test_the_stage_follows_from_status_and_children(
    live: dict[str, Any], has_children: bool, stage: str
) -> None:
    assert is_new(live, has_children=has_children) == (stage == "new")
    assert is_changed(live) == (stage == "changed")


@pytest.mark.parametrize("first", [True, False])
def test_only_the_first_children_are_created_after_an_old_report(first: bool) -> None:
    limit = FIRST_CHILDREN_SECONDS if first else JUST_REPORTED_SECONDS
    assert not needs_live_check(limit - 0.1, first=first)
    assert needs_live_check(limit, first=first)


def test_which_steps_create_an_object() -> None:
    def apply(uid: str) -> Apply:
        return Apply({"kind": "Service", "metadata": {"name": "a"}}, "a test", uid)

    gone = Delete("Service", "ns", "old", "u", "1", "a test")
    assert not creates([])
    assert not creates([apply("u"), gone])
    for step in (
        apply(""),
        WriteTicketKey({"kind": "Secret"}, rotate=False, why="a test"),
        TryOut((), {"kind": "ControllerRevision"}, beside=False, why="a test"),
    ):
        assert creates([gone, step])
