"""Which connections a server keeps, and for how long, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from types import SimpleNamespace
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


class Crowd:
    """Connections under a guard that takes eight of a kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(listening, "connection_limit", lambda: LIMIT)
        self.now = 1000.0
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(self._loop, "time", lambda: self.now)
        monkeypatch.setattr(self._loop, "connect_accepted_socket", self._greet)
        self.guard = ConnectionGuard(asyncio.Protocol, open_port("127.0.0.1", 0))
        self.names: dict[Any, str] = {}

    async def _greet(self, handler: Any, connection: Any, **_: Any) -> tuple[Any, Any]:
        if connection.greets:
            await asyncio.Future()
        certificate = {"peercert": connection.certificate}
        return SimpleNamespace(abort=connection.close, get_extra_info=certificate.get), handler()

    async def connect(
        self, name: str, address: str = "", *, known: bool = False, greets: bool = False
    ) -> Any:
        """One more connection, by default from an address of its own."""
        there = SimpleNamespace(open=True, certificate={"subject": ()} if known else None)
        there.greets = greets
        there.setblocking = lambda _: None
        there.fileno = lambda: 7 if there.open else -1
        there.close = lambda: setattr(there, "open", False)
        before = set(self.guard._held)
        self.guard._take(there, address or name)
        (handler,) = set(self.guard._held) - before
        self.names[handler] = name
        await self.turn()
        return handler

    async def ask(self, handler: Any, *, wait: bool = False) -> None:
        self.now += 0.001
        self.guard.enter(handler, "busy")
        if not wait:
            self.guard.enter(handler, "idle")

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
        return sorted(self.names[each] for each in self.guard._held)


@pytest.fixture
async def crowd(monkeypatch: pytest.MonkeyPatch):
    made = Crowd(monkeypatch)
    yield made
    await made.guard.close()
    assert not made.guard._held
    assert not len(made.guard._strangers) + len(made.guard._known)


def names(*words: str) -> list[str]:
    return sorted(words)


@pytest.mark.parametrize("greets", [False, True])
async def test_the_oldest_silent_one_goes_for_a_new_one(crowd: Crowd, greets: bool) -> None:
    for number in range(LIMIT):
        await crowd.connect(f"{number}", greets=greets)
    await crowd.connect("new")
    assert crowd.there == names("1", "2", "3", "4", "5", "6", "7", "new")


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
    for held in list(crowd.guard._held.values())[4:]:
        held.socket.close()
    await crowd.pass_time(2)
    await crowd.connect("new")
    assert crowd.there == names("0", "1", "2", "3", "new")
    assert sorted(crowd.guard._addresses) == crowd.there, "an address is forgotten with its last"


@pytest.mark.parametrize(
    ("state", "seconds"),
    [("silent", IDLE_SECONDS), ("idle", IDLE_SECONDS), ("busy", BUSY_SECONDS)],
)
async def test_a_connection_is_closed_when_it_has_been_in_a_state_for_so_long(
    crowd: Crowd, state: State, seconds: float
) -> None:
    handler = await crowd.connect("it")
    if state != "silent":
        await crowd.pass_time(IDLE_SECONDS - 2)
        crowd.guard.enter(handler, state)
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


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5])
async def test_a_crowd_that_comes_at_once_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Most of it is closed before its greeting begins, or while it does."""
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", LIMIT)
    before = len(os.listdir("/proc/self/fd"))
    listener = open_port("127.0.0.1", 0)
    clients = [socket.create_connection(listener.getsockname()) for _ in range(200)]
    guard = ConnectionGuard(asyncio.Protocol, listener)

    async def wait_for_the_end(of: list[socket.socket]) -> None:
        for client in of:
            client.setblocking(False)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
            client.close()

    for _ in range(100):
        guard._accept()  # as often in one turn of the loop as it takes
        for _ in range(turns):
            await asyncio.sleep(0)
    await wait_for_the_end(clients[: -LIMIT // 2])
    assert len(guard._held) == LIMIT // 2
    await guard.close()
    await wait_for_the_end(clients[-LIMIT // 2 :])
    assert len(os.listdir("/proc/self/fd")) == before


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


async def test_no_host_is_both_families() -> None:
    listener = open_port("", 0)
    with listener:
        hosts = ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]
        for host in hosts:
            socket.create_connection((host, listener.getsockname()[1]), 5.0).close()
