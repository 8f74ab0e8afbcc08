"""A failed step shows in Progressing, and in Ready if nothing else is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.api.conditions import ConditionType
from pdcluster_operator.plan.status.progress import with_failure

NOW = 1_800_000_000.0


def condition(kind: str, status: str, moment: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": "R", "lastTransitionTime": moment}


@pytest.mark.parametrize("ready", ["True", "False", "Unknown"])
def test_progressing_says_it_and_ready_is_not_true(ready: str) -> None:
    planned = {
        "model": "m",
        "conditions": [
            *(condition(kind, "True") for kind in ("Accepted", "Available", "Progressing")),
            condition("Ready", ready),
        ],
    }
    cluster = {"metadata": {"generation": 3}, "status": {}}
    status = with_failure(planned, cluster, "Forbidden", "no quota", NOW)
    assert status["model"] == "m"
    kinds = [entry["type"] for entry in status["conditions"]]
    assert kinds == ["Accepted", "Available", "Progressing", "Ready"], "the order of the API"
    changed = status["conditions"][2:] if ready == "True" else status["conditions"][2:3]
    for failed in changed:
        assert (failed["status"], failed["reason"], failed["message"]) == (
            "False",
            "Forbidden",
            "no quota",
        )
        assert failed["observedGeneration"] == 3
    others = [entry for entry in status["conditions"] if entry not in changed]
    assert others == [one for one in planned["conditions"] if one in others]


def test_the_time_moves_only_when_the_status_flips() -> None:
    old = condition(ConditionType.PROGRESSING, "False")
    cluster = {"metadata": {}, "status": {"conditions": [old]}}
    for planned in ({}, {"conditions": [condition(ConditionType.PROGRESSING, "True", "later")]}):
        [failed] = with_failure(planned, cluster, "Forbidden", "no quota", NOW)["conditions"]
        assert failed["lastTransitionTime"] == old["lastTransitionTime"]


@pytest.mark.parametrize("first", [True, False])
def test_conditions_of_others_stay_with_who_wrote_them(first: bool) -> None:
    """Without a plan, the status that the cluster has is written. Others may have theirs in it."""
    theirs = condition("example.com/Checked", "False")
    ours = [condition(kind, "True") for kind in ("Accepted", "Progressing", "Ready")]
    live = {"conditions": [theirs, *ours] if first else [*ours, theirs]}
    cluster = {"metadata": {"generation": 3}, "status": live}
    found = with_failure(live, cluster, "Forbidden", "no", NOW)["conditions"]
    assert [one["type"] for one in found] == ["Accepted", "Progressing", "Ready"]
    assert found[0] == ours[0]
    assert found[1]["reason"] == found[2]["reason"] == "Forbidden"


@pytest.mark.parametrize("conditions", [None, "text", [None, 7, {}]])
def test_a_status_in_which_somebody_wrote_says_that_a_step_failed(conditions: Any) -> None:
    status = {"conditions": conditions, "model": "m"}
    cluster = {"metadata": {"generation": 3}, "status": status}
    written = with_failure(status, cluster, "Forbidden", "no", NOW)
    [failed] = written["conditions"]
    assert (failed["type"], failed["reason"]) == ("Progressing", "Forbidden")
    assert written["model"] == "m"
