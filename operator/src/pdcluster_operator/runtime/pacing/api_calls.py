"""When a call to the API server may be sent: pauses after 429.

An overloaded API server asks a client to wait, by ``Retry-After``. What one call is asked
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
from collections.abc import Awaitable, Callable
from typing import NamedTuple

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
