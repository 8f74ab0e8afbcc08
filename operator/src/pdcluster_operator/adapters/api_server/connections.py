"""Who gets the next connection to the API server: namespaces in turn, and none gets all.

The connections of aiohttp are not given out in turn, and the wait for one would count as a part of
the call. Why no namespace gets all: :mod:`pdcluster_operator.runtime.shares`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdcluster_operator.runtime.shares import Shares, Turns

CALL_HANGS_SECONDS = 5.0
"""A call that takes longer hangs."""
AGAIN_SECONDS = 1.0


class Connections:
    """Gives out ``most`` connections at once, not counting some that hang.

    Used from one event loop.
    """

    def __init__(self, most: int) -> None:
        self._shares = Shares(most, CALL_HANGS_SECONDS, _now)
        self._waiting: Turns[asyncio.Future[None]] = Turns()
        self._again: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def one_for(self, namespace: str) -> AsyncIterator[None]:
        """Wait for a connection for one call, and hold it while the context lasts.

        Args:
            namespace: whose turn it takes; see :func:`written_namespace`.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._shares.limits()(namespace):
            self._shares.take(namespace, turn)
        else:
            self._waiting.add(namespace, turn)
            self._look_again()
            await self._its_turn(namespace, turn)
        try:
            yield
        finally:
            self._give_back(namespace, turn)

    async def _its_turn(self, namespace: str, turn: asyncio.Future[None]) -> None:
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.drop(namespace, turn)
            else:  # its turn had come already
                self._give_back(namespace, turn)
            raise

    def _give_back(self, namespace: str, turn: asyncio.Future[None]) -> None:
        self._shares.give_back(namespace, turn)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and (taken := self._waiting.take(self._shares.limits())) is not None:
            other, next_turn = taken
            if not next_turn.done():  # who waited may be cancelled, and not know it yet
                self._shares.take(other, next_turn)
                next_turn.set_result(None)

    def _look_again(self) -> None:
        """Hand out in a second what is free when more calls are known to hang."""
        if self._waiting and self._again is None:
            self._again = asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._later)

    def _later(self) -> None:
        self._again = None
        self._hand_out()
        self._look_again()


def _now() -> float:
    return asyncio.get_running_loop().time()


def namespace_of(path: str) -> str:
    """Return the namespace in a path of the API server; empty if it has none."""
    return path.partition("/namespaces/")[2].partition("/")[0]


def written_namespace(method: str, path: str) -> str:
    """Return the namespace into which a call writes; empty for calls that no webhook can hold."""
    return "" if method == "GET" else namespace_of(path)
