"""Which conditions become events, and which of these are warnings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from rough_world import World

from pdcluster_operator.api.conditions import ConditionType, Status, StatusReason
from pdcluster_operator.plan.status.events import transitions
from pdcluster_operator.plan.types import Event
from pdcluster_operator.runtime import reconcile
from pdcluster_operator.runtime.interfaces import Invalid

WAS = {"True": "False", "False": "True", "Unknown": "True"}


def status(kind: str, value: str, reason: str) -> dict[str, Any]:
    condition = {"type": kind, "status": value, "reason": reason, "message": "so it is"}
    return {"conditions": [condition]}


@pytest.mark.parametrize(
    ("kind", "value", "reason", "expected"),
    [
        (ConditionType.AVAILABLE, Status.FALSE, "NoEngines", "Warning"),
        (ConditionType.AVAILABLE, Status.UNKNOWN, "NoEngines", "Normal"),
        (ConditionType.AVAILABLE, Status.TRUE, "EnginesReady", "Normal"),
        (ConditionType.AVAILABLE, Status.UNKNOWN, "LauncherUnreachable", "Warning"),
        (ConditionType.PROGRESSING, Status.FALSE, "Complete", "Normal"),
        (ConditionType.PROGRESSING, Status.FALSE, "ProgressDeadlineExceeded", "Warning"),
        (ConditionType.PROGRESSING, Status.FALSE, "TemplateRefused", "Warning"),
        (ConditionType.PROGRESSING, Status.FALSE, "InsufficientCapacity", "Warning"),
        (ConditionType.READY, Status.FALSE, StatusReason.SCALED_TO_ZERO, "Normal"),
        (ConditionType.READY, Status.FALSE, "Waiting", "Warning"),
        (ConditionType.READY, Status.TRUE, "Ready", "Normal"),
    ],
)
def test_only_what_is_bad_is_a_warning(
    kind: ConditionType, value: Status, reason: str, expected: str
) -> None:
    before = status(kind, WAS[value], "Before")
    (event,) = transitions(before, status(kind, value, reason), secured=True)
    assert event.type == expected
    assert event.reason == reason
    assert event.message == f"{kind} is {value}: so it is"
    assert (
        transitions(status(kind, value, "Before"), status(kind, value, reason), secured=True) == ()
    )


@pytest.mark.parametrize(
    ("was", "reason", "refused", "warned"),
    [
        ("Complete", "TemplateRefused", True, True),
        ("Complete", "Forbidden", True, True),
        ("Complete", "InsufficientCapacity", False, True),
        ("Paused", "TemplateRefused", True, True),
        ("NotAccepted", "Invalid", True, True),
        ("Complete", "NotAccepted", False, False),  # Accepted says so
        ("Complete", "Paused", False, False),
        ("Complete", "StillBeingDeleted", True, False),
        ("Complete", "ServiceUnavailable", False, False),
        ("TemplateRefused", "ProgressDeadlineExceeded", False, False),
        ("Forbidden", "TemplateRefused", True, False),
    ],
)
def test_a_change_that_is_refused_is_a_warning_although_progressing_was_false(
    was: str, reason: str, refused: bool, warned: bool
) -> None:
    """A cluster that is Ready has nothing left to do, so its Progressing is False."""
    found = transitions(
        status(ConditionType.PROGRESSING, Status.FALSE, was),
        status(ConditionType.PROGRESSING, Status.FALSE, reason),
        secured=True,
        refused=refused,
    )
    assert [(one.type, one.reason, one.message) for one in found] == (
        [("Warning", reason, "Progressing is False: so it is")] if warned else []
    )


def test_a_refusal_is_said_once_if_ready_repeats_it() -> None:
    was = {"observedGeneration": 1, **all_of("True", "Complete", "False")}
    now = {"observedGeneration": 2, **all_of("False", "Invalid", "False")}
    found = transitions(was, now, secured=True, refused=True)
    assert [(one.type, one.message) for one in found] == [
        ("Warning", "Progressing is False: so it is")
    ]


@pytest.mark.parametrize("reason", ["TemplateRefused", "Complete", "PodsMissing"])
def test_the_first_status_warns_only_of_what_somebody_has_to_mend(reason: str) -> None:
    """A new cluster is not Ready yet, and one without engines has nothing to do."""
    after = {
        "conditions": [
            status(kind, Status.FALSE, reason)["conditions"][0]
            for kind in (ConditionType.PROGRESSING, ConditionType.READY)
        ]
    }
    found = transitions(None, after, secured=True)
    warned = [("Warning", "TemplateRefused", "Progressing is False: so it is")]
    assert [(one.type, one.reason, one.message) for one in found] == (
        warned if reason == "TemplateRefused" else []
    )


def both(ready: Status, available: Status) -> dict[str, Any]:
    kinds = {ConditionType.READY: ready, ConditionType.AVAILABLE: available}
    found = [status(kind, value, "Because")["conditions"][0] for kind, value in kinds.items()]
    return {"conditions": found}


def test_ready_speaks_for_the_others_only_when_it_becomes_true() -> None:
    yes, no = Status.TRUE, Status.FALSE
    (event,) = transitions(both(no, no), both(yes, yes), secured=True)
    assert event.message.startswith("Ready is True")
    (event,) = transitions(both(yes, yes), both(yes, no), secured=True)
    assert event.message.startswith("Available is False")


def test_ready_speaks_for_its_reason_when_it_stops_being_true() -> None:
    was = {"observedGeneration": 1, **all_of("True", "Complete", "False")}
    lost = {"observedGeneration": 1, **all_of("False", "PodsMissing", "True")}
    (event,) = transitions(was, lost, secured=True)
    assert (event.type, event.reason) == ("Warning", "PodsMissing")
    assert event.message.startswith("Ready is False")
    (event,) = transitions(was, {**lost, "observedGeneration": 2}, secured=True)
    assert event.type == "Normal", "somebody changed the spec"
    broken = {"observedGeneration": 2, **all_of("False", "EngineFailed", "True")}
    (event,) = transitions(was, broken, secured=True)
    assert event.type == "Warning", "an engine that crashes is trouble, whatever was changed"
    given_up = {"observedGeneration": 1, **all_of("False", "PodsMissing", "False")}
    progressing = next(one for one in given_up["conditions"] if one["type"] == "Progressing")
    progressing["reason"] = "ProgressDeadlineExceeded"
    was["conditions"][1]["status"] = "True"
    kinds = [event.message.split(" is ")[0] for event in transitions(was, given_up, secured=True)]
    assert kinds == ["Progressing", "Ready"]


def all_of(ready: str, reason: str, progressing: str) -> dict[str, Any]:
    kinds = {"DecodeReady": ready, "Progressing": progressing, "Ready": ready}
    return {
        "conditions": [
            {"type": kind, "status": value, "reason": reason, "message": "so it is"}
            for kind, value in kinds.items()
        ]
    }


def test_a_cluster_without_tls_is_told_so_once() -> None:
    accepted = status(ConditionType.ACCEPTED, Status.TRUE, "PartiallyChecked")
    (event,) = transitions(None, accepted, secured=False)
    assert (event.type, event.reason) == ("Warning", "InsecureSideChannel")
    refused = status(ConditionType.ACCEPTED, Status.FALSE, "Refused")
    for before, after in ((None, refused), (refused, accepted), (accepted, accepted)):
        reasons = [event.reason for event in transitions(before, after, secured=False)]
        assert "InsecureSideChannel" not in reasons, "the cluster is not new, or is refused"


def test_that_a_spec_is_accepted_is_an_event_only_if_it_was_not() -> None:
    accepted = status(ConditionType.ACCEPTED, Status.TRUE, "PartiallyChecked")
    refused = status(ConditionType.ACCEPTED, Status.FALSE, "Refused")
    assert transitions(None, accepted, secured=True) == ()
    for before, after, kind in ((None, refused, "Warning"), (refused, accepted, "Normal")):
        assert [event.type for event in transitions(before, after, secured=True)] == [kind]


@pytest.mark.parametrize(
    ("kind", "before", "after", "told"),
    [
        (ConditionType.READY, Status.FALSE, Status.UNKNOWN, False),
        (ConditionType.AVAILABLE, Status.UNKNOWN, Status.FALSE, False),
        (ConditionType.AVAILABLE, Status.TRUE, Status.UNKNOWN, True),
        (ConditionType.DECODE_READY, Status.UNKNOWN, Status.FALSE, True),
        (ConditionType.DECODE_READY, Status.TRUE, Status.UNKNOWN, False),
        (ConditionType.DECODE_READY, Status.FALSE, Status.TRUE, False),
        (ConditionType.PROGRESSING, Status.FALSE, Status.UNKNOWN, True),
    ],
)
def test_only_a_flip_that_says_something_new_is_an_event(
    kind: ConditionType, before: Status, after: Status, told: bool
) -> None:
    """An engine that starts takes its conditions through Unknown and False to True."""
    found = transitions(status(kind, before, "A"), status(kind, after, "B"), secured=True)
    assert [event.reason for event in found] == ["B"] * told


class Audience(World):
    """A world that keeps the events."""

    heard: ClassVar[list[Event]] = []

    async def publish(self, cluster: Any, events: Any) -> None:
        self.heard += events


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("", {"engine": {"blockSize": 32}}),
        ("StatefulSet", {"decode": {"replicas": 2}}),
        ("Deployment", {"router": {"replicas": 2}}),
        ("PodDisruptionBudget", {"decode": {"replicas": 2}}),
    ],
)
async def test_a_change_of_a_ready_cluster_that_the_api_server_refuses_is_one_warning(
    kind: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: World.monotonic)
    monkeypatch.setattr(reconcile, "time", clock)
    world = Audience({})

    async def rounds(times: int) -> list[str]:
        world.heard.clear()
        for _ in range(times):
            await world.reconcile()
            world.turn(31.0)
        return [f"{one.reason}: {one.message}" for one in world.heard if one.type == "Warning"]

    await rounds(15)
    assert world.condition("Ready")["status"] == "True"
    if kind:
        world.refusals[kind] = Invalid("the object is invalid")
    else:
        world.refused_template = "the object is invalid"
    world.edit(**change)
    reason = "Invalid" if kind else "TemplateRefused"
    assert await rounds(10) == [f"{reason}: Progressing is False: the object is invalid"]
    world.refusals.clear()
    world.refused_template = ""
    await rounds(15)
    assert world.condition("Ready")["status"] == "True"
