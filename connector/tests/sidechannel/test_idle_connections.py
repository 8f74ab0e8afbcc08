"""How long a connection of the side channel may idle, by a clock that the test moves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pdcluster_connector.sidechannel.listening import ConnectionGuard

IDLE_SECONDS = 15.0


class Handler:
    """What the guard needs of aiohttp's handler of one connection."""

    def __init__(self) -> None:
        self.closed = False
        self.transport = SimpleNamespace(abort=self.abort)

    def abort(self) -> None:
        self.closed = True


class Crowd:
    """Connections under a guard."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.server = SimpleNamespace(connections=[])
        server: Any = self.server
        self.guard = ConnectionGuard(server, limit=8, idle_seconds=IDLE_SECONDS)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: self.now)
        self.sweeping = loop.create_task(self.guard.sweep())

    def connect(self) -> Any:
        self.server.connections.append(Handler())
        return self.server.connections[-1]

    async def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            for _ in range(5):
                await asyncio.sleep(0)
            self.now += 1.0
        for _ in range(5):
            await asyncio.sleep(0)

    def ask(self, handler: Any) -> None:
        self.guard.began(handler)
        self.guard.ended(handler)

    async def end(self) -> None:
        self.sweeping.cancel()
        await asyncio.gather(self.sweeping, return_exceptions=True)


async def test_a_connection_that_asks_nothing_is_closed_when_it_has_idled_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowd = Crowd(monkeypatch)
    silent = crowd.connect()
    await crowd.pass_time(IDLE_SECONDS)
    assert not silent.closed
    await crowd.pass_time(2)
    assert silent.closed
    await crowd.end()


async def test_each_answer_starts_the_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(monkeypatch)
    asking = crowd.connect()
    for _ in range(5):
        await crowd.pass_time(IDLE_SECONDS - 2)
        crowd.ask(asking)
    assert not asking.closed
    await crowd.pass_time(IDLE_SECONDS + 2)
    assert asking.closed
    await crowd.end()


async def test_a_question_that_is_not_answered_yet_keeps_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowd = Crowd(monkeypatch)
    waiting = crowd.connect()
    crowd.guard.began(waiting)
    await crowd.pass_time(10 * IDLE_SECONDS)
    assert not waiting.closed
    crowd.guard.ended(waiting)
    await crowd.pass_time(IDLE_SECONDS - 2)
    assert not waiting.closed, "it idles since the answer"
    await crowd.pass_time(4)
    assert waiting.closed
    await crowd.end()
