"""The side channel: the small HTTP server through which peers learn about this engine.

Runs in the scheduler role, in a thread of its own, so that neither an engine step nor a
client's behaviour can hold up the other. With TLS, every client shows a certificate, and what it
says of itself has to fit it. Without TLS, the server binds to loopback only unless
``allow_insecure`` says otherwise, because its answers let the reader read KV memory.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiohttp import web

from pdcluster_connector.compat import rules
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.protocol import messages
from pdcluster_connector.protocol.messages import (
    EngineMetadata,
    HandshakeRequest,
    Malformed,
    Refusal,
    ShardMetadata,
)
from pdcluster_connector.protocol.peer_name import engine_in, names_in, why_not_peer
from pdcluster_connector.protocol.refusal import refusal_of
from pdcluster_connector.sidechannel.http_guard import ConnectionGuard, connection_limit
from pdcluster_connector.sidechannel.lease_desk import LeaseDesk
from pdcluster_connector.sidechannel.listener import SideChannelError, listen, require_loopback
from pdcluster_connector.sidechannel.loop_thread import LoopThread
from pdcluster_connector.sidechannel.tls import Tls

logger = logging.getLogger(__name__)

IDLE_SECONDS = 15.0  # peers that keep a connection ask every second
BODY_SECONDS = 5.0
MSGPACK = "application/msgpack"
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
        lease_seconds: float = 60.0,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.counts: Counter[str] = Counter()
        self._engine_id = engine_id
        self._shape = shape
        self._shards = tuple(shards)
        self._leases = leases
        self._tls = tls
        self._allow_insecure = allow_insecure
        self._role = role
        self._lease_seconds = lease_seconds
        self._versions = dict(versions or {})
        self._answers: dict[int, bytes] = {}  # by protocol
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
        self.set_shards(self._shards)
        self._thread = LoopThread("pdcluster-side-channel")
        self._thread.start()
        self._thread.submit(self._serve(listener)).result(timeout=30)

    def set_shards(self, shards: Sequence[ShardMetadata]) -> None:
        """Publish the ranks' metadata; from now on handshakes are answered with it."""
        self._shards = tuple(shards)
        self._answers = {
            protocol: messages.encode(
                EngineMetadata(
                    protocol=protocol,
                    engine_id=self._engine_id,
                    shape=self._shape,
                    shards=self._shards,
                    lease_seconds=self._lease_seconds,
                    versions=self._versions,
                )
            )
            for protocol in range(messages.PROTOCOL_OLDEST, messages.PROTOCOL_NEWEST + 1)
        }

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
        self.counts["health_questions"] += 1
        reply = messages.HealthReply(self._engine_id, self._role, len(self._shards))
        return web.Response(body=messages.encode_health(reply), content_type="application/json")

    async def _handshake(self, request: web.Request) -> web.Response:
        asked = messages.decode_handshake_request(await _body(request))
        if isinstance(asked, Malformed):
            return self._malformed(asked)
        if why := self._stranger(request, asked.engine_id):
            return web.Response(status=403, text=why)
        self.counts["handshakes"] += 1
        refusal = self._refusal(asked)
        if refusal is not None:
            self.counts["refusals"] += 1
            logger.warning(
                "handshake of %s refused: %s: %s", asked.engine_id, refusal.reason, refusal.message
            )
            return _msgpack(messages.encode(refusal), status=409)
        if not self._shards:
            return web.Response(status=503, text="the engine's memory is not registered yet")
        return _msgpack(self._answers[min(asked.protocols[1], messages.PROTOCOL_NEWEST)])

    async def _lease(self, request: web.Request) -> web.Response:
        asked = messages.decode_lease_request(await _body(request))
        if isinstance(asked, Malformed):
            return self._malformed(asked)
        if why := self._stranger(request, asked.holder):  # it claims for nobody else
            return web.Response(status=403, text=why)
        if asked.engine_id != self._engine_id:
            refusal = Refusal(
                Reason.PEER_RESTARTED.value,
                f"{asked.engine_id} is gone; {self._engine_id} listens here now",
                self._engine_id,
                asked.engine_id,
            )
            return _msgpack(messages.encode(refusal), status=409)
        if self._leases is None:
            return web.Response(status=404, text="this engine grants no leases")
        self.counts["lease_messages"] += 1
        return _msgpack(messages.encode(self._leases.answer(asked)))

    def _stranger(self, request: web.Request, claimed: str | None) -> str | None:
        """Return why a client may not ask this; ``claimed`` is who it says that it is."""
        if self._tls is None or not self._tls.named:
            return None
        transport = request.transport
        names = names_in(transport and transport.get_extra_info("peercert"))
        who = claimed or engine_in(names) or ""
        why = why_not_peer(self._engine_id, names, who, "decode")
        if why is not None:
            self.counts["strangers"] += 1
            logger.warning("%s refused: %s", request.path, why)
        return why

    def _malformed(self, why: Malformed) -> web.Response:
        self.counts["malformed"] += 1
        if self.counts["malformed"] & (self.counts["malformed"] - 1) == 0:  # 1, 2, 4, 8 ...
            logger.warning("malformed message %d: %s", self.counts["malformed"], why.message)
        return web.Response(status=400, text=why.message)

    def _refusal(self, asked: HandshakeRequest) -> Refusal | None:
        oldest, newest = asked.protocols
        if oldest > messages.PROTOCOL_NEWEST or newest < messages.PROTOCOL_OLDEST:
            ours = f"{messages.PROTOCOL_OLDEST}..{messages.PROTOCOL_NEWEST}"
            theirs = f"{oldest}..{newest}"
            return Refusal(
                Reason.PROTOCOL_VERSION_MISMATCH.value,
                f"prefill speaks protocol {ours}, decode {theirs}; give both"
                " engines the same connector",
                ours,
                theirs,
            )
        return refusal_of(rules.check(self._shape, asked.shape))


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


def _msgpack(body: bytes, status: int = 200) -> web.Response:
    return web.Response(status=status, body=body, content_type=MSGPACK)
