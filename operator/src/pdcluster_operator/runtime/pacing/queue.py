"""A work queue of keys: a key is reconciled by at most one worker at a time.

An event says only *which* object may have changed. The reconcile then reads the state as it is.
So the queue keeps keys, not events. Adding a key that is queued changes nothing. Adding a key
that is being reconciled requeues it once it is done. A key that failed is requeued after a delay
that doubles with each failure; other keys do not wait for it.

Which key is next: urgent keys, whose spec was changed, and the others take turns, and so do
namespaces; see :mod:`.fair_slots`. A changed spec therefore does not wait behind a thousand new
PDClusters.

A key that was reconciled rests for half a second, unless its spec changes. Objects that were just
created cause a dozen events within a second, and one reconcile is enough for all of them.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from pdcluster_operator.runtime.interfaces import Key
from pdcluster_operator.runtime.pacing.fair_slots import FairSlots

log = logging.getLogger(__name__)

WORKERS = 24
"""Keys that are reconciled at once, 18 of them of one namespace if no other has any.

A reconcile waits for the API server most of its time.
"""
RECONCILE_HANGS_SECONDS = 15.0
"""A reconcile that takes longer hangs. While many PDClusters start, some take several seconds."""
REST_SECONDS = 0.5
"""How long a key rests. Without it, a new PDCluster is reconciled 13 times until it is Ready, and
not 9 times (``operator/tests/runtime/test_crowd.py``), and one that never stops reporting changes
without a pause."""

Handler = Callable[[Key], Awaitable["float | None"]]
"""Reconciles one key; returns seconds after which to requeue it, or None. Raising retries."""


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
        is_urgent: whether a key whose delay has passed is queued as an urgent one.
        rest: seconds for which a key rests.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        is_urgent: Callable[[Key], bool] = lambda _: False,
        workers: int = WORKERS,
        rest: float = REST_SECONDS,
        backoff: Backoff | None = None,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._handler = handler
        self._is_urgent = is_urgent
        self._rest = rest
        self._backoff = backoff or Backoff()
        self._uniform = uniform
        self._slots = FairSlots(workers, RECONCILE_HANGS_SECONDS, self._start)
        self._resting: dict[Key, bool] = {}  # whether it was added meanwhile
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._again: dict[Key, bool] = {}  # added while it is reconciled: whether it is urgent
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._started = self._stopping = False

    def add(self, key: Key, *, urgent: bool = False) -> None:
        """Queue a key.

        Args:
            urgent: its spec was changed, and somebody waits for the result.
        """
        if self._stopping:
            return
        if key in self._running:
            self._again[key] = urgent or self._again.get(key, False)
            return
        if key in self._resting and not urgent and not self._slots.waits(key):
            self._resting[key] = True
            return
        self._slots.add(key, urgent=urgent)
        self._hand_out()

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue a key in ``seconds``, unless it is due earlier already."""
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
        """Queue every key at a random moment of the next ``within`` seconds."""
        for key in keys:
            self.add_after(key, self._uniform(0.0, within))

    def failures(self, key: Key) -> int:
        """Return the number of failures in a row of this key."""
        return self._failures.get(key, 0)

    @property
    def depth(self) -> int:
        """Number of keys that wait for a worker, or for the end of their rest."""
        return len(self._slots) + sum(self._resting.values())

    def waiting(self) -> int:
        """Return how many keys wait for a worker, but for namespaces in which something hangs."""
        return self._slots.waiting()

    def start(self) -> None:
        """Begin to reconcile on the running loop."""
        self._started = True
        self._hand_out()

    async def stop(self, *, grace: float = 5.0) -> None:
        """Take no more keys, and cancel handlers that still run after ``grace`` seconds."""
        self._stopping = True
        self._slots.clear()
        self._resting.clear()
        self._again.clear()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if tasks := list(self._running.values()):
            _, late = await asyncio.wait(tasks, timeout=grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _hand_out(self) -> None:
        if self._started:
            self._slots.hand_out()

    def _start(self, key: Key) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()  # this reconcile says when the next one has to be
        self._running[key] = asyncio.create_task(self._work(key), name=f"reconcile {key}")

    def _due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key, urgent=self._is_urgent(key))

    async def _work(self, key: Key) -> None:
        requeue_after: float | None = None
        try:
            requeue_after = await self._handler(key)
        except Exception as error:  # noqa: BLE001 - any failure of one key is retried alone
            self._failures[key] = self._failures.get(key, 0) + 1
            requeue_after = self._backoff.delay(self._failures[key], self._uniform)
            log.warning("%s: %s; trying again in %.1f s", key, error, requeue_after)
        else:
            self._failures.pop(key, None)
        finally:
            del self._running[key]
            self._slots.done(key)
        again = self._again.pop(key, None)
        if not again:
            self._let_rest(key, again=again is not None)
            if again is None and requeue_after is not None:
                self.add_after(key, requeue_after)
        else:
            self.add(key, urgent=True)
        self._hand_out()

    def _let_rest(self, key: Key, *, again: bool) -> None:
        self._resting[key] = again
        asyncio.get_running_loop().call_later(self._rest, self._rested, key)

    def _rested(self, key: Key) -> None:
        if self._resting.pop(key, False):
            self.add(key)
