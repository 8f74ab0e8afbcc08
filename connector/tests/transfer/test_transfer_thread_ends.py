"""What is reported when the transfer thread crashes or has ended."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

import pytest
from transfer_rig import receiver_of

from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.receiver import Receiver


class Executor:
    """Counts its turns; ``crashes`` says which of them raise."""

    busy = True
    due = inf

    def __init__(self, crashes: Callable[[int], bool] = lambda _: False) -> None:
        self.turns = 0
        self.rebuilt: list[Failure] = []
        self.ended: list[Failure] = []
        self.survives = False
        self.last = 0
        self.over = threading.Event()
        self._crashes = crashes
        self.options = ReceiverOptions(stall_seconds=1e6, fatal=lambda _: None)
        self.clock = partial(next, itertools.count(1.0))

    def tick(self) -> None:
        pass

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


def run(executor: Executor, turns: int) -> Receiver:
    """Run a thread until so many turns were begun, or until it ends by itself."""
    executor.last = turns
    thread = receiver_of(executor)
    thread.start()
    assert executor.over.wait(30)
    assert thread.close()
    return thread


@pytest.mark.parametrize(("crashes", "survives"), [(20, True), (21, False)])
def test_a_thread_survives_twenty_crashes_in_a_row_and_no_more(
    crashes: int, survives: bool
) -> None:
    executor = Executor(lambda turn: turn <= crashes)
    thread = run(executor, 25)
    assert len(executor.rebuilt) == 20
    assert executor.rebuilt[0].message == "RuntimeError: turn 1"
    assert thread._dead is not None
    assert executor.ended == [thread._dead]
    said = "the receiver is closed" if survives else "the transfer thread died: RuntimeError: turn"
    assert thread._dead.message.startswith(said)


def test_crashes_between_turns_that_go_well_end_no_thread() -> None:
    executor = Executor(lambda turn: turn % 20 != 0)
    thread = run(executor, 100)
    assert len(executor.rebuilt) >= 95
    assert thread._dead is not None
    assert thread._dead.message == "the receiver is closed"


def test_an_agent_that_survives_the_thread_ends_the_worker() -> None:
    executor, said = Executor(), list[str]()
    executor.survives = True
    executor.options = replace(executor.options, fatal=said.append)
    thread = receiver_of(executor)
    thread.start()
    assert thread.close()
    assert said == ["the reading agent cannot be destroyed: it does not go"]


def test_a_thread_that_never_ran_ends_what_it_was_given() -> None:
    executor, done = Executor(), list[str]()
    thread = receiver_of(executor)
    thread._inbox.put(lambda: done.append("before"))
    thread._inbox.put(lambda: 1 // 0)
    thread._inbox.put(lambda: done.append("behind one that fails"))
    assert thread.close()
    assert [failure.message for failure in executor.ended] == [
        "the receiver was closed before it started"
    ]
    assert done == ["before", "behind one that fails"]
    thread._inbox.put(lambda: done.append("later"))
    thread._drain()
    assert done[-1] == "later"
