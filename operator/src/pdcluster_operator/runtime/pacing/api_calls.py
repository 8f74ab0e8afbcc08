"""When a call to the API server may be sent: connections in turns, and pauses after 429.

**Connections.** aiohttp does not give its connections out in turns, and the wait for one would
count as a part of the call. So calls wait here for one of a limited number of slots, which
:mod:`.fair_slots` shares between namespaces.

**429 and Retry-After.** An overloaded API server asks a client to wait. What one call is asked
holds for all calls into its namespace, and for no other namespace: a priority level may be for some
namespaces only, and an admission webhook can answer 429, too. If an API server refuses all calls
for 50 PDClusters for a minute, 288 are refused in virtual time. If each call waited for itself, it
were 3,193, and the benchmark's day with 429 allows 500.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from pdcluster_operator.runtime.pacing.fair_slots import FairSlots

CALL_HANGS_SECONDS = 5.0
"""A call that takes longer hangs."""
SHORTEST, LONGEST = 0.5, 10.0
"""Bounds of the seconds that a server may ask for."""
MOST_PATIENCE = 30.0
"""How long one call waits in all. Each refusal of another call makes it wait longer.

If a webhook refuses all objects of one kind, the status has to say so.
"""
SPREAD = 0.5
"""Calls that waited together are sent within this share of the time that was asked for."""


def namespace_of(path: str) -> str:
    """Return the namespace in a path of the API server; empty if it has none."""
    return path.partition("/namespaces/")[2].partition("/")[0]


def written_namespace(method: str, path: str) -> str:
    """Return the namespace into which a call writes; empty for reads, which no webhook delays."""
    return "" if method == "GET" else namespace_of(path)


class Connections:
    """Gives out ``most`` connections at once, not counting some that hang.

    Used from one event loop.
    """

    def __init__(self, most: int) -> None:
        self._slots = FairSlots[asyncio.Future[None]](most, CALL_HANGS_SECONDS, _give)

    @asynccontextmanager
    async def one_for(self, namespace: str) -> AsyncIterator[None]:
        """Wait for a connection for one call, and hold it while the context lasts.

        Args:
            namespace: into which the call writes; see :func:`written_namespace`.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._slots.add(namespace, turn)
        self._slots.hand_out()
        try:
            await turn
            yield
        finally:
            if self._slots.waits(namespace, turn):  # it was cancelled while it waited
                self._slots.drop(namespace, turn)
            else:
                self._slots.done(namespace, turn)
                self._slots.hand_out()


def _give(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # its call may be cancelled, and gives the slot back in a moment
        turn.set_result(None)


class _Asked(NamedTuple):
    until: float
    seconds: float


_NOTHING = _Asked(0.0, 0.0)


class Overload:
    """The pauses that the API server asks of one client, by namespace.

    The empty namespace is for calls without one.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._asked: dict[str, _Asked] = {}

    def patience(self) -> float:
        """Return the moment until which a call that begins now may wait."""
        return self._clock() + MOST_PATIENCE

    def is_over(self, patience: float) -> bool:
        """Whether a call has waited long enough, and has to take the answer that it gets."""
        return self._clock() >= patience

    async def wait(self, namespace: str, patience: float = math.inf) -> None:
        """Return when the server may be called again for a namespace, or when patience ends."""
        while True:
            until, asked = self._asked.get(namespace, _NOTHING)
            if (left := until - self._clock()) <= 0 or self.is_over(patience):
                return
            pause = left + random.uniform(0, SPREAD) * asked  # noqa: S311
            await self._sleep(min(pause, patience - self._clock()))

    def refused(self, namespace: str, retry_after: str) -> None:
        """Take the ``Retry-After`` of an answer: seconds, or anything else."""
        now = self._clock()
        self._asked = {name: one for name, one in self._asked.items() if now < one.until}
        seconds = float(retry_after) if retry_after.isdecimal() else 1.0
        asked = min(max(seconds, SHORTEST), LONGEST)
        until = max(now + asked, self._asked.get(namespace, _NOTHING).until)
        self._asked[namespace] = _Asked(until, asked)
