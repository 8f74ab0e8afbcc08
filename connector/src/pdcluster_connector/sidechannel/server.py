"""The side channel: the small HTTP server from which peers get this engine's metadata and leases.

It runs on the scheduler side, in a thread of its own, so that neither an engine step nor a
client's behaviour can hold up the other. ``answers.py`` makes the answers. With TLS, every client
shows a certificate, and what it says of itself has to fit it. Without TLS, the server binds to
loopback only unless ``allow_insecure`` says otherwise, because its answers let the reader read KV
memory.

aiohttp limits the size of bodies and headers. It does not limit the number of connections, nor the
time until the first request. A client that sends nothing could take all file descriptors. asyncio
does not count connections before the end of their TLS handshake, so they are accepted here.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiohttp import web

from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.protocol import messages
from pdcluster_connector.protocol.engine_id import names_in
from pdcluster_connector.protocol.lease import LEASE_SECONDS
from pdcluster_connector.protocol.messages import ShardMetadata
from pdcluster_connector.sidechannel.answers import Answers, Names
from pdcluster_connector.sidechannel.lease_desk import LeaseDesk
from pdcluster_connector.sidechannel.loop_thread import LoopThread


class SideChannelError(Exception):
    """The side channel cannot be opened; the message names the port and the remedy."""


class SideChannelRefusedError(SideChannelError):
    """The address is not loopback, and nothing protects the side channel."""


def require_loopback(host: str, port: int) -> None:
    """Raise SideChannelRefusedError if other machines can reach this address."""
    if not _is_loopback(host):
        raise SideChannelRefusedError(
            f"side channel on {host}:{port} refused: without TLS it listens on"
            " loopback only, since whoever reaches it can read KV memory; set"
            " tls, or side_channel_host to 127.0.0.1, or allow_insecure: true in a network"
            " that you trust"
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raises SideChannelError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=256)
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
    listener.setblocking(False)
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: only one is loopback everywhere
        return host == "localhost"


logger = logging.getLogger(__name__)

# 64 decode engines of 8 ranks shake hands over 512 connections at once. Afterwards each of these
# engines keeps two or three: for its first rank's questions and for its leases.
MAX_CONNECTIONS = 8192
TLS_SECONDS = 5.0  # for a client's TLS handshake
PAUSE_SECONDS = 0.1  # after an accept that failed: no file descriptor is left, or the like


def connection_limit() -> int:
    """Return how many connections a side channel may hold: a quarter of the file descriptors."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 4)


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
        self._greeting: set[web.RequestHandler] = set()  # those in their TLS handshake
        self._tasks: dict[asyncio.Task[None], socket.socket] = {}

    async def accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accept connections until cancelled, and close at once those over the limit."""
        loop = asyncio.get_running_loop()
        # loop.sock_accept would lose a connection that comes in while it is cancelled.
        readable = asyncio.Event()
        loop.add_reader(listener, readable.set)
        failed = False
        try:
            while True:
                await readable.wait()
                readable.clear()
                try:
                    connection, _ = listener.accept()
                except BlockingIOError:
                    continue
                except OSError as error:
                    if not failed:
                        logger.warning("no connection can be accepted: %s", error)
                    failed = True
                    loop.remove_reader(listener)
                    await asyncio.sleep(PAUSE_SECONDS)
                    loop.add_reader(listener, readable.set)
                    continue
                if failed:
                    logger.warning("connections can be accepted again")
                failed = False
                self._take(connection, tls)
        finally:
            loop.remove_reader(listener)

    def _take(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        connection.setblocking(False)
        if len(self._greeting.union(self._server.connections)) >= self._limit:
            connection.close()
            return
        handler = self._server()
        self._greeting.add(handler)
        task = asyncio.get_running_loop().create_task(self._greet(handler, connection, tls))
        self._tasks[task] = connection
        task.add_done_callback(self._tasks.pop)

    async def _greet(
        self, handler: web.RequestHandler, connection: socket.socket, tls: ssl.SSLContext | None
    ) -> None:
        """Hand a connection to aiohttp; with TLS, once the client has shown its certificate."""
        timeout = None if tls is None else TLS_SECONDS
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: handler, connection, ssl=tls, ssl_handshake_timeout=timeout
            )
        except OSError as error:  # ssl.SSLError, TimeoutError and broken connections
            logger.debug("a connection was not taken: %s", error)
            connection.close()
        finally:
            self._greeting.discard(handler)

    def began(self, handler: web.RequestHandler) -> None:
        """Note that a request's headers are complete."""
        self._busy.add(handler)

    def ended(self, handler: web.RequestHandler) -> None:
        """Note that the request is answered."""
        self._busy.discard(handler)
        self._idle_since[handler] = asyncio.get_running_loop().time()

    async def close_all(self) -> None:
        """Close every connection, after the end of :meth:`accept`.

        Also those that have just been accepted: their clients would wait for an answer.
        """
        greeting = dict(self._tasks)
        for task in greeting:
            task.cancel()
        await asyncio.gather(*greeting, return_exceptions=True)
        for connection in greeting.values():
            connection.close()
        for handler in self._server.connections:
            handler.force_close()

    async def sweep(self) -> None:
        """Close connections that idle too long. Runs until cancelled."""
        while True:
            now = asyncio.get_running_loop().time()
            known = self._idle_since
            self._idle_since = {each: known.get(each, now) for each in self._server.connections}
            for handler, since in self._idle_since.items():
                idle = handler not in self._busy and now - since > self._idle_seconds
                if idle and handler.transport is not None:
                    handler.transport.abort()  # closing would wait for a client that does not read
            await asyncio.sleep(1.0)


IDLE_SECONDS = 15.0  # peers that keep a connection ask every second
BODY_SECONDS = 5.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SideChannelServer:
    """Serves ``/v1/handshake``, ``/v1/leases`` and ``/healthz``.

    Args:
        host, port: where to listen; port 0 takes any free one (see :attr:`port`).
        engine_id, shape, leases, role, lease_seconds, versions: as in :class:`Answers`.
        shards: metadata of every rank; empty until :meth:`set_shards`, handshakes are then
            answered with 503, which peers retry.
        tls: serve HTTPS to peers with a certificate; None for plain HTTP.
        allow_insecure: listen on an address that is not loopback, without TLS.
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
        return self._answers.health()

    async def _handshake(self, request: web.Request) -> web.Response:
        return self._answers.handshake(await _body(request), self._names(request))

    async def _lease(self, request: web.Request) -> web.Response:
        return self._answers.lease(await _body(request), self._names(request))

    def _names(self, request: web.Request) -> Names:
        """Return the names in the client's certificate; None where names do not count."""
        if self._tls is None or not self._tls.named:
            return None
        transport = request.transport
        return names_in(None if transport is None else transport.get_extra_info("peercert"))


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
