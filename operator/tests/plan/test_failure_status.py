"""A failed step shows in Progressing, and in Ready if nothing else is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pdcluster_operator.api.conditions import ConditionType
from pdcluster_operator.plan.status.events import transitions
from pdcluster_operator.plan.status.progress import (
    FAILING_SECONDS,
    with_failure,
    without_plan,
)
from pdcluster_operator.runtime.interfaces import ApiError

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


@pytest.mark.parametrize(
    ("why", "reason", "said"),
    [
        ("PodsMissing", "TemplateRefused", "TemplateRefused"),
        ("PodsMissing", "Invalid", "Invalid"),
        ("PodsMissing", "ServiceUnavailable", "PodsMissing"),
        ("EngineFailed", "TemplateRefused", "EngineFailed"),
    ],
)
@pytest.mark.parametrize("seconds", [0.0, FAILING_SECONDS])
def test_a_refusal_is_why_engines_have_no_pods(
    why: str, reason: str, said: str, seconds: float
) -> None:
    """An outage is not, and an engine that has pods has its own reason."""
    ready = {**condition("Ready", "False"), "reason": why}
    planned = {"conditions": [condition("Progressing", "True"), ready]}
    outage = seconds if ApiError(reason, "").is_outage else math.inf
    status = with_failure(planned, {"metadata": {}}, reason, "Duplicate value", NOW, outage)
    assert [one["reason"] for one in status["conditions"]] == [reason, said]


def test_the_time_moves_only_when_the_status_flips() -> None:
    old = condition(ConditionType.PROGRESSING, "False")
    cluster = {"metadata": {}, "status": {"conditions": [old]}}
    for status in ("True", "False"):
        planned = {"conditions": [condition(ConditionType.PROGRESSING, status, "later")]}
        [failed] = with_failure(planned, cluster, "Forbidden", "no quota", NOW)["conditions"]
        assert failed["lastTransitionTime"] == old["lastTransitionTime"]


@pytest.mark.parametrize("first", [True, False])
def test_conditions_of_others_stay_with_who_wrote_them(first: bool) -> None:
    """Without a plan, nothing is known. Others may have conditions of theirs in the status."""
    theirs = condition("example.com/Checked", "False")
    ours = [condition(kind, "True") for kind in ("Accepted", "Progressing", "Ready")]
    live = {"conditions": [theirs, *ours] if first else [*ours, theirs], "model": "m"}
    cluster = {"metadata": {"generation": 3}, "status": live}
    written = without_plan(cluster, "PlanFailed", "a bug", NOW)
    assert written["model"] == "m"
    found = {one["type"]: one for one in written["conditions"]}
    assert list(found) == list(ConditionType)
    assert {one["reason"] for one in found.values()} == {"PlanFailed"}
    assert found.pop("Progressing")["status"] == "False"
    assert {one["status"] for one in found.values()} == {"Unknown"}


@pytest.mark.parametrize("status", [None, 7, {}, *({"conditions": c} for c in (None, "text", [7]))])
def test_a_status_in_which_somebody_wrote_says_that_no_plan_was_made(status: Any) -> None:
    cluster = {"metadata": {"generation": 3}, "status": status}
    written = without_plan(cluster, "PlanFailed", "a bug", NOW)
    assert [one["type"] for one in written["conditions"]] == list(ConditionType)


OUTAGES = (
    *("ApiServerUnreachable", "InternalError", "ServerTimeout", "ServiceUnavailable", "Timeout"),
    *("TooManyRequests", "Http429", "Http500", "Http502"),
)
REFUSALS = ("Invalid", "Forbidden", "BadRequest")
OTHERS = ("Conflict", "NameConflict", "NamespaceTerminating", "NotFound", "Http413", "TimeoutXY")


def test_a_reason_is_a_refusal_or_an_outage_or_neither() -> None:
    for reason in (*OUTAGES, *REFUSALS, *OTHERS):
        error = ApiError(reason, "why")
        assert (error.refuses, error.is_outage) == (reason in REFUSALS, reason in OUTAGES), reason


@pytest.mark.parametrize("reason", OUTAGES)
@pytest.mark.parametrize("before", ["True", "False"])
def test_a_fault_of_the_api_server_leaves_ready_for_half_a_minute(reason: str, before: str) -> None:
    """Nothing that was verified is gone, and the server is mostly back in seconds.

    An operator that has just started does not know for how long: what is False stays so.
    """
    planned = {"conditions": [condition(kind, "True") for kind in ("Progressing", "Ready")]}
    cluster = {"metadata": {}, "status": {"conditions": [condition("Ready", before)]}}
    for outage, ready in ((0.0, before), (FAILING_SECONDS, "False"), (math.inf, "False")):
        status = with_failure(planned, cluster, reason, "try again later", NOW, outage)
        assert [one["status"] for one in status["conditions"]] == ["False", ready]


def test_a_name_that_belongs_to_others_is_one_event_while_steps_are_refused() -> None:
    """The plan says it each time, and the refusal comes after it."""
    cluster: dict[str, Any] = {"metadata": {}, "status": {}}
    published = []
    for reason in ("", "Forbidden", "", "Forbidden", "Forbidden"):
        ready = [condition(kind, "True") for kind in ("Progressing", "Ready")]
        why = "NameConflict", "ConfigMap c is missing"
        planned = with_failure({"conditions": ready}, cluster, *why, NOW)
        published += transitions(cluster["status"], planned, secured=True)
        written = planned
        if reason:
            written = with_failure(planned, cluster, reason, "no quota", NOW)
            published += transitions(cluster["status"], written, secured=True, refused=True)
            [progress, _] = written["conditions"]
            assert progress["reason"] == "NameConflict"
            assert progress["message"] == "ConfigMap c is missing; Forbidden: no quota"
        cluster["status"] = written
    assert [one.reason for one in published] == ["NameConflict"]
