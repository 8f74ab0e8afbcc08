"""Which conditions become events, and which of these are warnings."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.api.conditions import ConditionType, Status, StatusReason
from pdcluster_operator.plan.status.events import transitions

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


def test_a_cluster_without_tls_is_told_so_once() -> None:
    accepted = status(ConditionType.ACCEPTED, Status.TRUE, "PartiallyChecked")
    events = transitions(None, accepted, secured=False)
    assert [event.reason for event in events] == ["PartiallyChecked", "InsecureSideChannel"]
    assert len(transitions(None, accepted, secured=True)) == 1
    refused = status(ConditionType.ACCEPTED, Status.FALSE, "Refused")
    assert len(transitions(None, refused, secured=False)) == 1
    assert len(transitions(refused, accepted, secured=False)) == 1, "the cluster is not new"
