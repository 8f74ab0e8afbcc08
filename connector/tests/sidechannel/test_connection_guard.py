"""Which connections a server keeps, and for how long, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import ssl
import sys
import tracemalloc
from asyncio import sslproto
from collections.abc import AsyncIterator, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from pdcluster_connector import listening
from pdcluster_connector.listening import (
    BUSY_SECONDS,
    IDLE_SECONDS,
    ConnectionGuard,
    State,
    open_port,
)

LIMIT = 8


class Socket:
    """One of a client that has sent a byte, when somebody looks.

    Attributes:
        greets: the client does not end its TLS handshake.
        certificate: what it has shown at the handshake's end.
    """

    def __init__(self, name: str, greets: bool, certificate: object) -> None:
        self.name, self.greets, self.certificate = name, greets, certificate
        self.open = True
        self.said = b"x"
        self.over = asyncio.Event()

    def setblocking(self, _: bool) -> None:
        pass

    def fileno(self) -> int:
        return 7 if self.open else -1

    def close(self) -> None:
        self.open = False

    def shutdown(self, _: int) -> None:
        self.over.set()

    def recv(self, _: int, flags: int) -> bytes:
        assert flags == socket.MSG_PEEK
        return self.said


class Crowd:
    """Connections under a guard that takes eight of a kind, and TLS with four strangers."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tls: ssl.SSLContext | None = None,
        limit: int = LIMIT,
    ) -> None:
        monkeypatch.setattr(listening, "connection_limit", lambda: limit)
        monkeypatch.setattr(listening, "MAX_TLS_STRANGERS", LIMIT // 2)
        self.now = 1000.0
        self._loop = asyncio.get_running_loop()
        self._remove_reader = self._loop.remove_reader
        monkeypatch.setattr(self._loop, "time", lambda: self.now)
        monkeypatch.setattr(self._loop, "connect_accepted_socket", self._greet)
        self.guard = ConnectionGuard(asyncio.Protocol, open_port("127.0.0.1", 0), tls)
        self.watched: set[Any] = set()
        monkeypatch.setattr(self._loop, "add_reader", lambda what, *_: self.watched.add(what))
        monkeypatch.setattr(self._loop, "remove_reader", self._unwatch)
        self.names: dict[Any, str] = {}
        self.greeted: list[str] = []

    def _unwatch(self, what: Any) -> None:
        if what is self.guard.listener:
            self._remove_reader(what)
        self.watched.discard(what)

    async def _greet(self, handler: Any, connection: Any, **_: Any) -> tuple[Any, Any]:
        self.greeted.append(connection.name)
        if connection.greets:
            await connection.over.wait()
            raise ConnectionResetError
        certificate = {"peercert": connection.certificate}
        return SimpleNamespace(abort=connection.close, get_extra_info=certificate.get), handler()

    def accept(
        self, name: str, address: str = "", *, known: bool = False, greets: bool = False
    ) -> Any:
        """One more connection, by default from an address of its own, that has said nothing."""
        there = Socket(name, greets, certificate={"subject": ()} if known else None)
        before = set(self.guard._held)
        self.guard._take(there, address or name)  # type: ignore[arg-type]
        (connection,) = (self.guard._held[each] for each in set(self.guard._held) - before)
        self.names[connection] = name
        return connection

    async def connect(self, name: str, address: str = "", **what: bool) -> Any:
        """One more connection, whose client has sent a byte."""
        connection = self.accept(name, address, **what)
        self.guard._speaks(connection)
        await self.turn()
        return connection

    async def ask(self, connection: Any, *, wait: bool = False) -> None:
        self.now += 0.001
        self.guard.enter(connection.handler, "busy")
        if not wait:
            self.guard.enter(connection.handler, "idle")

    async def turn(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        self.now += 0.001

    async def pass_time(self, seconds: float) -> None:
        """The guard looks at its connections each second, as the loop's clock says."""
        for _ in range(int(seconds)):
            self.now += 1.0
            await self.turn()

    @property
    def there(self) -> list[str]:
        return sorted(self.names[each] for each in self.guard._held.values())


@pytest.fixture
async def crowd(monkeypatch: pytest.MonkeyPatch):
    made = Crowd(monkeypatch)
    yield made
    await ended(made)


@pytest.fixture
async def tls_crowd(monkeypatch: pytest.MonkeyPatch):
    made = Crowd(monkeypatch, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    yield made
    await ended(made)


async def ended(crowd: Crowd) -> None:
    guard = crowd.guard
    await guard.close()
    assert not crowd.watched
    assert not guard._held
    assert not any(guard._waiting.values())
    assert not len(guard._strangers) + len(guard._known) + len(guard._speaking)


def names(*words: str) -> list[str]:
    return sorted(words)


@pytest.mark.parametrize("said", [False, True])
async def test_the_oldest_silent_one_goes_for_a_new_one(crowd: Crowd, said: bool) -> None:
    for number in range(LIMIT):
        (await crowd.connect(f"{number}", greets=True)) if said else crowd.accept(f"{number}")
    await crowd.connect("new")
    assert crowd.there == names("1", "2", "3", "4", "5", "6", "7", "new")


async def test_a_connection_is_only_a_socket_until_its_client_has_sent_a_byte(
    tls_crowd: Crowd,
) -> None:
    silent = [tls_crowd.accept(f"{number}") for number in range(LIMIT)]
    await tls_crowd.turn()
    assert not tls_crowd.greeted
    tls_crowd.guard._speaks(silent[5])
    await tls_crowd.turn()
    assert tls_crowd.greeted == ["5"]
    assert len(tls_crowd.watched) == LIMIT - 1
    silent[6].socket.said = b""
    tls_crowd.guard._speaks(silent[6])
    await tls_crowd.turn()
    assert tls_crowd.greeted == ["5"], "that client is gone"
    assert "6" not in tls_crowd.there


async def test_few_strangers_have_tls_at_a_time(tls_crowd: Crowd) -> None:
    for number in range(2):
        tls_crowd.accept(f"silent-{number}")
    for number in range(50):
        await tls_crowd.connect(f"{number}", greets=True)
    assert tls_crowd.there == names("46", "47", "48", "49", "silent-0", "silent-1")


async def test_of_the_room_for_tls_one_address_has_half(tls_crowd: Crowd) -> None:
    await tls_crowd.connect("slow", greets=True)
    await tls_crowd.connect("ready")
    for number in range(50):
        await tls_crowd.connect(f"{number}", "10.0.0.7", greets=True)
    assert tls_crowd.there == names("48", "49", "ready", "slow")


async def test_clients_with_a_certificate_need_no_room_for_strangers_with_tls(
    tls_crowd: Crowd,
) -> None:
    for number in range(LIMIT):
        await tls_crowd.connect(f"known-{number}", known=True)
    for number in range(50):
        await tls_crowd.connect(f"{number}", greets=number % 2 == 0)
    known = [f"known-{number}" for number in range(LIMIT)]
    assert tls_crowd.there == names("46", "47", "48", "49", *known)


async def test_the_newest_of_the_address_with_the_fewest_is_greeted_next(tls_crowd: Crowd) -> None:
    """A client that comes beside a crowd does not wait until the crowd has been greeted."""
    await tls_crowd.connect("first", "10.0.0.7", greets=True)
    tls_crowd.greeted.clear()
    crowd = [tls_crowd.accept(f"{number}", "10.0.0.7") for number in range(3)]
    other = tls_crowd.accept("other")
    for connection in [*crowd, other]:
        tls_crowd.guard._speaks(connection)
    tls_crowd.guard._close(crowd[1])  # while it waits
    greeted = []
    for _ in range(5):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        greeted.append(list(tls_crowd.greeted))
    assert greeted[-1] == ["other", "2", "0"]
    assert len(greeted[0]) <= 2, "one in each turn of the loop"


async def test_who_is_closed_in_the_moment_of_its_greeting_takes_no_room(tls_crowd: Crowd) -> None:
    """The end of its TLS handshake is known then, and taken in a turn of the loop later."""
    connection = tls_crowd.accept("late", known=True)
    tls_crowd.guard._speaks(connection)
    while not tls_crowd.greeted:  # noqa: ASYNC110 - nobody reports it
        await asyncio.sleep(0)
    tls_crowd.guard._close(connection)
    assert connection.socket.open
    await tls_crowd.turn()
    assert not connection.socket.open
    assert not len(tls_crowd.guard._known)


async def test_a_transport_that_has_ended_holds_up_nobody(tls_crowd: Crowd) -> None:
    """Python 3.11.2 raises when such a transport is aborted, and others may still wait."""

    def abort() -> None:
        raise AttributeError("'NoneType' object has no attribute '_abort'")

    for number in range(LIMIT // 2):
        (await tls_crowd.connect(f"{number}")).end = abort
    waiting = [tls_crowd.accept(f"late {number}") for number in range(3)]
    for connection in waiting:
        tls_crowd.guard._speaks(connection)
    for _ in range(12):
        await asyncio.sleep(0)
    assert sorted(tls_crowd.greeted[-3:]) == ["late 0", "late 1", "late 2"]


async def test_of_addresses_with_equally_few_the_newest_is_greeted_next(tls_crowd: Crowd) -> None:
    """A crowd may have thousands of addresses."""
    for number in range(6):
        tls_crowd.guard._speaks(tls_crowd.accept(f"{number}", f"10.0.0.{number}"))
    for _ in range(12):
        await asyncio.sleep(0)
    assert tls_crowd.greeted == ["5", "4", "3", "2", "1", "0"]


async def test_an_address_is_as_new_as_its_newest_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the newest addresses are looked at, and one of a crowd's may also be a good client's."""
    async with crowd_of(64, monkeypatch) as crowd:
        for number in range(40):
            crowd.guard._speaks(crowd.accept(f"{number}", f"10.0.0.{number}"))
        crowd.guard._speaks(crowd.accept("good", "10.0.0.0"))
        await crowd.turn()
        assert crowd.greeted[0] == "good"


@contextlib.asynccontextmanager
async def asking(addresses: int, count: int) -> AsyncIterator[tuple[list[bytes], list[Any]]]:
    """So many clients have sent their numbers. What a server has answered, and the clients."""
    answered: list[bytes] = []

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            guard.enter(self, "busy")
            answered.append(data)
            guard.enter(self, "idle")
            self.transport.close()

    listener = open_port("127.0.0.1", 0)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(count)]
        for number, client in enumerate(clients):
            network, host = divmod(number % addresses, 200)
            client.bind((f"127.0.{network}.{host + 2}", 0))
            client.connect(listener.getsockname())
            client.sendall(b"%d" % number)
            client.setblocking(False)
        guard = ConnectionGuard(Answering, listener)
        yield answered, clients
        await guard.close()


async def test_a_new_client_does_not_wait_until_those_before_it_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server has the kernel's queue in order, and an answer takes longer than an accept."""
    monkeypatch.setattr(listening, "connection_limit", lambda: listening.MAX_CONNECTIONS)
    async with asking(addresses=200, count=401) as (answered, _):
        while b"400" not in answered:  # noqa: ASYNC110 - nobody reports it
            await asyncio.sleep(0)
        assert len(answered) < 150


async def test_no_client_is_closed_for_the_next_one_of_a_crowd_from_many_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "connection_limit", lambda: 256)
    async with asking(addresses=500, count=500) as (answered, clients):
        for client in clients:
            end = b"open"
            while end:
                await asyncio.sleep(0)
                with contextlib.suppress(BlockingIOError):
                    end = client.recv(1)  # raises if it was closed for another one
        assert len(answered) == 500


async def test_a_handshake_that_is_cut_off_leaves_no_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """300 KiB each until the collector comes: hundreds of them, when a crowd comes and goes."""
    monkeypatch.setattr(listening, "MAX_TLS_STRANGERS", 4)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    guard = ConnectionGuard(asyncio.Protocol, open_port("127.0.0.1", 0), context)
    gc.collect()
    gc.disable()

    def alive() -> list[object]:
        return [each for each in gc.get_objects() if isinstance(each, sslproto.SSLProtocol)]

    others = len(alive())  # of tests before this one in the same process
    try:
        with contextlib.ExitStack() as stack:
            for number in range(40):
                client = socket.create_connection(guard.listener.getsockname())
                stack.enter_context(client).sendall(b"\x16")
                while len(guard._speaking) < min(number + 1, 2):  # noqa: ASYNC110
                    await asyncio.sleep(0)
                await asyncio.sleep(0.001)
            assert len(alive()) - others <= 4
    finally:
        gc.enable()
    await guard.close()


async def test_a_silent_client_of_a_tls_port_takes_4_kib_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """asyncio's TLS takes 300 KiB from the start: a crowd of 8,192 took more than 2 GiB."""
    monkeypatch.setattr(listening, "connection_limit", lambda: 1000)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    guard = ConnectionGuard(asyncio.Protocol, open_port("127.0.0.1", 0), context)
    clients = [socket.create_connection(guard.listener.getsockname()) for _ in range(10)]
    while len(guard._held) < 10:  # noqa: ASYNC110 - nobody reports it
        await asyncio.sleep(0)
    gc.collect()
    tracemalloc.start()
    clients += [socket.create_connection(guard.listener.getsockname()) for _ in range(200)]
    while len(guard._held) < 210:  # noqa: ASYNC110
        await asyncio.sleep(0)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await guard.close()
    for client in clients:
        client.close()
    assert taken < 200 * 4096


async def test_who_has_asked_stays_while_a_crowd_says_nothing(crowd: Crowd) -> None:
    asked = await crowd.connect("asked")
    await crowd.ask(asked)
    waits = await crowd.connect("waits")
    await crowd.ask(waits, wait=True)
    for number in range(50):
        await crowd.connect(f"{number}")
    assert crowd.there == names("asked", "waits", "44", "45", "46", "47", "48", "49")


async def test_a_new_one_has_time_to_ask_while_a_crowd_asks_and_stays(crowd: Crowd) -> None:
    for number in range(50):
        await crowd.ask(await crowd.connect(f"asks-{number}"), wait=number % 2 == 0)
    new = await crowd.connect("new")
    await crowd.ask(await crowd.connect("asks-50"))
    assert "new" in crowd.there
    await crowd.ask(new)
    assert len(crowd.there) == LIMIT


async def test_who_asks_again_and_again_outlives_those_who_asked_once(crowd: Crowd) -> None:
    regular = await crowd.connect("regular")
    for number in range(50):
        await crowd.ask(regular)
        await crowd.ask(await crowd.connect(f"{number}"))
    assert "regular" in crowd.there


async def test_one_address_has_half_of_the_room(crowd: Crowd) -> None:
    for number in range(3):
        await crowd.connect(f"other-{number}")
    for number in range(50):
        await crowd.connect(f"same-{number}", "10.0.0.7")
    others, same = names("other-0", "other-1", "other-2"), [f"same-{n}" for n in range(46, 50)]
    assert crowd.there == names(*others, *same)


async def test_clients_with_a_certificate_have_room_of_their_own(crowd: Crowd) -> None:
    for number in range(LIMIT):
        await crowd.connect(f"known-{number}", "10.0.0.1", known=True)
    for number in range(50):
        await crowd.connect(f"{number}")
    assert [name for name in crowd.there if name.startswith("known")] == [
        f"known-{number}" for number in range(LIMIT)
    ]
    await crowd.connect("known-8", known=True)
    assert "known-0" not in crowd.there
    assert "known-8" in crowd.there
    assert len(crowd.there) == 2 * LIMIT - 1, "it came as a stranger, for whom one went"


async def test_connections_that_have_ended_need_no_room(crowd: Crowd) -> None:
    for number in range(LIMIT):
        await crowd.connect(f"{number}")
    for held, name in crowd.names.items():
        if name in "4567":
            held.socket.close()
    await crowd.pass_time(2)
    await crowd.connect("new")
    assert crowd.there == names("0", "1", "2", "3", "new")
    addresses = {address for address, _ in crowd.guard._addresses}
    assert sorted(addresses) == crowd.there, "an address is forgotten with its last"


@pytest.mark.parametrize(
    ("state", "seconds"),
    [("silent", IDLE_SECONDS), ("idle", IDLE_SECONDS), ("busy", BUSY_SECONDS)],
)
async def test_a_connection_is_closed_when_it_has_been_in_a_state_for_so_long(
    crowd: Crowd, state: State, seconds: float
) -> None:
    it = await crowd.connect("it")
    if state != "silent":
        await crowd.pass_time(IDLE_SECONDS - 2)
        crowd.guard.enter(it.handler, state)
    await crowd.pass_time(seconds - 2)
    assert crowd.there == ["it"]
    await crowd.pass_time(4)
    assert crowd.there == []


async def test_each_answer_starts_the_time_anew(crowd: Crowd) -> None:
    asking = await crowd.connect("asking")
    for _ in range(5):
        await crowd.pass_time(IDLE_SECONDS - 2)
        await crowd.ask(asking)
    assert crowd.there == ["asking"]


async def test_a_client_that_never_sends_a_byte_is_closed(crowd: Crowd) -> None:
    crowd.accept("it")
    await crowd.pass_time(IDLE_SECONDS - 2)
    assert crowd.there == ["it"]
    await crowd.pass_time(4)
    assert crowd.there == []


@pytest.mark.parametrize("said", [b"", b"x"])
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5])
async def test_a_crowd_that_comes_at_once_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, turns: int, said: bytes
) -> None:
    """Most of it is closed before its greeting begins, or while it does."""
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", LIMIT)
    gc.collect()  # what other tests left
    before = len(os.listdir("/proc/self/fd"))
    listener = open_port("127.0.0.1", 0)
    clients = [socket.create_connection(listener.getsockname()) for _ in range(200)]
    for client in clients:
        client.sendall(said)
    guard = ConnectionGuard(asyncio.Protocol, listener)
    taken = []
    take = guard._take
    monkeypatch.setattr(guard, "_take", lambda *what: (taken.append(what), take(*what)))
    while len(taken) < len(clients):
        guard._accept()  # as often in one turn of the loop as it takes
        for _ in range(turns):
            await asyncio.sleep(0)
    assert len(guard._held) == LIMIT // 2
    await asyncio.sleep(0)
    await guard.close()
    for client in clients:
        client.setblocking(False)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
        client.close()
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= before  # threads of other tests may end meanwhile


async def test_a_request_that_came_while_the_loop_was_busy_is_answered(crowd: Crowd) -> None:
    """The guard and the request are woken in one turn of the loop, the guard first."""
    late, quiet = await crowd.connect("late"), await crowd.connect("quiet")
    await crowd.ask(late)
    await crowd.ask(quiet)
    crowd.now += 3600.0
    await crowd.pass_time(1)
    await crowd.ask(late, wait=True)
    await crowd.pass_time(3)
    assert crowd.there == names("late")


# What a crowd costs, in calls: a busy machine's seconds would say little.

SIZES = 64, 128, 512


@contextlib.asynccontextmanager
async def crowd_of(size: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Crowd]:
    """A guard that takes so many."""
    with monkeypatch.context() as patch:
        made = Crowd(patch, limit=size)
        await made.turn()  # it has looked for late ones
        yield made
        await ended(made)


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The guard's functions, in the order in which they are called."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == listening.__file__:
            called.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("said", [False, True])
async def test_beside_a_large_crowd_a_client_takes_as_many_calls_as_beside_a_small_one(
    monkeypatch: pytest.MonkeyPatch, said: bool
) -> None:
    taken = []
    for size in SIZES:
        async with crowd_of(size, monkeypatch) as crowd:
            for number in range(size):
                (await crowd.connect(f"{number}")) if said else crowd.accept(f"{number}")
            with counted() as called:
                await crowd.ask(await crowd.connect("new"))
            assert "new" in crowd.there
            taken.append(called)
            with counted() as called:
                for _ in range(100):
                    await asyncio.sleep(0)
            assert not called, "nobody has come, said a byte or gone"
    assert taken[0] == taken[1] == taken[2]
    assert len(taken[0]) < 60


async def test_each_client_of_a_crowd_that_comes_at_once_takes_few_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if each has an address of its own."""
    for size in SIZES:
        async with crowd_of(size, monkeypatch) as crowd:
            with counted() as called:
                for number in range(size):
                    crowd.guard._speaks(crowd.accept(f"{number}"))
                while len(crowd.greeted) < size:  # noqa: ASYNC110 - nobody reports it
                    await asyncio.sleep(0)
            assert len(called) < 200 * size


async def test_no_host_is_both_families() -> None:
    listener = open_port("", 0)
    with listener:
        hosts = ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]
        for host in hosts:
            socket.create_connection((host, listener.getsockname()[1]), 5.0).close()
