"""Which conditions become events, and which of these are warnings."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.api.conditions import ConditionType, Status, StatusReason
from pdcluster_operator.plan.status.build import transitions

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
        (ConditionType.PROGRESSING, Status.FALSE, "Complete", "Normal"),
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
