"""How every server of this project listens: to how many clients at a time, and for how long.

aiohttp limits the size of bodies and headers. It does not limit the number of connections, nor the
time until the first request. Clients that send nothing could take all file descriptors. asyncio
does not count connections before the end of their TLS handshake, so they are accepted here. It
also takes 300 KiB for each TLS connection. So a connection is only a socket until its client has
sent a byte, and few clients without a certificate may have TLS at a time.

``launcher/router_gate.py`` listens in a router's image, which has no aiohttp. So only :func:`serve`
imports it.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal

from pdcluster_connector.protocol.host_port import EVERY_ADDRESS

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Handler

logger = logging.getLogger(__name__)

# 64 decode engines of 8 ranks shake hands over 512 connections at once. Afterwards each of these
# engines keeps two or three: for its first rank's questions and for its leases.
MAX_CONNECTIONS = 8192
MAX_TLS_STRANGERS = 512  # 150 MiB: TLS handshakes, and clients that have shown no certificate
TLS_SECONDS = 5.0  # for a client's TLS handshake, from its first byte
IDLE_SECONDS = 15.5  # without a request; clients keep a connection for 15 s
BUSY_SECONDS = 60.0  # for a request and its answer; the longest wait for news is 30 s
BACKLOG: Final = 4096  # where it is full, clients try again after a second
PAUSE_SECONDS = 0.1  # after an accept that failed: no file descriptor is left, or the like

# Silent: no request of it has come as a whole, or its TLS handshake goes on.
# Busy: from the moment that a request's headers are complete to its answer. Idle: after that.
State = Literal["silent", "idle", "busy"]


def allow_many_connections() -> None:
    """Raise the limit of open files, of this process and those that it will start."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def connection_limit() -> int:
    """Return how many clients of one kind a server takes: a quarter of the file descriptors.

    Clients with a certificate are one kind, others are another. A process has three kinds at most:
    the launcher has a metrics page without TLS. A quarter is left for what the process itself does.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 4)


def every_address() -> str:
    """Return what stands for all addresses of this machine, IPv6 ones too where it has them.

    A kernel whose IPv6 addresses are turned off by sysctl takes ``::`` for those of IPv4. With the
    sysctl ``bindv6only``, ``::`` leaves them out in vLLM, which does not ask for both.
    """
    if not socket.has_dualstack_ipv6():
        return "0.0.0.0"  # noqa: S104 - a pod's own network
    with socket.socket(socket.AF_INET6) as fresh:
        alone = fresh.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    return "0.0.0.0" if alone else "::"  # noqa: S104


def open_port(host: str, port: int) -> socket.socket:
    """Return a socket that listens and does not block; raises OSError.

    The address ``0.0.0.0`` stands for those of IPv6, too: a pod may have no others.
    """
    host = every_address() if host in EVERY_ADDRESS else host
    listener = socket.create_server(
        (host, port),
        family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        backlog=BACKLOG,
        dualstack_ipv6=host == "::",
    )
    listener.setblocking(False)
    return listener


@dataclass(eq=False, slots=True)
class _Connection:
    socket: socket.socket
    address: str
    handler: asyncio.BaseProtocol
    since: float  # of its state
    end: Callable[[], object] | None = None  # None: it is only a socket
    state: State = "silent"
    groups: tuple[_Group, ...] = ()


class _Group:
    """At most ``limit`` connections; those of a state come in the order of their time in it."""

    def __init__(self, limit: int) -> None:
        self.limit = max(1, limit)
        self.of: dict[State, dict[_Connection, None]] = {"silent": {}, "idle": {}, "busy": {}}

    def __len__(self) -> int:
        return sum(map(len, self.of.values()))

    def in_the_way(self) -> _Connection | None:
        """Return which connection goes when another one comes; None if there is room for both.

        Silent ones go first. But some stay even if a crowd asks and is answered, or waits for an
        answer: else a client that has just come could not send its request.
        """
        if len(self) < self.limit:
            return None
        silent, idle, busy = self.of.values()
        return next(iter(silent if 4 * len(silent) >= self.limit else idle or busy or silent))


class ConnectionGuard:
    """Accepts a server's connections and limits their number and time.

    No client is turned away: the oldest connection of a crowd is closed for a new one. Clients that
    have shown a certificate are counted apart. Of the others, each address gets half of the room.

    Args:
        make_handler: makes the protocol of one connection.
        listener: see :func:`open_port`.
        tls: for HTTPS; None for plain HTTP.
        finish: ends the server's own work when the guard closes.
        idle_seconds: how long a connection may have no request.
    """

    def __init__(
        self,
        make_handler: Callable[[], asyncio.BaseProtocol],
        listener: socket.socket,
        tls: ssl.SSLContext | None = None,
        finish: Callable[[], Awaitable[None]] | None = None,
        idle_seconds: float | None = None,
    ) -> None:
        self._idle_seconds = IDLE_SECONDS if idle_seconds is None else idle_seconds
        self._make_handler = make_handler
        self.listener = listener
        self._tls = tls
        self._finish = finish
        self._limit = connection_limit()
        self._few = max(1, self._limit // 1024)  # are greeted in a turn of the loop
        self._strangers, self._known = _Group(self._limit), _Group(self._limit)
        # Strangers that have sent a byte.
        self._speaking = _Group(min(self._limit, MAX_TLS_STRANGERS) if tls else self._limit)
        self._addresses: dict[tuple[str, _Group], _Group] = {}  # half of such a group for each
        self._held: dict[asyncio.BaseProtocol, _Connection] = {}
        self._waiting: dict[str, dict[_Connection, None]] = {}  # by address, since their first byte
        self._failed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener, self._accept)
        self._sweeping = self._loop.create_task(self._sweep())

    async def close(self) -> None:
        """Close the port and every connection.

        Also those that have just been accepted: their clients would wait for an answer.
        """
        self._loop.remove_reader(self.listener)
        self.listener.close()
        self._sweeping.cancel()
        for connection in [each for each in self._held.values() if each.state == "silent"]:
            self._close(connection)
        if self._finish is not None:
            await self._finish()
        for connection in list(self._held.values()):
            self._close(connection)

    def enter(self, handler: asyncio.BaseProtocol, state: State) -> None:
        """Note that a request's headers are complete, or that it is answered."""
        if (connection := self._held.get(handler)) is not None:
            groups = connection.groups
            self._place(connection)
            connection.state, connection.since = state, self._loop.time()
            self._place(connection, *groups)

    def _accept(self) -> None:
        # A new connection must have some turns of the loop before it is in the way of others.
        crowded = len(self._waiting) >= 32 * self._few  # not all addresses are compared
        for _ in range(self._few if crowded else max(1, self._limit // 64)):
            try:
                connection, address = self.listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if not self._failed:
                    logger.warning("no connection can be accepted: %s", error)
                self._failed = True
                self._loop.remove_reader(self.listener)
                self._loop.call_later(PAUSE_SECONDS, self._accept_again)
                break
            if self._failed:
                logger.warning("connections can be accepted again")
            self._failed = False
            self._take(connection, address[0])

    def _accept_again(self) -> None:
        if self.listener.fileno() >= 0:
            self._loop.add_reader(self.listener, self._accept)

    def _take(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        taken = _Connection(connection, address, self._make_handler(), self._loop.time())
        self._held[taken.handler] = taken
        self._place(taken, *self._room(self._strangers, address))
        self._loop.add_reader(connection, self._speaks, taken)

    def _speaks(self, connection: _Connection) -> None:
        """Its client has sent a byte, or is gone."""
        self._loop.remove_reader(connection.socket)
        with suppress(OSError):
            if connection.socket.recv(1, socket.MSG_PEEK):
                if not self._waiting:
                    self._loop.call_soon(self._greet_some)
                of = self._waiting.pop(connection.address, {})
                self._waiting[connection.address] = of  # its address is the newest now
                of[connection] = None
                return
        self._close(connection)

    def _greet_some(self) -> None:
        """Greet the newest, of those addresses that have the fewest strangers that speak.

        The oldest of a crowd would wait for seconds, and so would others beside a crowd. A turn of
        the loop greets fewer than it accepts: a new client would wait in the kernel's queue for the
        answers to thousands. Of a crowd with more addresses, each would be closed for the next one.
        """
        waiting = self._waiting = {each: of for each, of in self._waiting.items() if of}
        newest = islice(reversed(waiting), 32 * self._few)  # a bound for the work of a turn
        busy = {each: len(self._addresses.get((each, self._speaking), ())) for each in newest}
        for each in nsmallest(self._few, busy, key=busy.__getitem__):
            if waiting[each]:
                self._greet(waiting[each].popitem()[0])
        if waiting:
            self._loop.call_soon(self._greet_some)

    def _greet(self, connection: _Connection) -> None:
        greeting = self._loop.create_task(
            self._loop.connect_accepted_socket(
                lambda: connection.handler,
                connection.socket,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else TLS_SECONDS,
            )
        )
        # If it were cancelled, asyncio would go on with a socket whose number others then have.
        connection.end = partial(connection.socket.shutdown, socket.SHUT_RDWR)
        greeting.add_done_callback(lambda _: self._greeted(connection, greeting))
        groups = *connection.groups, *self._room(self._speaking, connection.address)
        self._place(connection, *groups)

    def _greeted(self, connection: _Connection, greeting: asyncio.Task[Any]) -> None:
        """Count a connection as its client's certificate allows, once TLS is established."""
        try:
            transport: asyncio.Transport = greeting.result()[0]
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever it is
            error.__traceback__ = None  # its frames hold the memory of TLS, and the error
            connection.end = connection.socket.close
            self._close(connection)
            return
        connection.end = transport.abort  # closing would wait for a client that does not read
        if connection.handler not in self._held:  # it was closed at this very moment
            self._close(connection)
        elif transport.get_extra_info("peercert"):
            self._place(connection, self._known)

    def _room(self, group: _Group, address: str) -> tuple[_Group, _Group]:
        return self._addresses.setdefault((address, group), _Group(group.limit // 2)), group

    def _place(self, connection: _Connection, *groups: _Group) -> None:
        """Move a connection to these groups, and close those for which they have no room."""
        for group in connection.groups:
            group.of[connection.state].pop(connection, None)
        for group in groups:
            if (other := group.in_the_way()) is not None:
                self._close(other)
            group.of[connection.state][connection] = None
        connection.groups = groups

    def _close(self, connection: _Connection) -> None:
        self._held.pop(connection.handler, None)
        self._waiting.get(connection.address, {}).pop(connection, None)
        self._place(connection)
        if connection.end is None:
            self._loop.remove_reader(connection.socket)
            connection.socket.close()
        else:
            with suppress(Exception):  # its client is gone, or asyncio's transport has ended
                connection.end()

    async def _sweep(self) -> None:
        """Close connections that take too long, and forget closed ones. Runs until cancelled."""
        late: dict[_Connection, float] = {}
        while True:
            now, before, late = self._loop.time(), late, {}
            for connection in list(self._held.values()):
                longest = BUSY_SECONDS if connection.state == "busy" else self._idle_seconds
                if connection.socket.fileno() < 0 or before.get(connection) == connection.since:
                    self._close(connection)
                elif now - connection.since > longest:
                    # A request of it may have come while the loop was busy: give it one turn.
                    late[connection] = connection.since
            self._addresses = {each: group for each, group in self._addresses.items() if len(group)}
            await asyncio.sleep(1.0)


async def serve(
    app: web.Application,
    listener: socket.socket,
    tls: ssl.SSLContext | None = None,
    *,
    idle_seconds: float | None = None,
    **options: Any,
) -> ConnectionGuard:
    """Serve an application; ``options`` are those of aiohttp's AppRunner."""
    from aiohttp import web

    @web.middleware
    async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
        guard.enter(request.protocol, "busy")
        try:
            return await handler(request)
        finally:
            guard.enter(request.protocol, "idle")

    app.middlewares.insert(0, watch)
    runner = web.AppRunner(app, access_log=None, **options)
    await runner.setup()
    make_handler: Any = runner.server
    guard = ConnectionGuard(make_handler, listener, tls, runner.cleanup, idle_seconds)
    return guard
