"""Limits that an aiohttp server lacks: how many connections, and how long one may idle.

aiohttp limits the size of bodies and headers. It does not limit the number of connections, nor the
time until the first request. A client that sends nothing could take all file descriptors.
"""

from __future__ import annotations

import asyncio

from aiohttp import web


class ConnectionGuard:
    """Closes idle connections once a second and turns away those over the limit.

    A connection is busy from the moment that a request's headers are complete
    (:meth:`began`) to its answer (:meth:`ended`); otherwise it may idle ``idle_seconds``.
    """

    def __init__(self, server: web.Server, *, limit: int, idle_seconds: float) -> None:
        self._server = server
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._idle_since: dict[web.RequestHandler, float] = {}
        self._busy: set[web.RequestHandler] = set()

    def protocol(self) -> asyncio.Protocol:
        """Make the protocol of a new connection; the factory for ``create_server``."""
        return self._server() if len(self._server.connections) < self._limit else _TurnedAway()

    def began(self, handler: web.RequestHandler) -> None:
        """Note that a request's headers are complete."""
        self._busy.add(handler)

    def ended(self, handler: web.RequestHandler) -> None:
        """Note that the request is answered."""
        self._busy.discard(handler)
        self._idle_since[handler] = asyncio.get_running_loop().time()

    def close_all(self) -> None:
        """Close every connection now."""
        for handler in self._server.connections:
            handler.force_close()

    async def sweep(self) -> None:
        """Close connections that idle too long. Runs until cancelled."""
        while True:
            now = asyncio.get_running_loop().time()
            known = self._idle_since
            self._idle_since = {each: known.get(each, now) for each in self._server.connections}
            for handler, since in self._idle_since.items():
                if handler not in self._busy and now - since > self._idle_seconds:
                    handler.force_close()
            await asyncio.sleep(1.0)


class _TurnedAway(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            transport.abort()
