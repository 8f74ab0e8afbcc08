"""The transfer thread's timers, and what is told when the thread crashes or has ended."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from math import inf

import pytest

from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.transfer.transfer_thread import Timers, TransferThread


class Executor:
    """Counts its turns; ``crashes`` says which of them raise."""

    busy = True

    def __init__(self, crashes: Callable[[int], bool] = lambda _: False) -> None:
        self.turns = 0
        self.rebuilt: list[Failure] = []
        self.ended: list[Failure] = []
        self.survives = False
        self.last = 0
        self.over = threading.Event()
        self._crashes = crashes

    def time_is_up(self, serial: int) -> None:
        raise AssertionError(serial)

    def turn(self) -> bool:
        self.turns += 1
        if self.turns == self.last:
            self.over.set()
        if self._crashes(self.turns):
            raise RuntimeError(f"turn {self.turns}")
        return False

    def rebuild(self, failure: Failure, *, final: bool = False) -> None:
        (self.ended if final else self.rebuilt).append(failure)
        if final:
            self.over.set()
        if final and self.survives:
            raise OSError("it does not go")


def thread_of(executor: Executor, fatal: Callable[[str], None] = lambda _: None) -> TransferThread:
    ticks = itertools.count(1.0)
    return TransferThread(
        "worker",
        executor,
        Timers(),
        prepare=lambda: None,
        clock=lambda: next(ticks),
        fatal=fatal,
        stall_seconds=1e6,
    )


def run(executor: Executor, turns: int) -> TransferThread:
    """Run a thread until so many turns were begun, or until it ends by itself."""
    executor.last = turns
    thread = thread_of(executor)
    thread.start(30)
    assert executor.over.wait(30)
    assert thread.stop(30)
    return thread


@pytest.mark.parametrize(("crashes", "survives"), [(20, True), (21, False)])
def test_a_thread_survives_twenty_crashes_in_a_row_and_no_more(
    crashes: int, survives: bool
) -> None:
    executor = Executor(lambda turn: turn <= crashes)
    thread = run(executor, 25)
    assert len(executor.rebuilt) == 20
    assert executor.rebuilt[0].message == "RuntimeError: turn 1"
    assert thread.dead is not None
    assert executor.ended == [thread.dead]
    said = "the receiver is closed" if survives else "the transfer thread died: RuntimeError: turn"
    assert thread.dead.message.startswith(said)


def test_crashes_between_turns_that_go_well_end_no_thread() -> None:
    executor = Executor(lambda turn: turn % 20 != 0)
    thread = run(executor, 100)
    assert len(executor.rebuilt) >= 95
    assert thread.dead is not None
    assert thread.dead.message == "the receiver is closed"


def test_an_agent_that_survives_the_thread_ends_the_worker() -> None:
    executor, said = Executor(), list[str]()
    executor.survives = True
    thread = thread_of(executor, said.append)
    thread.start(30)
    assert thread.stop(30)
    assert said == ["the reading agent cannot be destroyed: it does not go"]


def test_a_thread_that_never_ran_ends_what_it_was_given() -> None:
    executor, done = Executor(), list[str]()
    thread = thread_of(executor)
    thread.put(lambda: done.append("before"))
    thread.put(lambda: 1 // 0)
    thread.put(lambda: done.append("behind one that fails"))
    assert thread.stop(0)
    assert [failure.message for failure in executor.ended] == [
        "the receiver was closed before it started"
    ]
    assert done == ["before", "behind one that fails"]
    thread.put(lambda: done.append("later"))
    thread.drain()
    assert done[-1] == "later"


def test_a_timer_runs_out_at_its_time_and_once() -> None:
    timers = Timers()
    assert timers.next == inf
    timers.set(1, 10.0)
    timers.set(2, 5.0)
    timers.set(3, 7.0)
    assert timers.next == 5.0
    assert timers.run_out(4.9) == []
    assert timers.run_out(7.0) == [2, 3]
    assert timers.run_out(9.0) == []
    assert timers.run_out(11.0) == [1]
    assert timers.run_out(11.0) == []
    assert timers.next == inf


@pytest.mark.parametrize(("moved", "at"), [(3.0, 3.0), (20.0, 20.0)])
def test_a_timer_that_is_set_again_runs_out_at_its_new_time_alone(moved: float, at: float) -> None:
    timers = Timers()
    timers.set(1, 10.0)
    timers.set(1, moved)
    assert timers.next == at
    assert timers.run_out(at - 0.1) == []
    assert timers.run_out(1000.0) == [1]


def test_a_timer_without_a_time_does_not_run_out() -> None:
    timers = Timers()
    timers.set(1, 10.0)
    timers.set(2, 11.0)
    timers.set(1, inf)
    timers.set(1, inf)
    timers.set(3, inf)
    assert timers.next == 11.0
    assert timers.run_out(1000.0) == [2]


def test_a_timer_that_has_run_out_may_be_set_to_the_same_time() -> None:
    timers = Timers()
    timers.set(1, 10.0)
    assert timers.run_out(10.0) == [1]
    timers.set(1, 10.0)
    assert timers.run_out(10.0) == [1]


def test_timers_that_move_all_the_time_take_no_more_room() -> None:
    """Leases are renewed every few seconds, for as long as a receive lasts."""
    timers = Timers()
    for turn in range(1000):
        for serial in range(10):
            timers.set(serial, 1000.0 + turn + serial)
        assert len(timers._heap) <= 2 * 10 + 64
    assert timers.next == 1999.0
    assert timers.run_out(1e9) == list(range(10))
