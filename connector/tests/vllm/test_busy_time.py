"""For how long an engine computes, as the calls of its steps tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdcluster_connector.vllm.scheduler_side.busy_time import LONGEST_STEP, BusyTime


class Counted:
    def __init__(self) -> None:
        self.times: list[float] = []

    def count(self, name: str, key: str, seconds: float) -> None:
        assert (name, key) == ("busy_seconds", "")
        self.times.append(seconds)


def told(*steps: tuple[float, int]) -> list[float]:
    """What is counted of steps at these moments, each with so many tokens."""
    stats, now = Counted(), SimpleNamespace(moment=0.0)
    collector: Any = stats
    busy = BusyTime(collector, lambda: now.moment)
    for now.moment, tokens in steps:
        busy.step(tokens)
    return stats.times


def test_steps_count_and_pauses_do_not() -> None:
    assert told((1.0, 8), (1.5, 8), (1.75, 0), (90.0, 8), (90.5, 0)) == [0.75, 0.5]


def test_a_request_that_waits_for_its_kv_is_no_work() -> None:
    assert told(*((step / 100, 0) for step in range(500))) == []


def test_it_is_told_once_a_second_and_no_second_is_lost() -> None:
    times = told(*((step / 100, 1) for step in range(1001)), (10.01, 0))
    assert len(times) == 11
    assert sum(times) == pytest.approx(10.01)


def test_a_machine_that_slept_has_not_computed() -> None:
    assert told((1.0, 8), (3601.0, 0)) == [LONGEST_STEP]
