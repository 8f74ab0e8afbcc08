"""Real servers on 127.0.0.1 with free ports, and peer books that shake hands with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from loopback_engines import DECODE, PREFILL, SHAPE, HeardServer, shards_of
from msgspec.structs import replace

from loopback import free_port
from pdcluster_connector.sidechannel import peers
from pdcluster_connector.sidechannel.peers import PeerBook


@pytest.fixture
def serve() -> Iterator[Callable[..., HeardServer]]:
    """Start side channels: ``serve(engine_id=..., port=..., **change of the shape)``."""
    servers: list[HeardServer] = []

    def start(
        engine_id: str = PREFILL, port: int = 0, leases: object = None, **change: object
    ) -> HeardServer:
        server = HeardServer(
            "127.0.0.1",
            port or free_port(),  # which nobody takes while the server is away
            engine_id,
            replace(SHAPE, **change),
            shards=shards_of(engine_id),
            leases=leases,  # type: ignore[arg-type]
        )
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PeerBook]]:
    """Make started peer books of a decode engine's ranks."""
    # A machine that stalls for seconds is no death of a peer.
    monkeypatch.setattr(peers, "HEALTH_SECONDS", (60.0, 60.0))
    made: list[PeerBook] = []

    def make(rank: tuple[int, int] = (0, 0), **change: object) -> PeerBook:
        book = PeerBook(DECODE, replace(SHAPE, **change), rank)
        book.start()
        made.append(book)
        return book

    yield make
    for book in made:
        book.close()
