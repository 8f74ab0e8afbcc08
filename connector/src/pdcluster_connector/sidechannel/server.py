"""The side channel: the small HTTP server from which peers get this engine's metadata and leases.

It runs on the scheduler side, in a thread of its own, so that neither an engine step nor a
client's behaviour can hold up the other. ``..listening`` bounds its connections.

Peers learn from the answers how to read KV memory. So with TLS, every client shows a certificate,
and what it says of itself has to fit the names in it. Without TLS, the server binds to loopback
only unless ``allow_insecure`` says otherwise.
"""

import asyncio
import errno
import ipaddress
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from aiohttp import web

from pdcluster_connector import listening
from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.compat.check import check
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.protocol import failure, messages
from pdcluster_connector.protocol.engine_id import names_in, why_not_peer
from pdcluster_connector.protocol.messages import Malformed, Refusal, ShardMetadata
from pdcluster_connector.sidechannel import lease_desk, loop_thread

logger = logging.getLogger(__name__)

BODY_SECONDS = 5.0
# The DNS names of a client's certificate; None where nobody is asked for one.
Names = tuple[str, ...] | None


class SideChannelError(Exception):
    """The side channel cannot be opened; the message names the port and the remedy."""


def require_loopback(host: str, port: int) -> None:
    """Raise SideChannelError if other machines can reach this address."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: only one is loopback everywhere
        loopback = host == "localhost"
    if not loopback:
        raise SideChannelError(
            f"side channel on {host}:{port} refused: without TLS it listens on"
            " loopback only, since whoever reaches it can read KV memory; set"
            " tls, or side_channel_host to 127.0.0.1, or allow_insecure: true in a network"
            " that you trust"
        )


def open_port(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raises SideChannelError."""
    try:
        return listening.open_port(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = "is in use; set side_channel_port to a free port or stop the process that has it"
        elif error.errno in {errno.EADDRNOTAVAIL, socket.EAI_NONAME}:
            why = "is not an address of this machine; set side_channel_host to one that is"
        elif error.errno == errno.EACCES:
            why = "needs privileges; set side_channel_port to a port above 1023"
        else:
            why = f"cannot be opened: {error.strerror}"
        raise SideChannelError(f"side channel port {port} on {host} {why}") from error


@dataclass(eq=False)
class SideChannelServer:
    """Serves ``/v1/handshake``, ``/v1/leases`` and ``/healthz``.

    Args:
        host, port: where to listen; port 0 takes any free one (see :attr:`port`).
        engine_id: this engine's incarnation.
        shape: this engine's shape, all fields known.
        shards: metadata of every rank.
        leases: what answers releases and renewals; None refuses them (a decode engine).
        tls: serve HTTPS to peers with a certificate; None for plain HTTP.
        allow_insecure: listen on an address that is not loopback, without TLS.
        role: of this engine.

    Raises:
        SideChannelError: no peer could read what ``shape`` and ``shards`` say.
    """

    host: str
    port: int
    engine_id: str
    shape: EngineShape
    _: KW_ONLY
    shards: Sequence[ShardMetadata] = ()
    leases: lease_desk.LeaseDesk | None = None
    tls: Tls | None = None
    allow_insecure: bool = False
    role: str = "prefill"

    def __post_init__(self) -> None:
        newest, shards = messages.PROTOCOL_NEWEST, tuple(self.shards)
        told = messages.EngineMetadata(newest, self.engine_id, self.shape, shards)
        self._metadata = messages.encode(told)
        # Nothing has checked the ranks' values yet. Peers would name their own connector as cause.
        if isinstance(wrong := messages.decode_handshake_reply(self._metadata), Malformed):
            message = f"peers could not read how this engine describes its KV: {wrong.message}"
            raise SideChannelError(message)
        self._malformed_messages = 0
        self._guard: listening.ConnectionGuard | None = None
        self._thread: loop_thread.LoopThread | None = None

    def start(self) -> None:
        """Listen. Returns when the port is open.

        Raises:
            SideChannelError: the port is taken or the address is not this machine's. Or it is not
                loopback, there is no TLS, and ``allow_insecure`` is off.
        """
        if self.tls is None and not self.allow_insecure:
            require_loopback(self.host, self.port)
        listener = open_port(self.host, self.port)
        self.port = listener.getsockname()[1]
        self._thread = loop_thread.LoopThread("pdcluster-side-channel")
        self._thread.start()
        self._thread.submit(self._serve(listener)).result(timeout=30)

    def stop(self) -> None:
        """Close the port and every connection. May be called twice."""
        if self._thread is not None and self._thread.alive:
            self._thread.submit(self._close()).result(timeout=10)
            self._thread.stop()

    async def _serve(self, listener: socket.socket) -> None:
        app = web.Application(client_max_size=messages.MAX_REQUEST_BYTES)
        app.router.add_post("/v1/handshake", self._post_handshake)
        app.router.add_post("/v1/leases", self._post_leases)
        app.router.add_get("/healthz", self._get_healthz)
        self._guard = await listening.serve(
            app,
            listener,
            None if self.tls is None else self.tls.server,
            logger=logger,
            lingering_time=2.0,
            auto_decompress=False,
            shutdown_timeout=1.0,
        )

    async def _close(self) -> None:
        if self._guard is not None:
            await self._guard.close()

    async def _get_healthz(self, _: web.Request) -> web.Response:
        return self.health()

    async def _post_handshake(self, request: web.Request) -> web.Response:
        return self.handshake(await _body(request), self._names(request))

    async def _post_leases(self, request: web.Request) -> web.Response:
        return self.lease(await _body(request), self._names(request))

    def _names(self, request: web.Request) -> Names:
        """Return the names in the client's certificate; None where names do not count."""
        if self.tls is None or not self.tls.named:
            return None
        return names_in(request.get_extra_info("peercert"))

    # The answers.

    def health(self) -> web.Response:
        """Say which incarnation listens here, and what its clock shows."""
        reply = messages.HealthReply(self.engine_id, self.role, len(self.shards), time.time())
        body = messages.encode_health(reply)
        return web.Response(body=body, content_type="application/json")

    def handshake(self, body: bytes, names: Names) -> web.Response:
        """Give the engine's metadata to a decode engine that can read its KV."""
        asked = messages.decode_handshake_request(body)
        if isinstance(asked, Malformed):
            return self._malformed(asked)
        if why := self._stranger("handshake", names, asked.engine_id):
            return _text(403, why)
        if (refusal := self._refusal(asked)) is not None:
            why = f"{refusal.reason}: {refusal.message}"
            logger.warning("handshake of %s refused: %s", asked.engine_id, why)
            return _packed(409, messages.encode(refusal))
        return _packed(200, self._metadata)

    def lease(self, body: bytes, names: Names) -> web.Response:
        """Take a decode engine's releases and renewals in."""
        asked = messages.decode_lease_request(body)
        if isinstance(asked, Malformed):
            return self._malformed(asked)
        if why := self._stranger("lease message", names, asked.holder):  # for nobody else
            return _text(403, why)
        if asked.engine_id != self.engine_id:
            refusal = Refusal(
                Reason.PEER_RESTARTED.value,
                f"{asked.engine_id} is gone; {self.engine_id} listens here now",
                self.engine_id,
                asked.engine_id,
            )
            return _packed(409, messages.encode(refusal))
        if self.leases is None:
            return _text(404, "this engine grants no leases")
        return _packed(200, messages.encode(self.leases.answer(asked)))

    def _refusal(self, asked: messages.HandshakeRequest) -> Refusal | None:
        """Return why the two engines cannot exchange KV; None if they can."""
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
        return failure.refusal_of(check(self.shape, asked.shape))

    def _stranger(self, what: str, names: Names, claimed: str) -> str | None:
        """Return why a client may not ask this; ``claimed`` is who it says that it is."""
        if names is None:
            return None
        if (why := why_not_peer(self.engine_id, names, claimed, "decode")) is not None:
            logger.warning("a %s was refused: %s", what, why)
        return why

    def _malformed(self, why: Malformed) -> web.Response:
        self._malformed_messages += 1
        number = self._malformed_messages
        if number & (number - 1) == 0:  # 1, 2, 4, 8 ...
            logger.warning("malformed message %d: %s", number, why.message)
        return _text(400, why.message)


def _packed(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/msgpack")


def _text(status: int, text: str) -> web.Response:
    body = text.encode("utf-8", "replace")
    return web.Response(status=status, body=body, content_type="text/plain")


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
