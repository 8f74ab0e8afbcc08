"""An operator that has just started asks the engines that another one knew, before it judges."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.plan.lifecycle import (
    LONGEST_WAIT_SECONDS,
    wait_before_judging,
)

KNOWN: dict[str, Any] = {"status": {"engines": [{"name": "tiny-decode-a-0", "engineId": "d/1"}]}}
NEVER_HEARD: dict[str, Any] = {"status": {"engines": [{"name": "tiny-decode-a-0", "engineId": ""}]}}


@pytest.mark.parametrize(
    ("cluster", "followed", "all_heard", "wait"),
    [
        (KNOWN, 0.0, False, LONGEST_WAIT_SECONDS),
        (KNOWN, 2.0, False, LONGEST_WAIT_SECONDS - 2.0),
        (KNOWN, LONGEST_WAIT_SECONDS, False, 0.0),
        (KNOWN, LONGEST_WAIT_SECONDS + 60, False, 0.0),
        (KNOWN, 0.0, True, 0.0),
        (NEVER_HEARD, 0.0, False, 0.0),
        ({}, 0.0, False, 0.0),
    ],
)
def test_wait(cluster: dict[str, Any], followed: float, all_heard: bool, wait: float) -> None:
    assert wait_before_judging(cluster, followed_seconds=followed, all_heard=all_heard) == wait
