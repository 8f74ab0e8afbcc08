"""Handshakes between real servers and peer books over loopback sockets."""

from __future__ import annotations

import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from operator import add
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from loopback_engines import PREFILL, SHAPE, Answer, HeardServer, connect, shards_of, until

from loopback import free_port
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol import messages as m
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.sidechannel import peers as peers_module
from pdcluster_connector.sidechannel.handshake import introduction, judge
from pdcluster_connector.sidechannel.peers import PeerBook
from pdcluster_connector.sidechannel.server import SideChannelServer

Serve = Callable[..., HeardServer]
Books = Callable[..., PeerBook]


def test_a_handshake_brings_shape_and_shards(serve: Serve, books: Books) -> None:
    server = serve()
    reply = connect(books(), server.port).wait()
    assert isinstance(reply, m.EngineMetadata)
    assert reply.shape == SHAPE
    assert reply.shards == shards_of(PREFILL)


def test_two_books_shake_hands_each_once_however_often_they_ask(serve: Serve, books: Books) -> None:
    server = serve()
    pair = books(), books()
    answers = [connect(book, server.port) for book in pair for _ in range(50)]
    assert all(isinstance(answer.wait(), m.EngineMetadata) for answer in answers)
    assert isinstance(connect(pair[0], server.port).wait(), m.EngineMetadata)
    assert server.statuses("handshake") == [200, 200]


def test_a_dead_engine_delays_no_other(
    serve: Serve, books: Books, record_property: Callable[[str, object], None]
) -> None:
    """21 engines at once; one port swallows connections and never answers."""
    alive = [serve(f"ns.c.prefill.r.{n}/{n:016x}") for n in range(19)]
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, never reads
        book = books()
        start = time.monotonic()
        port = silent.getsockname()[1]
        dead = connect(book, port, "ns.c.prefill.r.99/00", seconds=2.0)
        waited_for = connect(book, port, "ns.c.prefill.r.98/00", seconds=600.0)
        answers = [
            connect(book, server.port, f"ns.c.prefill.r.{n}/{n:016x}")
            for n, server in enumerate(alive)
        ]
        assert all(isinstance(answer.wait(), m.EngineMetadata) for answer in answers)
        took = sorted(answer.at - start for answer in answers)
        assert not waited_for.values, "the others were answered only after it"
        failure = dead.wait()
        assert isinstance(failure, Failure)
        assert failure.reason is Reason.SIDE_CHANNEL_UNREACHABLE
        assert dead.at - start > 1.9  # its own deadline, no fixed timeout
        assert not waited_for.values
    record_property("slowest_of_19_ms", round(took[-1] * 1000, 1))
    record_property("median_of_19_ms", round(statistics.median(took) * 1000, 1))


def test_refusals_make_room_for_other_peers(
    serve: Serve, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's tickets can name any number of engines that do not exist."""
    monkeypatch.setattr(peers_module, "MAX_PEERS", 3)
    server, book = serve(), books()
    assert isinstance(connect(book, server.port).wait(), m.EngineMetadata)
    for number in range(10):
        refused = connect(book, server.port, f"ns.c.prefill.r.{number}/ff").wait()
        assert isinstance(refused, Failure)
        assert refused.reason is Reason.PEER_RESTARTED, refused
        assert len(book._peers) <= 3
    # The one that is connected kept its place.
    assert isinstance(connect(book, server.port).wait(), m.EngineMetadata)
    assert server.statuses("handshake") == [200] * 11


def test_more_peers_than_may_be_tried_at_once_are_refused_by_name(
    serve: Serve, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "MAX_PEERS", 3)
    book = books()
    ports = [free_port() for _ in range(3)]
    tried = [connect(book, port, f"ns.c.prefill.r.{n}/aa", 60.0) for n, port in enumerate(ports)]
    refused = connect(book, free_port(), "ns.c.prefill.r.9/aa", 60.0).wait()
    assert isinstance(refused, Failure)
    assert refused.reason is Reason.SIDE_CHANNEL_UNREACHABLE
    assert "3 handshakes are under way already" in refused.message
    assert not any(answer.values for answer in tried)
    for number, port in enumerate(ports):  # and go on being tried
        serve(f"ns.c.prefill.r.{number}/aa", port=port)
    assert all(isinstance(answer.wait(), m.EngineMetadata) for answer in tried)


def test_retried_until_the_engine_listens(serve: Serve, books: Books) -> None:
    port = free_port()
    answer = connect(books(), port, seconds=200.0)
    time.sleep(0.3)
    assert not answer.values
    serve(port=port)
    assert isinstance(answer.wait(), m.EngineMetadata)


@pytest.fixture
def silent_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield silent.getsockname()[1]


def test_each_request_has_its_own_deadline(books: Books, silent_port: int) -> None:
    book, port = books(), silent_port
    start = time.monotonic()
    past, early, late = Answer(), Answer(), Answer()
    for answer, seconds in ((past, -5.0), (early, 0.3), (late, 3.0)):
        book.connect(PREFILL, "127.0.0.1", port, partial(add, start, seconds), answer)
    for answer in (past, early, late):
        failure = answer.wait()
        assert isinstance(failure, Failure)
        assert failure.reason is Reason.SIDE_CHANNEL_UNREACHABLE
    assert "has not answered yet" in late.wait().message
    assert past.at < early.at < late.at, "none waits for another"
    assert early.at - start > 0.25
    assert late.at - start > 2.9
    until(lambda: not book._peers)


def test_a_refusal_reaches_all_that_wait_and_is_not_kept(serve: Serve, books: Books) -> None:
    packed = {"token_sliceable": False, "packing": "CPU_ATTN/vec"}
    server = serve(block_size=32, **packed)
    book = books(**packed)
    book._thread.call(time.sleep, 0.2)  # so that all of them come before the answer
    answers = [connect(book, server.port, seconds=600.0) for _ in range(30)]
    for answer in answers:
        failure = answer.wait()
        assert isinstance(failure, Failure)
        assert failure.reason is Reason.BLOCK_INTERIOR_OPAQUE
        assert "32" in failure.message
        assert "16" in failure.message
    assert server.statuses("handshake") == [409]
    until(lambda: not book._peers)
    assert isinstance(connect(book, server.port).wait(), Failure)
    assert server.statuses("handshake") == [409] * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "another model"}, Reason.MODEL_MISMATCH),
        ({"kv_dtype": "bfloat16"}, Reason.KV_DTYPE_MISMATCH),
        ({"context": 2}, Reason.CONTEXT_PARALLEL_UNSUPPORTED),
    ],
    ids=str,
)
def test_rules_refuse_by_name(
    serve: Serve, books: Books, change: dict[str, object], reason: Reason
) -> None:
    failure = connect(books(), serve(**change).port).wait()
    assert isinstance(failure, Failure)
    assert failure.reason is reason


def test_another_protocol_is_refused_by_name(
    serve: Serve, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    monkeypatch.setattr(m, "PROTOCOL_OLDEST", 7)
    monkeypatch.setattr(m, "PROTOCOL_NEWEST", 9)
    request = m.encode(m.HandshakeRequest((1, 1), "d/1", SHAPE))
    decoded = m.decode_handshake_request(request)
    assert isinstance(decoded, m.HandshakeRequest)
    refusal = server._refusal(decoded)
    assert refusal is not None
    assert refusal.reason == Reason.PROTOCOL_VERSION_MISMATCH
    assert (refusal.prefill_value, refusal.decode_value) == ("7..9", "1..1")


def handshake_of_protocol(newest: int, port: int) -> tuple[int, m.EngineMetadata | m.Refusal]:
    """What a decode engine of protocols 1 to ``newest`` is answered."""
    request = m.encode(m.HandshakeRequest((1, newest), "d/1", SHAPE))
    try:
        with urlopen(f"http://127.0.0.1:{port}/v1/handshake", request, timeout=60) as response:
            status, raw = response.status, response.read()
    except HTTPError as error:
        status, raw = error.code, error.read()
    reply = m.decode_handshake_reply(raw)
    assert not isinstance(reply, m.Malformed)
    return status, reply


def test_decode_is_answered_in_the_newest_protocol_of_both(serve: Serve) -> None:
    server = serve()
    for newest, expected in ((3, 3), (9, m.PROTOCOL_NEWEST)):
        status, reply = handshake_of_protocol(newest, server.port)
        assert isinstance(reply, m.EngineMetadata)
        assert (status, reply.protocol) == (200, expected)
        assert reply.shards == shards_of(PREFILL)


def test_decode_that_reads_no_ticket_of_ours_is_refused_at_the_handshake(serve: Serve) -> None:
    """Else the link would stand, and every prompt would silently be computed on decode."""
    status, refusal = handshake_of_protocol(2, serve().port)
    assert isinstance(refusal, m.Refusal)
    assert (status, refusal.reason) == (409, Reason.PROTOCOL_VERSION_MISMATCH)
    assert "give both engines the same connector" in refusal.message
    assert (refusal.prefill_value, refusal.decode_value) == ("3..3", "1..2")


def test_prefill_of_the_protocol_before_is_refused() -> None:
    """Its tickets have no signature."""
    told = m.EngineMetadata(2, PREFILL, SHAPE, shards_of(PREFILL))
    failure = judge(told, introduction("d/1", SHAPE), PREFILL, "here")
    assert isinstance(failure, Failure)
    assert failure.reason is Reason.PROTOCOL_VERSION_MISMATCH


def test_metadata_that_contradicts_itself_is_not_used(books: Books) -> None:
    server = SideChannelServer("127.0.0.1", 0, PREFILL, SHAPE, shards=shards_of("p/other"))
    server.start()
    try:
        failure = connect(books(), server.port).wait()
        assert isinstance(failure, Failure)
        assert failure.reason is Reason.ENGINE_ID_INCONSISTENT
    finally:
        server.stop()


def test_a_port_that_is_no_side_channel(books: Books) -> None:
    """Something answers, but not as we expect: retried, and named at the deadline."""
    with socket.create_server(("127.0.0.1", 0)) as odd:
        odd.settimeout(60.0)
        book, port = books(), odd.getsockname()[1]
        connect(book, port, seconds=600.0)
        for _ in range(2):
            peer, _ = odd.accept()
            peer.recv(65536)
            peer.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            peer.close()
        failure = connect(book, port, seconds=0.1).wait()
    assert isinstance(failure, Failure)
    assert failure.reason is Reason.SIDE_CHANNEL_UNREACHABLE


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x81\xa4type\xa6engine", m.encode(m.Refusal("x", "y"))[:-3]],
    ids=["empty", "invalid", "truncated struct", "truncated"],
)
def test_an_answer_that_cannot_be_read(books: Books, body: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    with socket.create_server(("127.0.0.1", 0)) as odd:
        odd.settimeout(60.0)
        answer = connect(books(), odd.getsockname()[1])
        peer, _ = odd.accept()
        peer.recv(65536)
        peer.sendall(head + body)
        failure = answer.wait()
        peer.close()
    assert isinstance(failure, Failure)
    assert failure.reason is Reason.PROTOCOL_VERSION_MISMATCH


def test_a_peer_that_says_nothing_is_named_at_the_deadline(books: Books) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        failure = connect(books(), port, seconds=0.2).wait()
    assert isinstance(failure, Failure)
    assert failure.reason is Reason.SIDE_CHANNEL_UNREACHABLE
    assert failure.message.endswith(f"127.0.0.1:{port} has not answered yet")


def test_a_deadline_that_moves_while_the_peer_is_slow_is_waited_for(books: Books) -> None:
    """A receive's lease is renewed meanwhile, so the request need not fail."""
    start = time.monotonic()
    deadlines = iter([start + 0.1, start + 0.7])
    last = [start + 0.1]

    def deadline() -> float:
        last[0] = next(deadlines, last[0])
        return last[0]

    with socket.create_server(("127.0.0.1", 0)) as silent:
        answer = Answer()
        books().connect(PREFILL, "127.0.0.1", silent.getsockname()[1], deadline, answer)
        failure = answer.wait()
    assert isinstance(failure, Failure)
    assert failure.message.startswith("no handshake before the deadline")
    assert answer.at - start > 0.65


@pytest.mark.parametrize("host", ["not a host", "host\r\nX: y", "", "..", "[", "a" * 300])
def test_hosts_that_make_no_address(books: Books, host: str) -> None:
    answer = Answer()
    ends = time.monotonic() + 0.5
    books().connect(PREFILL, host, 5600, lambda: ends, answer)
    failure = answer.wait()
    assert isinstance(failure, Failure)
    assert failure.reason is Reason.SIDE_CHANNEL_UNREACHABLE


def test_closing_answers_everyone_who_waits(books: Books) -> None:
    book = books()
    waiting = connect(book, free_port(), seconds=60.0)
    book.close()
    after = connect(book, free_port(), seconds=60.0)
    for answer in (waiting, after):
        assert isinstance(answer.wait(), Failure)
    book.close()


def test_a_callback_that_raises_harms_nobody(serve: Serve, books: Books) -> None:
    server, book = serve(), books()

    def broken(_: object) -> None:
        raise RuntimeError("a fault in the callback")

    ends = time.monotonic() + 5
    book.connect(PREFILL, "127.0.0.1", server.port, lambda: ends, broken)
    assert isinstance(connect(book, server.port).wait(), m.EngineMetadata)


def test_handshake_latency(
    serve: Serve, books: Books, record_property: Callable[[str, object], None]
) -> None:
    server, book = serve(), books()
    took = []
    for _ in range(50):
        start = time.monotonic()
        answer = connect(book, server.port)
        answer.wait()
        took.append(answer.at - start)
        book.forget(PREFILL, Failure(Reason.BACKEND_ERROR, "again"))
    record_property("handshake_median_ms", round(statistics.median(took) * 1000, 2))
    assert server.statuses("handshake") == [200] * 50


@pytest.mark.parametrize("answer", ["reset", "503"])
def test_a_port_that_only_resets_or_refuses_to_serve_is_given_up_before_the_lease_ends(
    books: Books, answer: str
) -> None:
    """A proxy whose engine is gone does so. Only silence says nothing about the engine."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                if answer == "reset":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    client.recv(65536)
                    client.sendall(
                        b"HTTP/1.1 503 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )
                client.close()

    threading.Thread(target=serve, daemon=True).start()
    start = time.monotonic()
    outcome = connect(books(), listener.getsockname()[1], seconds=200.0).wait()
    listener.close()
    assert isinstance(outcome, Failure)
    assert outcome.reason is Reason.SIDE_CHANNEL_UNREACHABLE
    assert time.monotonic() - start > 4.9, "a crowd at the port may be the cause"
