"""Holds calls back while an overloaded API server asks for it (429 and Retry-After)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

SHORTEST, LONGEST = 0.5, 10.0
"""Bounds of what a server may ask for, in seconds."""
SPREAD = 0.5
"""Calls that waited together are sent at random moments of this share of that time.

Otherwise, all of them would reach the server at once.
"""


class Overload:
    """How long the API server has a client wait. If it refuses one call, all calls wait."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._until = 0.0
        self._asked = 0.0

    async def wait(self) -> None:
        """Return when the server may be called again."""
        while (left := self._until - self._clock()) > 0:
            await self._sleep(left + random.uniform(0, SPREAD) * self._asked)  # noqa: S311

    def told(self, retry_after: str) -> None:
        """Take the ``Retry-After`` of an answer: seconds, or anything else."""
        asked = float(retry_after) if retry_after.isdecimal() else 1.0
        self._asked = min(max(asked, SHORTEST), LONGEST)
        self._until = max(self._until, self._clock() + self._asked)
