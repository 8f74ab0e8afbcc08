"""A work queue of keys. At most one worker works on a key at a time.

An event says only *which* object may have changed. The reconcile then reads the state as it is.
So the queue keeps keys, not events. Adding a key that is queued changes nothing. Adding a key
that a worker has makes it run once more afterwards. A failed key comes back after a delay that
doubles with each failure; other keys do not wait for it.

:mod:`.lines` says which key is next.

A key that a worker has had rests for a moment, unless its spec changes. New objects cause a dozen
events within a second, and one look at all of them is enough.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pdcluster_operator.runtime.idle_workers import IdleWorkers
from pdcluster_operator.runtime.lines import HOLD_SECONDS, Lines
from pdcluster_operator.runtime.shares import most_given

log = logging.getLogger(__name__)


WORKERS = 24
"""Keys that are worked on at once, 18 of them of one namespace if no other has any.

A worker waits for the API server most of its time.
"""
REST_SECONDS, LONGEST_REST = 0.5, 5.0
"""How long a key rests that was worked on: the longer, the more keys rest."""
LOOKS_A_SECOND = 50.0
"""Keys that come back from their rest, while many are worked on. A look takes some milliseconds."""


class Key(NamedTuple):
    """A PDCluster, by name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


Handler = Callable[[Key], Awaitable["float | None"]]
"""Works on one key; returns seconds until it wants to run again, or None. Raising retries."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delay after the n-th failure in a row: ``first * 2**(n-1)``, at most ``last``, jittered."""

    first: float = 1.0
    last: float = 300.0
    jitter: float = 0.2

    def delay(self, failures: int, uniform: Callable[[float, float], float]) -> float:
        """Seconds to wait after ``failures`` (at least 1) failures in a row."""
        exponent = min(failures - 1, 30)
        return min(self.first * 2.0**exponent, self.last) * uniform(
            1 - self.jitter, 1 + self.jitter
        )


class KeyedQueue:
    """Runs a handler over keys. Every method must be called on the event loop's thread.

    Args:
        is_urgent: whether somebody still waits for a key that comes back after a while.
        is_new, is_silent: see :class:`.lines.Lines`.
        rest: see ``REST_SECONDS``.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        is_urgent: Callable[[Key], bool] = lambda _: False,
        is_new: Callable[[Key], bool] = lambda _: False,
        is_silent: Callable[[Key], bool] = lambda _: False,
        workers: int = WORKERS,
        rest: float = REST_SECONDS,
        backoff: Backoff | None = None,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._handler = handler
        self._was_never_made = is_new
        self._is_urgent = is_urgent
        self._workers = workers
        self._rest = rest
        self._backoff = backoff or Backoff()
        self._uniform = uniform
        self._lines = Lines(workers, _namespace_of, self._is_new, is_silent, _now)
        self._resting: dict[Key, bool] = {}  # whether it was added meanwhile
        self._running: set[Key] = set()
        self._again: dict[Key, bool] = {}  # added while a worker has it: whether it is urgent
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._idle = IdleWorkers()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, key: Key, *, urgent: bool = False) -> None:
        """Queue ``key``. A worker takes it as soon as one is free.

        Args:
            urgent: somebody waits for it.
        """
        if self._stopping:
            return
        if key in self._running:
            self._again[key] = urgent or self._again.get(key, False)
            return
        if key in self._resting and not urgent and key not in self._lines:
            self._resting[key] = True
            return
        self._lines.add(key, urgent=urgent)
        self._idle.wake()

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue ``key`` in ``seconds``, unless it is due earlier already."""
        if self._stopping:
            return
        loop = asyncio.get_running_loop()
        held = self._timers.get(key)
        if held is not None:
            if held.when() <= loop.time() + seconds:
                return
            held.cancel()
        self._timers[key] = loop.call_later(max(seconds, 0.0), self._due, key)

    def resync(self, keys: Iterable[Key], *, within: float) -> None:
        """Add every key at a random moment of the next ``within`` seconds."""
        for key in keys:
            self.add_after(key, self._uniform(0.0, within))

    def failures(self, key: Key) -> int:
        """Failures in a row of this key."""
        return self._failures.get(key, 0)

    @property
    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._lines) + sum(self._resting.values())

    @property
    def new(self) -> int:
        """New keys that wait for a worker, but for namespaces in which something hangs."""
        return self._lines.new

    def start(self) -> None:
        """Start the workers on the running loop."""
        self._tasks = [
            asyncio.create_task(self._work(), name=f"reconcile-{index}")
            for index in range(most_given(self._workers))
        ]

    async def stop(self, *, grace: float = 5.0) -> None:
        """Take no more keys, and cancel handlers that still run after ``grace`` seconds."""
        self._stopping = True
        self._lines.clear()
        self._resting.clear()
        self._again.clear()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._idle.wake_all()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_new(self, key: Key) -> bool:
        """Whether others should wait for it. They do not wait for a key that fails."""
        return key not in self._failures and self._was_never_made(key)

    def _due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key, urgent=self._is_urgent(key))

    async def _next(self) -> Key | None:
        while not self._stopping:
            if (key := self._lines.take()) is not None:
                self._running.add(key)
                if (timer := self._timers.pop(key, None)) is not None:
                    timer.cancel()  # this run says when the next one has to be
                if self._lines:
                    self._idle.wake()  # what could not be taken before may be taken now
                return key
            await self._idle.wait(look_again=bool(self._lines))
        return None

    def _let_rest(self, key: Key, *, again: bool) -> None:
        self._resting[key] = again
        seconds = min(LONGEST_REST, max(self._rest, len(self._resting) / LOOKS_A_SECOND))
        asyncio.get_running_loop().call_later(seconds, self._rested, key)

    def _rested(self, key: Key) -> None:
        if self._resting.pop(key, False):
            self.add(key)

    async def _work(self) -> None:
        while (key := await self._next()) is not None:
            failed = True
            try:
                again_after = await self._handler(key)
            except Exception as error:  # noqa: BLE001 - any failure of one key is retried alone
                self._failures[key] = self._failures.get(key, 0) + 1
                again_after = self._backoff.delay(self._failures[key], self._uniform)
                log.warning("%s: %s; trying again in %.1f s", key, error, again_after)
            else:
                self._failures.pop(key, None)
                failed = False
            finally:
                self._running.discard(key)
                if self._lines.done(key, failed=failed):
                    seconds = HOLD_SECONDS + REST_SECONDS
                    asyncio.get_running_loop().call_later(seconds, self._idle.wake)
            again = self._again.pop(key, None)
            if again:
                self.add(key, urgent=True)
                continue
            self._let_rest(key, again=again is not None)
            if again is None and again_after is not None:
                self.add_after(key, again_after)


def _namespace_of(key: Key) -> str:
    return key.namespace


def _now() -> float:
    return asyncio.get_running_loop().time()
