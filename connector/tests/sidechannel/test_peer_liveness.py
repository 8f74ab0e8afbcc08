"""Peers that die, stop, restart: seen by the book within seconds, reported once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
from loopback_engines import PREFILL, SHAPE, connect, shards_of, until

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol import messages as m
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.mirrors import from_shape
from pdcluster_connector.runtime.peers import PeerBook
from pdcluster_connector.runtime.side_channel import SideChannelServer

Serve = Callable[..., SideChannelServer]
Books = Callable[..., PeerBook]
AGAIN = "ns.c.prefill.r.0/00000000000000bb"


def watch(book: PeerBook) -> list[tuple[str, Failure]]:
    gone: list[tuple[str, Failure]] = []
    book.on_gone = lambda engine_id, failure: gone.append((engine_id, failure))
    return gone


def test_a_closed_port_is_seen_within_two_seconds(serve: Serve, books: Books) -> None:
    server, book = serve(), books()
    gone = watch(book)
    assert isinstance(connect(book, server.port).wait(), m.EngineMetadata)
    server.stop()
    assert until(lambda: gone) < 2.0
    time.sleep(1.5)
    ((engine_id, failure),) = gone
    assert engine_id == PREFILL
    assert failure.reason is Reason.SIDE_CHANNEL_UNREACHABLE
    again = connect(book, server.port, seconds=0.3).wait()
    assert isinstance(again, Failure)  # the metadata of the dead is not served from memory


def test_a_restart_on_the_same_port_is_a_restart(serve: Serve, books: Books) -> None:
    server, book = serve(), books()
    gone = watch(book)
    assert isinstance(connect(book, server.port).wait(), m.EngineMetadata)
    server.stop()
    serve(AGAIN, port=server.port)
    until(lambda: gone)
    assert gone[0][0] == PREFILL
    assert gone[0][1].reason is Reason.PEER_RESTARTED
    assert AGAIN in gone[0][1].message
    old = connect(book, server.port, seconds=60.0).wait(2.0)  # at once, not at the deadline
    assert isinstance(old, Failure)
    assert old.reason is Reason.PEER_RESTARTED
    assert isinstance(connect(book, server.port, AGAIN).wait(), m.EngineMetadata)


def test_a_living_peer_stays_and_is_asked_over_one_connection(serve: Serve, books: Books) -> None:
    server, book = serve(), books()
    gone = watch(book)
    connect(book, server.port).wait()
    time.sleep(3.5)
    assert gone == []
    assert server._guard is not None
    assert len(server._guard._server.connections) == 1


def test_a_forgotten_peer_is_watched_no_more(serve: Serve, books: Books) -> None:
    server, book = serve(), books()
    gone = watch(book)
    connect(book, server.port).wait()
    book.forget(PREFILL, Failure(Reason.BACKEND_ERROR, "a transport error"))
    until(lambda: not book._peers)
    server.stop()
    time.sleep(1.5)
    assert gone == []


def prefill_process(pipe: Connection) -> None:
    server = SideChannelServer("127.0.0.1", 0, PREFILL, SHAPE, shards=shards_of(PREFILL))
    server.start()
    pipe.send(server.port)
    signal.pause()


@pytest.mark.parametrize(
    ("how", "seconds"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 5.0)], ids=["killed", "stopped"]
)
def test_a_process_that_dies_or_stops(
    books: Books,
    how: signal.Signals,
    seconds: float,
    record_property: Callable[[str, object], None],
) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=prefill_process, args=(theirs,))
    process.start()
    try:
        book = books()
        gone = watch(book)
        assert ours.poll(30)
        assert isinstance(connect(book, ours.recv()).wait(), m.EngineMetadata)
        assert process.pid is not None
        os.kill(process.pid, how)
        took = until(lambda: gone, seconds=8.0)
        record_property(f"seen_after_{how.name}_s", round(took, 2))
        assert took < seconds
        assert gone[0][1].reason is Reason.SIDE_CHANNEL_UNREACHABLE
    finally:
        process.kill()
        process.join()


def test_a_reset_connection_alone_is_no_death(books: Books) -> None:
    """The kept connection breaks, the port answers: the peer lives."""
    health = m.encode_health(m.HealthReply(PREFILL, "prefill", 1))
    metadata = m.encode(m.EngineMetadata(1, PREFILL, from_shape(SHAPE), shards_of(PREFILL), 60.0))

    def answer(body: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5.0)
        book = books()
        gone = watch(book)
        waiting = connect(book, listener.getsockname()[1])
        for body in (metadata, health, health):  # each over a connection that is then cut
            peer, _ = listener.accept()
            peer.settimeout(5.0)
            assert peer.recv(65536)
            peer.sendall(answer(body))
            waiting.wait(3.0)
            peer.close()
        assert gone == []
