"""Which prompts that decode computes are a fault, and what the metric calls them."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.prompt_outcomes import (
    LocalReason,
    Outcome,
    asks_for_local,
    is_fault,
    was_due,
)

NO_FAULT = {
    "CacheReset",
    "LocalByRouter",
    "PrefixHit",
    "PrefixReadingOff",
    "Requested",
    "ShortPrompt",
}


def test_a_prompt_is_no_fault_for_six_reasons_and_only_if_no_transfer_was_tried() -> None:
    names = {reason.value for reason in (*Reason, *LocalReason)}
    assert {name for name in names if not was_due("local", name)} == NO_FAULT
    assert {name for name in names if not is_fault("local", name)} == NO_FAULT
    for outcome in (Outcome.TRANSFERRED, Outcome.RECOMPUTED, Outcome.FAILED):
        assert all(was_due(outcome, name) for name in names)


@pytest.mark.parametrize(
    ("params", "asked"),
    [
        ({"local_prefill": True}, True),
        ({"local_prefill": 1}, False),
        ({"local_prefill": "true"}, False),
        ({}, False),
        (None, False),
        ([], False),
    ],
)
def test_only_true_asks_for_it(params: Any, asked: bool) -> None:
    assert asks_for_local(params) is asked
