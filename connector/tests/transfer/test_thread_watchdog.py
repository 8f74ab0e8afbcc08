"""When the watchdog of the transfer thread ends a worker, and when it must not."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf

from transfer_rig import receiver_of

from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.receiver import LOOKS, Receiver

LIMIT = 0.2


class Idle:
    """An executor with nothing to do."""

    busy = False
    due = inf
    options = ReceiverOptions(stall_seconds=60.0, fatal=lambda _: None)

    def __init__(self) -> None:
        self.clock: Callable[[], float] = partial(next, itertools.count(1.0))

    def tick(self) -> None:
        pass

    def turn(self) -> bool:
        return False

    def rebuild(self, failure: Failure, *, final: bool = False) -> None:
        assert final, failure


class Watched(Receiver):
    """A thread that does not run; ``look`` is called for each of the watchdog's looks."""

    look: Callable[[], float | None]

    @property
    def _works_since(self) -> float | None:
        return self.look()

    @_works_since.setter
    def _works_since(self, since: float | None) -> None:
        assert since is None


class Work:
    """The watched thread's state; ``look`` is called before each of the watchdog's looks."""

    def __init__(self, look: Callable[[int], float | None]) -> None:
        self.looks = 0
        self.now = 1000.0
        self.said: list[str] = []
        self.ended = threading.Event()
        self._look = look
        executor = Idle()
        executor.options = ReceiverOptions(stall_seconds=LIMIT, fatal=self.hangs)
        executor.clock = lambda: self.now
        self.thread = receiver_of(executor, Watched)
        self.thread.look = self.since

    def since(self) -> float | None:
        self.looks += 1
        return self._look(self.looks)

    def hangs(self, message: str) -> None:
        self.said.append(message)
        self.ended.set()

    def watch(self, looks: int) -> list[str]:
        """Let the watchdog look so many times, unless it speaks first."""
        self.thread._watchdog.start()
        until = time.monotonic() + 30
        while self.looks < looks and not self.ended.is_set():
            assert time.monotonic() < until
            time.sleep(0.01)
        self.thread._ended.set()
        self.thread._watchdog.join(30)
        return self.said


def test_work_that_never_ends_is_said_once() -> None:
    work = Work(lambda _: 1000.0)
    work.now += 2 * LIMIT
    said = work.watch(3 * LOOKS)
    assert len(said) == 1
    assert said[0].startswith("pdcluster-transfer-0-0 has been in one call for 0 s")
    assert work.looks == LOOKS, "it takes that many looks, and no more"


def test_a_process_that_was_stopped_for_long_goes_on() -> None:
    """The clock has jumped when the watchdog looks; the work that was cut ends soon after."""

    def look(number: int) -> float | None:
        if number == 2:
            work.now += 3600
        return 1000.0 if number <= 2 else work.now

    work = Work(look)
    assert work.watch(3 * LOOKS) == []


def test_work_that_was_late_and_has_ended_does_not_hang() -> None:
    """Each look finds another piece of work."""

    def look(_: int) -> float | None:
        work.now += LIMIT * 2
        return work.now - LIMIT * 1.5

    work = Work(look)
    assert work.watch(3 * LOOKS) == []


def test_a_thread_that_waits_for_work_may_wait_for_ever() -> None:
    work = Work(lambda _: None)
    work.now += 3600
    assert work.watch(3 * LOOKS) == []


def test_many_commands_are_not_one_long_piece_of_work() -> None:
    """A thousand requests that arrive at once may take longer together than one call may."""
    thread = receiver_of(Idle())
    begun: list[float | None] = []
    for _ in range(5):
        thread._inbox.put(lambda: begun.append(thread._works_since))
    thread.start()
    assert thread.close()
    assert None not in begun
    assert len(set(begun)) == len(begun) == 5
