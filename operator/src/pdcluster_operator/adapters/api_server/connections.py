"""Who gets the next connection to the API server: namespaces in turn, and none gets all.

The connections of aiohttp are not given out in turn, and the wait for one would count as a part of
the call. Why no namespace gets all: :mod:`pdcluster_operator.runtime.shares`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdcluster_operator.runtime.shares import Shares, Turns


class Connections:
    """Gives out at most ``most`` connections at once. Used from one event loop."""

    def __init__(self, most: int) -> None:
        self._shares = Shares(most)
        self._waiting: Turns[asyncio.Future[None]] = Turns()

    @asynccontextmanager
    async def one_for(self, path: str) -> AsyncIterator[None]:
        """Wait for a connection for one call, and hold it while the context lasts.

        Args:
            path: of the call. Calls outside of namespaces share turns like those of a namespace.
        """
        namespace = namespace_of(path)
        if self._shares.may_take(namespace):
            self._shares.take(namespace)
        else:
            await self._turn(namespace)
        try:
            yield
        finally:
            self._give_back(namespace)

    async def _turn(self, namespace: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(namespace, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.drop(namespace, turn)
            else:  # its turn had come already
                self._give_back(namespace)
            raise

    def _give_back(self, namespace: str) -> None:
        self._shares.give_back(namespace)
        while (taken := self._waiting.take(self._shares.may_take)) is not None:
            next_namespace, turn = taken
            if not turn.done():  # who waited may be cancelled, and not know it yet
                self._shares.take(next_namespace)
                turn.set_result(None)


def namespace_of(path: str) -> str:
    """Return the namespace in a path of the API server; empty if it has none."""
    return path.partition("/namespaces/")[2].partition("/")[0]
