"""Peers that die, stop, restart: seen by the book within seconds, reported once."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from loopback_engines import PREFILL, SHAPE, HeardServer, HeldQuestions, connect, shards_of, until

from pdcluster_connector import listening
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol import messages as m
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.sidechannel import handshake, peers
from pdcluster_connector.sidechannel.peers import (
    HEALTH_SECONDS,
    POLL_SECONDS,
    RARE_POLL_SECONDS,
    PeerBook,
)
from pdcluster_connector.sidechannel.server import SideChannelServer

Serve = Callable[..., HeardServer]
Books = Callable[..., PeerBook]
AGAIN = "ns.c.prefill.r.0/00000000000000bb"


def watch(book: PeerBook) -> list[tuple[str, Failure]]:
    gone: list[tuple[str, Failure]] = []
    book.on_gone = lambda engine_id, failure: gone.append((engine_id, failure))
    return gone


def test_a_peer_is_asked_often_enough_to_be_missed_within_five_seconds() -> None:
    assert POLL_SECONDS <= 1.0, "a port that is closed answers the next question at once"
    assert POLL_SECONDS + sum(HEALTH_SECONDS) <= 5.0, "a stopped process answers neither of two"


def test_a_closed_port_is_seen_and_told_once(
    serve: Serve, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.02)
    server, book = serve(), books()
    gone = watch(book)
    assert isinstance(connect(book, server.port).wait(), m.EngineMetadata)
    server.stop()
    until(lambda: gone)
    time.sleep(0.3)
    ((engine_id, failure),) = gone
    assert engine_id == PREFILL
    assert failure.reason is Reason.SIDE_CHANNEL_UNREACHABLE
    again = connect(book, server.port, seconds=0.3).wait()
    assert isinstance(again, Failure)  # the metadata of the dead is not served from memory


def test_a_restart_on_the_same_port_is_a_restart(
    serve: Serve, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, book = serve(), books()
    gone, questions = watch(book), HeldQuestions(book, monkeypatch)
    assert isinstance(connect(book, server.port).wait(), m.EngineMetadata)
    server.stop()
    serve(AGAIN, port=server.port)
    questions.go()
    until(lambda: gone)
    assert gone[0][0] == PREFILL
    assert gone[0][1].reason is Reason.PEER_RESTARTED
    assert AGAIN in gone[0][1].message
    old = connect(book, server.port, seconds=600.0).wait()  # at once, not at the deadline
    assert isinstance(old, Failure)
    assert old.reason is Reason.PEER_RESTARTED
    assert isinstance(connect(book, server.port, AGAIN).wait(), m.EngineMetadata)


def test_a_rank_that_asks_rarely_forgets_the_incarnation_before_when_it_meets_the_next(
    serve: Serve, books: Books
) -> None:
    """A late ticket of the dead one must not bring its connection back, in the place of the next.

    The first rank may report nothing: it may have forgotten that incarnation for another cause.
    """
    server, book = serve(), books(rank=(0, 1))
    gone = watch(book)
    assert isinstance(connect(book, server.port).wait(), m.EngineMetadata)
    server.stop()
    serve(AGAIN, port=server.port)
    assert isinstance(connect(book, server.port, AGAIN).wait(), m.EngineMetadata)
    until(lambda: gone)
    ((engine_id, failure),) = gone
    assert (engine_id, failure.reason) == (PREFILL, Reason.PEER_RESTARTED)
    late = connect(book, server.port).wait()
    assert isinstance(late, Failure)
    assert late.reason is Reason.PEER_RESTARTED
    assert len(gone) == 1, "the next one lives"


def test_an_answer_that_comes_late_ends_nobody_who_has_answered_meanwhile(
    serve: Serve, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, book = serve(), books(rank=(0, 1))
    other = serve(AGAIN)
    gone, held = watch(book), asyncio.Event()
    shake_hands = handshake.shake_hands

    async def late(*given: Any) -> Any:
        answer = await shake_hands(*given)
        if given[2] == PREFILL:
            await held.wait()
        return answer

    monkeypatch.setattr(peers.handshake, "shake_hands", late)
    first = connect(book, server.port)
    until(lambda: server.statuses("handshake"))
    assert isinstance(connect(book, other.port, AGAIN).wait(), m.EngineMetadata)
    book._thread.call(held.set)
    assert isinstance(first.wait(), m.EngineMetadata)
    assert gone == []


def asked_again(server: HeardServer, asked: int) -> None:
    """Wait until a server has answered that it lives, more often than ``asked`` times."""
    until(lambda: len(server.statuses("health")) > asked)


def test_two_living_starts_of_one_engine_are_both_read(serve: Serve, books: Books) -> None:
    """One process was replaced, but its node is cut off from the API server and goes on."""
    old, new, book = serve(), serve(AGAIN), books(rank=(0, 1))
    gone = watch(book)
    assert isinstance(connect(book, old.port).wait(), m.EngineMetadata)
    assert isinstance(connect(book, new.port, AGAIN).wait(), m.EngineMetadata)
    asked_again(old, 0)
    book.forget(PREFILL, Failure(Reason.BACKEND_ERROR, "a transport error"))
    assert isinstance(connect(book, old.port).wait(), m.EngineMetadata)  # its ticket comes late
    asked_again(new, 0)
    for server, engine_id in ((old, PREFILL), (new, AGAIN)):
        assert isinstance(connect(book, server.port, engine_id).wait(), m.EngineMetadata)
    assert gone == []


@pytest.mark.parametrize("silent", [False, True], ids=["refuses", "silent"])
def test_a_start_that_answers_no_more_when_another_has_answered_elsewhere_is_replaced(
    serve: Serve, books: Books, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    old, book = Peer(silent=lambda *_: silent), books(rank=(0, 1))
    try:
        gone = watch(book)
        assert isinstance(connect(book, old.port).wait(), m.EngineMetadata)
        if not silent:
            old.close()
        monkeypatch.setattr(peers, "HEALTH_SECONDS", (0.3, 0.3))
        new = serve(AGAIN)
        assert isinstance(connect(book, new.port, AGAIN).wait(), m.EngineMetadata)
        until(lambda: gone)
        ((engine_id, failure),) = gone
        assert (engine_id, failure.reason) == (PREFILL, Reason.PEER_RESTARTED)
        assert f"{AGAIN} listens on 127.0.0.1:{new.port}" in failure.message
    finally:
        if silent:
            old.close()


def test_a_living_start_that_is_silent_later_is_not_taken_for_replaced(
    serve: Serve, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late ticket of another start came meanwhile: which of them is newer, no peer can say."""
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.02)
    starved, silence = threading.Event(), list[str]()
    peer, other, book = Peer(silent=lambda *_: starved.is_set()), serve(AGAIN), books()
    try:
        gone = watch(book)
        book.listen(lambda engine_id, _: silence.append(engine_id), silence=True)
        assert isinstance(connect(book, peer.port).wait(), m.EngineMetadata)
        assert isinstance(connect(book, other.port, AGAIN).wait(), m.EngineMetadata)
        asked = peer.asked
        until(lambda: peer.asked > asked + 2)  # it has answered since
        starved.set()
        monkeypatch.setattr(peers, "HEALTH_SECONDS", (0.3, 0.3))
        until(lambda: PREFILL in silence)
        monkeypatch.setattr(peers, "HEALTH_SECONDS", (60.0, 60.0))
        starved.clear()
        until(lambda: not book.silence.seconds(("127.0.0.1", peer.port)))
        assert gone == []
    finally:
        peer.close()


def test_a_living_peer_stays_and_is_asked_over_one_connection(
    serve: Serve, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.02)
    server, book = serve(), books()
    gone = watch(book)
    connect(book, server.port).wait()
    until(lambda: len(server.statuses("health")) >= 10)
    assert gone == []
    assert server._guard is not None
    assert len(server._guard._held) == 1


def test_a_forgotten_peer_is_watched_no_more(
    serve: Serve, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.02)
    server, book = serve(), books()
    gone = watch(book)
    connect(book, server.port).wait()
    book.forget(PREFILL, Failure(Reason.BACKEND_ERROR, "a transport error"))
    until(lambda: not book._peers)
    server.stop()
    time.sleep(0.3)
    assert gone == []


def prefill_process(pipe: Connection) -> None:
    server = SideChannelServer("127.0.0.1", 0, PREFILL, SHAPE, shards=shards_of(PREFILL))
    server.start()
    pipe.send(server.port)
    signal.pause()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_process_that_dies_or_stops(
    books: Books,
    how: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=prefill_process, args=(theirs,))
    process.start()
    try:
        book = books()
        gone: list[tuple[str, Failure]] = []
        book.listen(lambda *lost: gone.append(lost), silence=True)
        assert ours.poll(120)
        assert isinstance(connect(book, ours.recv()).wait(), m.EngineMetadata)
        assert process.pid is not None
        monkeypatch.setattr(peers, "HEALTH_SECONDS", HEALTH_SECONDS)
        os.kill(process.pid, how)
        took = until(lambda: gone)
        record_property(f"seen_after_{how.name}_s", round(took, 2))
        assert gone[0][1].reason is Reason.SIDE_CHANNEL_UNREACHABLE
    finally:
        process.kill()
        process.join()


def answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


HEALTH = answer(m.encode_health(m.HealthReply(PREFILL, "prefill", 1)))
METADATA = answer(m.encode(m.EngineMetadata(m.PROTOCOL_NEWEST, PREFILL, SHAPE, shards_of(PREFILL))))


class Peer:
    """A prefill engine that answers its handshake, and is silent where it is told to be."""

    def __init__(self, silent: Callable[[int, bool], bool]) -> None:
        """Ask ``silent`` whether to leave question N of its health, on a new connection or not."""
        self.silent = silent
        self.asked = 0
        self._held: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the test is over
                return
            self._held.append(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        for turn in itertools.count():
            try:
                asked = connection.recv(65536)
            except OSError:
                return
            if not asked:
                return
            if b"/healthz" not in asked:
                connection.sendall(METADATA)
                continue
            number, self.asked = self.asked, self.asked + 1
            if not self.silent(number, turn == 0):
                connection.sendall(HEALTH)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._held:
            connection.close()


@pytest.fixture
def quick(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer is not waited for long; the second has all the time that it may need."""
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(peers, "HEALTH_SECONDS", (0.3, 60.0))


@pytest.mark.usefixtures("quick")
def test_one_slow_answer_is_no_death(books: Books) -> None:
    # The second question of each round comes over a new connection.
    peer = Peer(silent=lambda number, new: number % 3 == 1 and not new)
    try:
        book = books()
        gone = watch(book)
        assert isinstance(connect(book, peer.port).wait(), m.EngineMetadata)
        until(lambda: peer.asked > 12 or gone)
        assert gone == []
    finally:
        peer.close()


def test_two_silences_in_a_row_are_said(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(peers, "HEALTH_SECONDS", (0.3, 0.3))
    peer = Peer(silent=lambda number, _: number >= 3)
    try:
        book = books()
        gone: list[tuple[str, Failure]] = []
        book.listen(lambda *lost: gone.append(lost), silence=True)
        assert isinstance(connect(book, peer.port).wait(), m.EngineMetadata)
        until(lambda: gone)
        assert gone[0][1].reason is Reason.SIDE_CHANNEL_UNREACHABLE
        until(lambda: peer.asked >= 2)  # it may read them late
    finally:
        peer.close()


def test_a_reset_connection_alone_is_no_death(books: Books) -> None:
    """The kept connection breaks, the port answers: the peer lives."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60.0)
        book = books()
        gone = watch(book)
        waiting = connect(book, listener.getsockname()[1])
        for reply in (METADATA, HEALTH, HEALTH):  # each over a connection that is then cut
            peer, _ = listener.accept()
            peer.settimeout(60.0)
            assert peer.recv(65536)
            peer.sendall(reply)
            waiting.wait()
            peer.close()
        assert gone == []


@pytest.mark.parametrize("tensor", [1, 4], ids=["tp1", "tp4"])
def test_of_a_decode_engine_of_any_size_only_the_first_rank_asks_often(
    serve: Serve, books: Books, tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert min(RARE_POLL_SECONDS) > listening.IDLE_SECONDS, (
        "a connection would be kept for each rank"
    )
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(peers, "RARE_POLL_SECONDS", (3600.0, 3600.0))
    asked: Counter[int] = Counter()
    server = serve()
    for rank in range(tensor):
        book = books(rank=(0, rank))

        async def ask(*question: Any, rank: int = rank, ask: Any = book._health) -> Any:
            asked[rank] += 1
            return await ask(*question)

        monkeypatch.setattr(book, "_health", ask)
        assert isinstance(connect(book, server.port).wait(), m.EngineMetadata)
    until(lambda: asked[0] >= 10)
    assert set(asked) == {0}


def test_another_rank_hears_that_a_peer_is_gone(serve: Serve, books: Books) -> None:
    server, book = serve(), books(rank=(0, 1))
    gone, heard = watch(book), []
    book.listen(lambda *news: heard.append(news))
    why = Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "connection refused", dead=True)
    book.hear(PREFILL, why)  # a peer that it does not know
    assert isinstance(connect(book, server.port).wait(), m.EngineMetadata)
    book.hear(PREFILL, why)
    until(lambda: heard)
    book.hear(PREFILL, why)
    assert isinstance(connect(book, server.port).wait(), m.EngineMetadata)
    assert server.statuses("handshake") == [200, 200], (
        "what is known of a dead peer is used no more"
    )
    assert gone == heard == [(PREFILL, why)]
