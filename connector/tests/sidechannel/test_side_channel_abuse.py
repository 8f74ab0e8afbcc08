"""What hostile or broken clients send to the side channel costs them their message only."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import random
import resource
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import msgspec
import pytest
from loopback_engines import DECODE, PREFILL, SHAPE, HeardServer, connect, shards_of, until

from pdcluster_connector.protocol import messages as m
from pdcluster_connector.sidechannel.lease_desk import LeaseChanges, LeaseDesk
from pdcluster_connector.sidechannel.peers import PeerBook
from pdcluster_connector.sidechannel.server import (
    SideChannelError,
    SideChannelServer,
)

Serve = Callable[..., HeardServer]
Books = Callable[..., PeerBook]
REQUEST = m.encode(m.HandshakeRequest((m.PROTOCOL_OLDEST, m.PROTOCOL_NEWEST), DECODE, SHAPE))
HEAD = b"POST /v1/handshake HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


def post(port: int, path: str, body: bytes, method: str = "POST") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()


def send_raw(port: int, data: bytes, *, cut: bool) -> bytes:
    """Send bytes over TCP; ``cut`` closes at once, else the answer's start is returned."""
    peer = socket.create_connection(("127.0.0.1", port), timeout=60)
    with peer, contextlib.suppress(ConnectionError):
        peer.sendall(data)
        if not cut:
            return peer.recv(65536)
    return b""


def malformed() -> Iterator[tuple[str, bytes | object]]:
    """Yield (kind, payload): 240 messages that are no handshake and no lease message."""
    rng = random.Random(54757)
    yield from (("body", b"") for _ in range(5))
    yield from (("body", bytes([n])) for n in range(0, 256, 8))
    yield from (("body", REQUEST[: rng.randrange(len(REQUEST))]) for _ in range(40))
    yield from (("body", rng.randbytes(rng.randrange(1, 3000))) for _ in range(40))
    wrong: list[object] = [None, 1, -1, 1.5, "text", [], {}, [1, 2], (b"get_meta_msg", 0, 0)]
    wrong += [{"protocols": "x"}, {"engine_id": 7}, {"releases": {}}, {"rank": [0]}]
    wrong += [{**msgspec.msgpack.decode(REQUEST), "protocols": [3]}]
    wrong += [{**msgspec.msgpack.decode(REQUEST), "engine_id": "x" * 10_000}]
    yield from (("body", msgspec.msgpack.encode(value)) for value in wrong * 2)
    yield from (("body", b"\x91" * 200_000) for _ in range(3))
    yield from (("big", b"\0" * 10_000_000) for _ in range(5))
    yield from (("raw", rng.randbytes(rng.randrange(1, 5000))) for _ in range(40))
    yield from (("raw", bytes([rng.randrange(256)])) for _ in range(15))
    yield from (("cut", HEAD % len(REQUEST) + REQUEST[: rng.randrange(40)]) for _ in range(10))
    yield from (("cut", b"") for _ in range(5))
    yield ("raw", b"GET / HTTP/9.9\r\n\r\n")
    yield ("raw", b"POST /v1/handshake HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n")
    yield ("raw", b"POST /v1/handshake HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
    yield ("raw", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100_000)
    yield ("raw", b"GET /" + b"a" * 100_000)
    yield ("raw", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500))  # TLS
    yield from (("path", path) for path in ("/", "/v1", "/v2/handshake", "/%00", "/../etc"))


def test_240_malformed_messages_then_a_handshake(
    serve: Serve, books: Books, record_property: Callable[[str, object], None]
) -> None:
    leases = LeaseDesk(60.0)
    server = serve(leases=leases)
    kept = books()
    gone: list[object] = []
    kept.on_gone = lambda *news: gone.append(news)
    assert isinstance(connect(kept, server.port).wait(), m.EngineMetadata)
    sent = 0
    start = time.monotonic()
    for kind, payload in malformed():
        assert isinstance(payload, bytes | str)
        if kind == "path":
            assert isinstance(payload, str)
            assert post(server.port, payload, REQUEST)[0] in {400, 404}
        elif kind == "body":
            assert isinstance(payload, bytes)
            for path in ("/v1/handshake", "/v1/leases"):
                status, answer = post(server.port, path, payload)
                assert status in {400, 409}, payload[:40]  # 409: a lease message to "decode"
                assert 0 < len(answer) < 1000
                sent += 1
            continue
        elif kind == "big":
            assert isinstance(payload, bytes)
            with contextlib.suppress(ConnectionError):
                assert post(server.port, "/v1/handshake", payload)[0] == 413
        else:
            assert isinstance(payload, bytes)
            # Garbage without an end of line is waited for like a slow client's.
            ends = b"\n" in payload and kind == "raw"
            send_raw(server.port, payload, cut=not ends or payload.startswith(b"GET /a"))
        sent += 1
    took = time.monotonic() - start
    record_property("malformed_sent", sent)
    record_property("malformed_per_second", round(sent / took))
    assert sent >= 240
    assert leases.take() == LeaseChanges()
    assert [status for _, status in server.answered].count(400) >= 200
    assert isinstance(connect(books(), server.port).wait(), m.EngineMetadata)
    assert gone == []  # the peer that was connected all along noticed nothing


def test_a_body_of_10_mb_is_answered_413_with_bounded_memory(serve: Serve) -> None:
    server = serve()
    block = b"\0" * 65536
    refused = 0
    tracemalloc.start()
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as peer:
            answer = b""
            with contextlib.suppress(ConnectionError):
                peer.sendall(HEAD % 10_000_000)
                for _ in range(10_000_000 // len(block)):
                    peer.sendall(block)
            with contextlib.suppress(ConnectionError):
                answer = peer.recv(4096)
            refused += answer.startswith(b"HTTP/1.1 413")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused >= 15
    assert peak < 8 * 1024 * 1024  # 200 MB were sent
    assert server.answered == []


def test_a_chunked_body_without_end_is_cut_off(serve: Serve) -> None:
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as peer:
        peer.sendall(
            b"POST /v1/handshake HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"10000\r\n" + b"\0" * 65536 + b"\r\n"
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                peer.sendall(chunk)
        with contextlib.suppress(ConnectionError):
            assert peer.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_compressed_bomb_is_not_unpacked(serve: Serve) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", serve().port, timeout=60)
    with contextlib.closing(connection):
        connection.request(
            "POST", "/v1/handshake", b"\x1f\x8b\x08" + b"\0" * 50, {"Content-Encoding": "gzip"}
        )
        assert connection.getresponse().status == 400


def test_slow_clients_are_dropped_and_hold_up_nobody(
    serve: Serve, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdcluster_connector.listening.IDLE_SECONDS", 1.0)
    monkeypatch.setattr("pdcluster_connector.sidechannel.server.BODY_SECONDS", 1.0)
    server = serve()
    starts = [
        b"",  # connects and says nothing
        b"POST /v1/handsh",  # half a request line
        b"POST /v1/handshake HTTP/1.1\r\nHost: x\r\nX-Slow: ",  # half a header
        HEAD % 1000 + b"\x85",  # half a body
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /heal",  # half a second request
    ]
    slow = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in starts * 20]
    try:
        for peer, start in zip(slow, starts * 20, strict=True):
            peer.sendall(start)
        assert isinstance(connect(books(), server.port).wait(), m.EngineMetadata)
        begun = time.monotonic()
        while time.monotonic() - begun < 3.0:  # a byte now and then does not help
            for peer in slow:
                with contextlib.suppress(OSError):
                    peer.send(b"a")
            time.sleep(0.2)
        for peer in slow:
            peer.settimeout(60.0)
            with contextlib.suppress(ConnectionError):
                while peer.recv(4096):
                    pass  # until the server closes
        assert server._guard is not None
        guard = server._guard
        until(lambda: len(guard._held) <= 1)
    finally:
        for peer in slow:
            peer.close()


def test_a_client_that_asks_and_never_reads_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdcluster_connector.listening.IDLE_SECONDS", 1.0)
    large = tuple(
        msgspec.structs.replace(shard, agent_metadata=bytes(6 << 20))
        for shard in shards_of(PREFILL)
    )
    server = SideChannelServer("127.0.0.1", 0, PREFILL, SHAPE, shards=large)
    server.start()
    peer = socket.socket()
    try:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        peer.connect(("127.0.0.1", server.port))
        peer.sendall(HEAD % len(REQUEST) + REQUEST)
        guard = server._guard
        assert guard is not None
        until(lambda: bool(guard._held))
        until(lambda: not guard._held)
    finally:
        peer.close()
        server.stop()


def test_accepts_that_fail_are_said_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without file descriptors, each accept fails at once: ten lines a second would say so."""
    monkeypatch.setattr("pdcluster_connector.listening.PAUSE_SECONDS", 0.01)
    server = serve()
    accept, faults = socket.socket.accept, [OSError(errno.EMFILE, "no file descriptor")] * 5

    def accept_late(listener: socket.socket) -> tuple[socket.socket, object]:
        if server._guard and listener is server._guard.listener and faults:
            raise faults.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_late)
    assert post(server.port, "/v1/handshake", REQUEST)[0] == 200
    assert not faults
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if "no connection can be accepted" in text]) == 1
    assert said.count("connections can be accepted again") == 1


def test_a_server_that_stops_leaves_no_client_waiting() -> None:
    """Connections that come in at that moment were left open, and their clients without an answer.

    Their process ends then, but a decode engine's first handshake waited for it until its deadline.
    """
    request, port = b"GET /healthz HTTP/1.1\r\nHost: p\r\n\r\n", 0
    for _ in range(10):
        server = SideChannelServer("127.0.0.1", port, PREFILL, SHAPE)
        server.start()
        port = server.port
        stopping = threading.Timer(0.01, server.stop)
        stopping.start()
        clients = []
        while stopping.is_alive():
            with contextlib.suppress(OSError):
                clients.append(socket.create_connection(("127.0.0.1", port), timeout=60))
                clients[-1].sendall(request)
        for client in clients:
            with client, contextlib.suppress(ConnectionError):
                while client.recv(4096):  # raises TimeoutError if the server left it open
                    pass


@pytest.mark.needs("files")
def test_the_peers_of_a_large_cluster_all_find_room(
    serve: Serve, books: Callable[..., PeerBook], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 decode engines of 8 ranks that only ask for health were more than the limit of 512."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 8192), hard))
    # They stay while a slow machine makes all of them.
    monkeypatch.setattr("pdcluster_connector.listening.IDLE_SECONDS", 600.0)
    server = serve()
    with contextlib.ExitStack() as stack:
        for number in range(1100):
            place, own = ("127.0.0.1", server.port), (f"127.0.4.{number % 64 + 1}", 0)
            stack.enter_context(socket.create_connection(place, timeout=60, source_address=own))
        guard = server._guard
        assert guard is not None
        until(lambda: len(guard._held) == 1100)
        assert isinstance(connect(books(), server.port).wait(), m.EngineMetadata)


def test_healthz(serve: Serve) -> None:
    status, body = post(serve().port, "/healthz", b"", "GET")
    assert status == 200
    said = json.loads(body)
    assert abs(said.pop("time") - time.time()) < 60.0
    assert said == {"engine_id": PREFILL, "role": "prefill", "shards": 1}


def test_a_lease_message_for_another_incarnation_is_refused(serve: Serve) -> None:
    leases = LeaseDesk(60.0)
    server = serve(leases=leases)
    body = m.encode(m.LeaseRequest("p/old", DECODE, (("r", 1),)))
    status, answer = post(server.port, "/v1/leases", body)
    assert status == 409
    refusal = m.decode_handshake_reply(answer)
    assert isinstance(refusal, m.Refusal)
    assert refusal.reason == "PeerRestarted"
    assert leases.take() == LeaseChanges()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "engine.example"])
def test_without_tls_only_loopback(host: str) -> None:
    server = SideChannelServer(host, 0, PREFILL, SHAPE)
    with pytest.raises(SideChannelError, match=r"loopback.*allow_insecure: true"):
        server.start()
    server.stop()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.77", "localhost"])
def test_loopback_is_allowed(host: str) -> None:
    server = SideChannelServer(host, 0, PREFILL, SHAPE)
    server.start()
    assert server.port > 0
    server.stop()
    server.stop()


def test_insecure_when_written_out() -> None:
    server = SideChannelServer("0.0.0.0", 0, PREFILL, SHAPE, allow_insecure=True)
    server.start()
    assert post(server.port, "/healthz", b"", "GET")[0] == 200
    server.stop()


def test_a_busy_port_is_one_sentence_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = SideChannelServer("127.0.0.1", port, PREFILL, SHAPE)
        with pytest.raises(SideChannelError) as caught:
            server.start()
    text = str(caught.value)
    assert f"side channel port {port} on 127.0.0.1 is in use" in text
    assert "side_channel_port" in text
    assert "\n" not in text


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine(host: str) -> None:
    said = "side_channel_host"
    try:
        socket.getaddrinfo(host, 0)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:  # no name server can be reached from here
            said = f"cannot be opened: {error.strerror}"
    server = SideChannelServer(host, 0, PREFILL, SHAPE, allow_insecure=True)
    with pytest.raises(SideChannelError, match=said):
        server.start()
