"""The side channel: the small HTTP server through which peers learn about this engine.

Runs on the scheduler side, in a thread of its own, so that neither an engine step nor a
client's behaviour can hold up the other. What it answers is in :mod:`answers`. With TLS, every
client shows a certificate, and what it says of itself has to fit it. Without TLS, the server binds
to loopback only unless ``allow_insecure`` says otherwise, because its answers let the reader read
KV memory.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiohttp import web

from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.protocol import messages
from pdcluster_connector.protocol.lease import LEASE_SECONDS
from pdcluster_connector.protocol.messages import ShardMetadata
from pdcluster_connector.protocol.peer_name import names_in
from pdcluster_connector.sidechannel.answers import Answer, Answers, Names
from pdcluster_connector.sidechannel.http_limits import ConnectionGuard, connection_limit
from pdcluster_connector.sidechannel.lease_desk import LeaseDesk
from pdcluster_connector.sidechannel.listener import SideChannelError, listen, require_loopback
from pdcluster_connector.sidechannel.loop_thread import LoopThread
from pdcluster_connector.sidechannel.tls import Tls

logger = logging.getLogger(__name__)

IDLE_SECONDS = 15.0  # peers that keep a connection ask every second
BODY_SECONDS = 5.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SideChannelServer:
    """Serves ``/v1/handshake``, ``/v1/leases`` and ``/healthz``.

    Args:
        host, port: where to listen; port 0 takes any free one (see :attr:`port`).
        engine_id: this engine's incarnation.
        shape: this engine's shape, all fields known.
        shards: metadata of every rank; empty until :meth:`set_shards`, handshakes are then
            answered with 503, which peers retry.
        leases: what answers releases and renewals; None refuses them (a decode engine).
        tls: serve HTTPS to peers with a certificate; None for plain HTTP.
        allow_insecure: listen on an address that is not loopback, without TLS.
        lease_seconds: how long this engine holds blocks for a peer.
        versions: named versions to tell peers, for people to read.
    """

    def __init__(
        self,
        host: str,
        port: int,
        engine_id: str,
        shape: EngineShape,
        *,
        shards: Sequence[ShardMetadata] = (),
        leases: LeaseDesk | None = None,
        tls: Tls | None = None,
        allow_insecure: bool = False,
        role: str = "prefill",
        lease_seconds: float = LEASE_SECONDS,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self._answers = Answers(
            engine_id,
            shape,
            leases=leases,
            role=role,
            lease_seconds=lease_seconds,
            versions=versions or {},
        )
        self.set_shards = self._answers.set_shards
        self.set_shards(shards)
        self._tls = tls
        self._allow_insecure = allow_insecure
        self._guard: ConnectionGuard | None = None
        self._runner: web.AppRunner | None = None
        self._listener: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._thread: LoopThread | None = None

    def start(self) -> None:
        """Listen. Returns when the port is open.

        Raises:
            SideChannelRefusedError: there is no TLS, the address is not loopback, and
                ``allow_insecure`` is off.
            SideChannelError: the port is taken or the address is not this machine's.
        """
        if self._tls is None and not self._allow_insecure:
            require_loopback(self.host, self.port)
        listener = listen(self.host, self.port)
        self.port = listener.getsockname()[1]
        self._thread = LoopThread("pdcluster-side-channel")
        self._thread.start()
        self._thread.submit(self._serve(listener)).result(timeout=30)

    def stop(self) -> None:
        """Close the port and every connection. May be called twice."""
        if self._thread is not None and self._thread.alive:
            self._thread.submit(self._close()).result(timeout=10)
            self._thread.stop()

    async def _serve(self, listener: socket.socket) -> None:
        app = web.Application(client_max_size=messages.MAX_REQUEST_BYTES, middlewares=[self._watch])
        app.router.add_post("/v1/handshake", self._handshake)
        app.router.add_post("/v1/leases", self._lease)
        app.router.add_get("/healthz", self._healthz)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=logger,
            lingering_time=2.0,
            auto_decompress=False,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        server = runner.server
        if not isinstance(server, web.Server):
            raise SideChannelError("aiohttp made no server")
        limit = connection_limit()
        self._guard = ConnectionGuard(server, limit=limit, idle_seconds=IDLE_SECONDS)
        loop = asyncio.get_running_loop()
        self._runner = runner
        self._listener = listener
        context = None if self._tls is None else self._tls.server()
        self._tasks = [
            loop.create_task(self._guard.accept(listener, context)),
            loop.create_task(self._guard.sweep()),
        ]

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        if self._guard is not None:
            await self._guard.close_all()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._guard is None:
            return web.Response(status=503)
        self._guard.began(request.protocol)
        try:
            return await handler(request)
        finally:
            self._guard.ended(request.protocol)

    async def _healthz(self, _: web.Request) -> web.Response:
        return _response(self._answers.health())

    async def _handshake(self, request: web.Request) -> web.Response:
        return _response(self._answers.handshake(await _body(request), self._names(request)))

    async def _lease(self, request: web.Request) -> web.Response:
        return _response(self._answers.lease(await _body(request), self._names(request)))

    def _names(self, request: web.Request) -> Names:
        """Return the names in the client's certificate; None where names do not count."""
        if self._tls is None or not self._tls.named:
            return None
        transport = request.transport
        return names_in(transport and transport.get_extra_info("peercert"))


async def _body(request: web.Request) -> bytes:
    """Return a request's body; raises the HTTP errors 413 (too large) and 408 (too slow)."""
    limit = messages.MAX_REQUEST_BYTES
    if request.content_length is not None and request.content_length > limit:
        raise web.HTTPRequestEntityTooLarge(limit, request.content_length)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None


def _response(answer: Answer) -> web.Response:
    return web.Response(status=answer.status, body=answer.body, content_type=answer.content_type)
