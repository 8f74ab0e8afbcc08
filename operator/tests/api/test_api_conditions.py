"""How conditions are found, written and kept, whatever somebody wrote into a status."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.api.conditions import (
    ConditionType,
    find_condition,
    no,
    readable_reason,
    seconds,
    set_conditions,
    timestamp,
    unknown,
    yes,
)

NOW = 1_800_000_000.0
BEFORE = "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    "status",
    [
        None,
        [],
        "Ready",
        {},
        {"conditions": None},
        {"conditions": "Ready"},
        {"conditions": {"type": "Ready"}},
        {"conditions": [None, 7, "Ready", {"type": "Available", "status": "True"}, {}]},
    ],
)
def test_a_status_of_any_shape_is_looked_through(status: object) -> None:
    assert find_condition(status, "Ready") == {}


def test_of_two_conditions_of_one_type_the_first_counts() -> None:
    conditions = [7, {"type": "Ready", "status": "True"}, {"type": "Ready", "status": "False"}]
    assert find_condition({"conditions": conditions}, "Ready")["status"] == "True"


@pytest.mark.parametrize(
    ("before", "since"),
    [
        ({"status": "True", "lastTransitionTime": BEFORE}, BEFORE),
        ({"status": "False", "lastTransitionTime": BEFORE}, timestamp(NOW)),
        ({"status": "True"}, timestamp(NOW)),
        ({"lastTransitionTime": BEFORE}, timestamp(NOW)),
    ],
)
def test_the_time_of_a_condition_is_when_its_status_changed(
    before: dict[str, Any], since: str
) -> None:
    status = {"conditions": [{"type": "Ready", **before}]}
    [written] = set_conditions(status, [(ConditionType.READY, yes("Ready", "it serves"))], 3, NOW)
    assert written == {
        "type": "Ready", "status": "True", "reason": "Ready", "message": "it serves",
        "observedGeneration": 3, "lastTransitionTime": since,
    }  # fmt: skip


def test_a_message_of_any_length_is_written_as_far_as_it_goes() -> None:
    verdicts = [(ConditionType.READY, no("Failed", "x" * 2047 + "yz")),
                (ConditionType.ACCEPTED, unknown("Unsure"))]  # fmt: skip
    ready, accepted = set_conditions(None, verdicts, 1, NOW)
    assert ready["message"] == "x" * 2047 + "y"
    assert (ready["status"], accepted["status"], accepted["message"]) == ("False", "Unknown", "")


@pytest.mark.parametrize(
    ("reason", "readable"),
    [
        ("A", True), ("a9", True), ("Http410", True), ("A_b,c:d", True), ("A" * 256, True),
        ("A" * 257, False), ("", False), ("9a", False), ("_a", False), ("a:", False),
        ("a,", False), ("two words", False), ("Ready\n", False), ("é", False),
    ],
)  # fmt: skip
def test_a_reason_that_the_api_server_would_refuse_is_none(reason: str, readable: bool) -> None:
    assert readable_reason(reason) == (reason if readable else "ReasonUnreadable")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("2027-01-15T08:00:00Z", NOW),
        ("2027-01-15T08:00:00.500000Z", NOW + 0.5),
        ("2027-01-15T09:00:00+01:00", NOW),
        ("soon", None), ("", None), (None, None), (7, None), ([], None),
    ],
)  # fmt: skip
def test_a_time_is_read_as_kubernetes_writes_it(text: object, read: float | None) -> None:
    assert seconds(text) == read
    assert timestamp(NOW + 0.9) == "2027-01-15T08:00:00Z"
