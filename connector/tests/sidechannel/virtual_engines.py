"""Whole engines in virtual time and on one thread: the same numbers bring the same course again.

The engines are those of :mod:`pdcluster_connector.testing.engines`. Only their threads and sockets
are replaced: side channels answer over :class:`Network`, and transfer threads make turns when the
test says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import queue
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from own_loop import now

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.sidechannel import handshake, lease_client, loop_thread, peers, server
from pdcluster_connector.testing import engines, nixl
from pdcluster_connector.testing.nixl import Behaviour, Fabric, Transfer
from pdcluster_connector.transfer import receiver
from pdcluster_connector.vllm.worker_side import link_keeper

LONG_AGO = 1e9  # when the machines' clocks began
TURNS = 4  # of a transfer thread, one after the other, while something moves
FIRST_PORT = 5600


class Soon:
    """Stands in for a thread with a loop: calls run soon on the test's own loop."""

    alive = False

    def __init__(self, _name: str) -> None: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def call(self, callback: Callable[..., object], *args: object) -> bool:
        self.loop.call_soon(callback, *args)
        return True


class Turns(receiver.Receiver):
    """A receiver without the thread."""

    crashes = 0

    def start(self) -> None:
        _ = self._connections.agent

    def close(self) -> bool:
        self._end(Failure(Reason.BACKEND_ERROR, "the receiver is closed"))
        return True

    def turns(self) -> None:
        """Go on while something moves, as the thread does."""
        for _ in range(TURNS):
            try:
                moved = self._commands()
                self._executor.tick()
                moved = self._executor.turn() or moved
            except Exception as error:  # noqa: BLE001
                self.crashes += 1
                failure = Failure(Reason.BACKEND_ERROR, f"{type(error).__name__}: {error}")
                self._executor.rebuild(failure)
                moved = True
            if not moved:
                return

    def _commands(self) -> bool:
        commanded = False
        with contextlib.suppress(queue.Empty):
            while command := self._inbox.get_nowait():
                command()
                commanded = True
        return commanded


class Session:
    """The HTTP session of an engine: who asks."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id

    async def close(self) -> None: ...


class Network:
    """What lies between engines. An engine is named by how its id begins.

    Attributes:
        servers: side channels by port.
        stopped: processes that do nothing, and say nothing.
        cuts: pairs of engines: nothing that the first one sends reaches the second one.
        kv: whether KV passes, where other things do.
        seconds: how long an answer, and a read, may take: the least and the most.
    """

    def __init__(self, fabric: Fabric, dice: random.Random) -> None:
        self.fabric, self.dice = fabric, dice
        self.servers: dict[int, server.SideChannelServer] = {}
        self.stopped: set[str] = set()
        self.cuts: set[tuple[str, str]] = set()
        self.kv = True
        self.seconds = (0.0, 0.02)
        self.behave: Callable[[Transfer], Behaviour] = lambda _: Behaviour(hang=True)
        self._changed = asyncio.Event()
        self._landing: dict[Transfer, float] = {}
        self._serving: set[asyncio.Task[None]] = set()
        fabric.behave = self._posted

    def passes(self, one: str, other: str) -> bool:
        """Whether what one engine says to another arrives, and both run."""
        if any(one.startswith(x) and other.startswith(y) for x, y in self.cuts):
            return False
        return not any(engine.startswith(x) for engine in (one, other) for x in self.stopped)

    def change(self) -> None:
        """Call this after a change of what passes."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def request(
        self, session: Session, _: str, url: str, *_peer: Any, **how: Any
    ) -> tuple[int, bytes]:
        """Stands in for ``handshake.request``."""
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        to = urlsplit(url)
        timeout: aiohttp.ClientTimeout = how["timeout"]
        serving = asyncio.create_task(
            self._serve(session.engine_id, to.port or 0, to.path, how.get("data"), answer)
        )
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        seconds = min(bound for bound in (timeout.total, timeout.sock_read) if bound)
        try:
            return await asyncio.wait_for(answer, seconds)
        finally:
            serving.cancel()

    async def _serve(
        self,
        asks: str,
        port: int,
        path: str,
        body: bytes | None,
        answer: asyncio.Future[tuple[int, bytes]],
    ) -> None:
        await asyncio.sleep(self.dice.uniform(*self.seconds))
        asked = self.servers.get(port)
        if asked is None:
            answer.set_exception(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))
            return
        await self._through(asks, asked.engine_id)
        if asked is not self.servers.get(port):
            answer.set_exception(ConnectionResetError(errno.ECONNRESET, "reset"))
            return
        if path == "/healthz":
            reply = asked.health()
        elif path == "/v1/leases":
            reply = asked.lease(body or b"", None)
        else:
            reply = asked.handshake(body or b"", None)
        await self._through(asked.engine_id, asks)
        if not answer.done():
            assert isinstance(reply.body, bytes)
            answer.set_result((reply.status, reply.body))

    async def _through(self, one: str, other: str) -> None:
        await asyncio.sleep(self.dice.uniform(*self.seconds))
        while not self.passes(one, other):
            await self._changed.wait()

    def _posted(self, transfer: Transfer) -> Behaviour:
        behaviour = self.behave(transfer)
        seconds = behaviour.delay or self.dice.uniform(*self.seconds)
        self._landing[transfer] = now() + seconds
        return behaviour

    def carry(self) -> None:
        """Let the reads land whose time has come; of others, a part may."""
        flying = list(self.fabric.flying)
        for transfer in flying:
            ends = transfer.agent, transfer.peer
            if not (self.kv and self.passes(*ends) and self.passes(*reversed(ends))):
                continue
            if now() >= self._landing.get(transfer, 0.0):
                self.fabric.land(transfer)
            elif len(transfer.copies) > 1 and self.dice.random() < 0.2:
                self.fabric.land(transfer, copies=1)
        self._landing = {one: at for one, at in self._landing.items() if one in set(flying)}

    def started(self, of: server.SideChannelServer) -> None:
        """Stands in for ``SideChannelServer.start``."""
        of.port = of.port or FIRST_PORT + len(self.servers)
        self.servers[of.port] = of
        self.change()

    def ended(self, of: server.SideChannelServer) -> None:
        """Stands in for ``SideChannelServer.stop``."""
        if self.servers.get(of.port) is of:
            del self.servers[of.port]
        self.change()


def install(monkeypatch: pytest.MonkeyPatch, network: Network, dice: random.Random) -> None:
    """Have all engines that are made from now on live in virtual time."""

    class SideChannel(server.SideChannelServer):
        def start(self) -> None:
            network.started(self)

        def stop(self) -> None:
            network.ended(self)

    clock = SimpleNamespace(monotonic=now, time=lambda: now() + LONG_AGO)
    clocks = (engines, nixl, peers, handshake, lease_client, link_keeper, server)
    for module in clocks:
        monkeypatch.setattr(module, "time", clock)
    for module in (peers, lease_client, link_keeper):
        monkeypatch.setattr(module, "random", dice)
    monkeypatch.setattr(loop_thread, "LoopThread", Soon)
    monkeypatch.setattr(engines, "secrets", SimpleNamespace(randbits=dice.getrandbits))
    monkeypatch.setattr(engines, "Receiver", partial(Turns, clock=now))
    monkeypatch.setattr(handshake, "request", network.request)
    monkeypatch.setattr(server, "SideChannelServer", SideChannel)


def start_prefill(*given: Any, **named: Any) -> engines.PrefillEngine:
    """Start a prefill engine in virtual time."""
    engine = engines.PrefillEngine(*given, **named)
    engine.leases._clock = now
    return engine


def start_decode(*given: Any, **named: Any) -> engines.DecodeEngine:
    """Start a decode engine in virtual time."""
    engine = engines.DecodeEngine(*given, **named)
    for client in (engine._leases, *engine._peers):
        client._session = Session(engine.engine_id)  # type: ignore[assignment]
    return engine


def end_decode(engine: engines.DecodeEngine) -> list[asyncio.Task[None]]:
    """End what a decode engine has under way on the loop; returns it."""
    tasks = [outbox.task for outbox in engine._leases._outboxes.values()]
    for book in engine._peers:
        for peer in book._peers.values():
            tasks.append(peer.task)
            for waiter in peer.waiters:
                if waiter.timer is not None:
                    waiter.timer.cancel()
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    return running


def turns(engine: engines.DecodeEngine) -> None:
    """Let the transfer threads of an engine make turns."""
    for one in engine.receivers.values():
        assert isinstance(one, Turns)
        one.turns()
