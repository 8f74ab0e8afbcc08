"""A thousand connections that say nothing, or a byte a second: handshakes of others do not wait."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest
from loopback_engines import DECODE, PREFILL, SHAPE, shards_of, until

import machine
from authority import Authority
from pdcluster_connector import listening
from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.sidechannel.handshake import (
    TryAgain,
    client_session,
    introduction,
    shake_hands,
)
from pdcluster_connector.sidechannel.server import SideChannelServer

CROWD = 1000
ROUNDS, HANDSHAKES = 5, 8
STAYS_SECONDS = 600.0  # longer than the test: who waits for a connection to be closed fails
HTTP_HEAD = b"POST /v1/handshake HTTP/1.1\r\nHost: x\r\nX-Slow: "
TLS_HEAD = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32)


@pytest.fixture(params=["http", "tls"])
def side_channel(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SideChannelServer, Tls | None, bytes]]:
    """A prefill engine's side channel, decode's TLS, and how a slow client begins."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A side channel takes at most a quarter of them.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, machine.OPEN_FILES), hard))
    monkeypatch.setattr(listening, "IDLE_SECONDS", STAYS_SECONDS)
    monkeypatch.setattr(listening, "TLS_SECONDS", STAYS_SECONDS)
    monkeypatch.setattr(listening, "MAX_TLS_STRANGERS", 2 * CROWD)  # one address has half
    ours = theirs = None
    if request.param == "tls":
        authority = Authority()
        ours = Tls(authority.files(tmp_path / "p", PREFILL), PREFILL)
        theirs = Tls(authority.files(tmp_path / "d", DECODE), DECODE)
    server = SideChannelServer("127.0.0.1", 0, PREFILL, SHAPE, shards=shards_of(PREFILL), tls=ours)
    server.start()
    yield server, theirs, HTTP_HEAD if ours is None else TLS_HEAD
    server.stop()


class Crowd:
    """Connections of which half say nothing and half send a byte a second."""

    def __init__(self, port: int, head: bytes) -> None:
        self._head = head
        self._over = threading.Event()
        place = ("127.0.0.1", port)
        self.peers = [socket.create_connection(place, timeout=60) for _ in range(CROWD)]
        self.sent = 0
        self._thread = threading.Thread(target=self._drip)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def _drip(self) -> None:
        while not self._over.wait(1.0):
            at = self.sent % len(self._head)
            for peer in self.peers[::2]:
                peer.send(self._head[at : at + 1])
            self.sent += 1

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for peer in self.peers:
            peer.close()


def worst_of_each_round(server: SideChannelServer, tls: Tls | None) -> list[float]:
    """The seconds of the slowest handshake in each round, over a new connection each."""

    me = introduction(DECODE, SHAPE)

    async def attempt() -> EngineMetadata | Failure | TryAgain:
        async with client_session() as session:
            return await shake_hands(session, me, PREFILL, "127.0.0.1", server.port, tls)

    async def measure() -> list[float]:
        worst = []
        for _ in range(ROUNDS):
            taken = []
            for _ in range(HANDSHAKES):
                start = time.perf_counter()
                for _ in range(20):  # an attempt gives up where the machine stalls for seconds
                    if isinstance(answer := await attempt(), EngineMetadata):
                        break
                taken.append(time.perf_counter() - start)
                assert isinstance(answer, EngineMetadata), answer
                await asyncio.sleep(0.02)
            worst.append(max(taken))
        return worst

    return asyncio.run(measure())


@pytest.mark.needs("files")
def test_a_crowd_that_says_nothing_delays_nobody(
    side_channel: tuple[SideChannelServer, Tls | None, bytes],
    record_property: Callable[[str, object], None],
) -> None:
    server, tls, head = side_channel
    alone = worst_of_each_round(server, tls)
    guard = server._guard
    assert guard is not None
    with Crowd(server.port, head) as crowd:
        until(lambda: len(guard._held) >= CROWD)
        until(lambda: crowd.sent >= 1)
        beside = worst_of_each_round(server, tls)
        assert len(guard._held) >= CROWD, "they are there yet"
    record_property("alone_ms", [round(1e3 * each, 1) for each in alone])
    record_property("beside_the_crowd_ms", [round(1e3 * each, 1) for each in beside])
