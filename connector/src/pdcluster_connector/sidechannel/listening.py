"""How a side channel listens: where it may, and to how many clients at a time.

aiohttp limits the size of bodies and headers. It does not limit the number of connections, nor the
time until the first request. A client that sends nothing could take all file descriptors. asyncio
does not count connections before the end of their TLS handshake, so they are accepted here.
"""

import asyncio
import errno
import ipaddress
import logging
import resource
import socket
import ssl

from aiohttp import web

logger = logging.getLogger(__name__)

# 64 decode engines of 8 ranks shake hands over 512 connections at once. Afterwards each of these
# engines keeps two or three: for its first rank's questions and for its leases.
MAX_CONNECTIONS = 8192
TLS_SECONDS = 5.0  # for a client's TLS handshake
PAUSE_SECONDS = 0.1  # after an accept that failed: no file descriptor is left, or the like


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
