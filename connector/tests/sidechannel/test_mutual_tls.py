"""Who may speak to a side channel, and to which one an engine speaks: real TLS on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from loopback_engines import DECODE, PREFILL, SHAPE, Answer, HeardServer, connect, shards_of, until

from authority import Authority
from pdcluster_connector import certificate_files, listening
from pdcluster_connector.certificate_files import Tls, TlsError, TlsFiles
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.engine_id import role_name
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.sidechannel.handshake import (
    TryAgain,
    client_session,
    introduction,
    shake_hands,
)
from pdcluster_connector.sidechannel.lease_client import LeaseClient
from pdcluster_connector.sidechannel.lease_desk import LeaseDesk
from pdcluster_connector.sidechannel.peers import PeerBook
from pdcluster_connector.sidechannel.server import SideChannelServer

OTHER_CLUSTER = "ns.other.decode.r.0/00000000000000dd"
OTHER_NAMESPACE = "else.c.decode.r.0/00000000000000dd"


class Engines:
    """Side channels and peer books with certificates, closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority()
        self.closing: list[Callable[[], object]] = []
        self.made = 0

    def tls(self, engine_id: str, authority: Authority | None = None, **kind: object) -> Tls:
        return Tls(self.files(engine_id, authority, **kind), engine_id)

    def files(self, engine_id: str, authority: Authority | None = None, **kind: object) -> TlsFiles:
        self.made += 1
        return (authority or self.authority).files(self.folder / f"{self.made}", engine_id, **kind)

    def serve(self, tls: Tls, **more: object) -> HeardServer:
        server = HeardServer(
            "127.0.0.1", 0, PREFILL, SHAPE, shards=shards_of(PREFILL), tls=tls, **more
        )
        server.start()
        self.closing.append(server.stop)
        return server

    def book(self, engine_id: str, tls: Tls | None) -> PeerBook:
        book = PeerBook(engine_id, SHAPE, (0, 0), tls)
        book.start()
        self.closing.append(book.close)
        return book


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    made = Engines(tmp_path)
    yield made
    for close in reversed(made.closing):
        close()


def refused(answer: EngineMetadata | Failure) -> str:
    assert isinstance(answer, Failure)
    assert answer.reason is Reason.AUTHENTICATION_FAILED
    return answer.message


def asked_once(server: HeardServer, tls: Tls) -> EngineMetadata | Failure | TryAgain:
    """What one attempt of a decode engine finds."""

    async def ask() -> EngineMetadata | Failure | TryAgain:
        async with client_session() as http:
            me = introduction(DECODE, SHAPE)
            return await shake_hands(http, me, PREFILL, "127.0.0.1", server.port, tls)

    return asyncio.run(ask())


def test_two_engines_of_one_cluster_meet(engines: Engines) -> None:
    server = engines.serve(engines.tls(PREFILL))
    book = engines.book(DECODE, engines.tls(DECODE))
    answer = connect(book, server.port).wait()
    assert isinstance(answer, EngineMetadata)
    assert answer.engine_id == PREFILL


@pytest.mark.parametrize("stranger", [OTHER_CLUSTER, OTHER_NAMESPACE])
def test_another_clusters_engine_gets_nothing(engines: Engines, stranger: str) -> None:
    """Its certificate is of the same authority, and fits its id."""
    server = engines.serve(engines.tls(PREFILL))
    book = engines.book(stranger, engines.tls(stranger))
    assert "PDCluster" in refused(connect(book, server.port).wait())
    assert server.answered == [("handshake", 403)]


def test_an_engine_that_claims_anothers_id_gets_nothing(engines: Engines) -> None:
    server = engines.serve(engines.tls(PREFILL))
    thief = "ns.c.decode.r.7/00000000000000dd"
    book = engines.book(DECODE, engines.tls(thief))
    assert "names ns.c.decode.r.7" in refused(connect(book, server.port).wait())


def test_a_prefill_engine_is_no_decode_engine(engines: Engines) -> None:
    server = engines.serve(engines.tls(PREFILL))
    other = "ns.c.prefill.r.1/00000000000000dd"
    book = engines.book(other, engines.tls(other))
    assert "no decode engine" in refused(connect(book, server.port).wait())


def test_another_authoritys_certificate_gets_nothing(engines: Engines) -> None:
    server = engines.serve(engines.tls(PREFILL))
    foreign = Authority("foreign CA")
    outcome = asked_once(server, engines.tls(DECODE, foreign, trusting=(engines.authority,)))
    assert isinstance(outcome, TryAgain)
    assert outcome.reason is Reason.AUTHENTICATION_FAILED
    assert "Does it trust" in outcome.message
    assert server.answered == []


def test_a_server_with_another_engines_name_is_told_nothing(engines: Engines) -> None:
    """Whoever took the address of a peer has no certificate of that name."""
    server = engines.serve(engines.tls("ns.c.prefill.r.9/00000000000000aa"))
    book = engines.book(DECODE, engines.tls(DECODE))
    assert "ns.c.prefill.r.0" in refused(connect(book, server.port).wait())
    assert server.answered == []


def test_a_client_without_a_certificate_gets_nothing(engines: Engines) -> None:
    server = engines.serve(engines.tls(PREFILL))
    context = ssl.create_default_context(cafile=engines.files(PREFILL).ca)
    context.check_hostname = False

    async def ask() -> None:
        async with aiohttp.ClientSession() as http:
            await http.get(f"https://127.0.0.1:{server.port}/healthz", ssl=context)

    with pytest.raises((aiohttp.ClientError, OSError)):
        asyncio.run(ask())


def test_plain_http_gets_nothing(engines: Engines) -> None:
    server = engines.serve(engines.tls(PREFILL))
    answer = connect(engines.book(DECODE, None), server.port, seconds=1.0).wait()
    assert isinstance(answer, Failure)
    assert answer.reason is Reason.SIDE_CHANNEL_UNREACHABLE


def test_a_peer_without_tls_is_named(engines: Engines) -> None:
    server = SideChannelServer("127.0.0.1", 0, PREFILL, SHAPE, shards=shards_of(PREFILL))
    server.start()
    engines.closing.append(server.stop)
    book = engines.book(DECODE, engines.tls(DECODE))
    assert "no TLS connection" in refused(connect(book, server.port).wait())


def test_leases_need_the_certificate_too(engines: Engines) -> None:
    leases = LeaseDesk(60.0)
    leases.arm("request", 7)
    leases.grant("request")
    server = engines.serve(engines.tls(PREFILL), leases=leases)
    neighbour = DECODE.replace(".0/", ".1/")
    told: list[tuple[str, int]] = []
    for engine_id, holder, status in (
        (OTHER_CLUSTER, OTHER_CLUSTER, 403),
        (DECODE, neighbour, 403),  # in another engine's name
        (DECODE, DECODE, 200),
    ):
        assert leases.held == 1
        client = LeaseClient(holder, engines.tls(engine_id))
        client.start()
        engines.closing.append(client.close)
        held = Ticket(PREFILL, "127.0.0.1", server.port, "request", 7, (), 16, 0, b"d" * 16, 0.0)
        client.release(held, time.monotonic() + 30)
        told.append(("lease", status))
        until(lambda: server.answered == told)
    assert leases.take().released == ["request"]


def test_a_rotation_holds_for_new_connections_and_fails_none(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The authority changes, too: first both are trusted, then certificates are of the new one."""
    monkeypatch.setattr(certificate_files, "LOOK_SECONDS", 0.0)
    first, second = engines.authority, Authority("next CA")
    places = {PREFILL: engines.folder / "prefill", DECODE: engines.folder / "decode"}
    tls = {one: Tls(first.files(place, one), one) for one, place in places.items()}
    server = engines.serve(tls[PREFILL])
    for signer, trusting in ((first, (second,)), (second, (first,)), (second, ())):
        for one, place in places.items():
            signer.files(place, one, trusting=trusting)
        # A connection each, as peers make them: the files are looked at when one begins.
        for _ in range(2):
            book = engines.book(DECODE, tls[DECODE])
            assert isinstance(connect(book, server.port).wait(), EngineMetadata)
    late = engines.book(DECODE, Tls(first.files(engines.folder / "late", DECODE), DECODE))
    refused(connect(late, server.port).wait())


def test_files_that_cannot_be_used_do_not_replace_those_that_can(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(certificate_files, "LOOK_SECONDS", 0.0)
    files = engines.files(PREFILL)
    server = engines.serve(Tls(files, PREFILL))
    files.key.write_text("half of a ke")
    book = engines.book(DECODE, engines.tls(DECODE))
    assert isinstance(connect(book, server.port).wait(), EngineMetadata)
    assert "The old ones stay in use" in caplog.text


def test_files_are_looked_at_every_few_seconds_and_read_when_they_have_changed(
    engines: Engines,
) -> None:
    now = [100.0]
    place = engines.folder / "prefill"
    files = engines.authority.files(place, PREFILL)
    tls = Tls(files, PREFILL, clock=lambda: now[0])
    first = tls.client()
    engines.authority.files(place, PREFILL)
    now[0] += certificate_files.LOOK_SECONDS - 0.1
    assert tls.client() is first
    now[0] += 0.1
    second = tls.client()
    assert second is not first
    now[0] += 2 * certificate_files.LOOK_SECONDS
    assert tls.client() is second, "nothing has changed since"


def test_files_that_change_while_they_are_read_break_no_connection(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new pair is tried, and before it is used, the certificate of a third one is written."""
    monkeypatch.setattr(certificate_files, "LOOK_SECONDS", 0.0)
    place = engines.folder / "prefill"
    files = engines.authority.files(place, PREFILL)
    server = engines.serve(Tls(files, PREFILL))
    third = engines.files(PREFILL).certificate.read_bytes()
    meet = certificate_files._meet_oneself
    met: list[str] = []

    def meet_and_write(*given: object) -> None:
        meet(*given)
        met.append(str(given[1]))
        files.certificate.write_bytes(third)

    me = engines.tls(DECODE)
    monkeypatch.setattr(certificate_files, "_meet_oneself", meet_and_write)
    engines.authority.files(place, PREFILL)
    for _ in range(2):
        book = engines.book(DECODE, me)
        assert isinstance(connect(book, server.port).wait(), EngineMetadata)
    assert met, "the new pair was read"


def test_an_authority_that_leaves_the_file_is_trusted_no_longer(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate_files, "LOOK_SECONDS", 0.0)
    old, place = Authority("old CA"), engines.folder / "prefill"
    tls = Tls(engines.authority.files(place, PREFILL, trusting=(old,)), PREFILL)
    server = engines.serve(tls)
    stranger = engines.tls(DECODE, old, trusting=(engines.authority,))
    assert isinstance(connect(engines.book(DECODE, stranger), server.port).wait(), EngineMetadata)
    engines.authority.files(place, PREFILL)
    outcome = asked_once(server, stranger)
    assert isinstance(outcome, TryAgain)
    assert outcome.reason is Reason.AUTHENTICATION_FAILED
    assert server.statuses("handshake") == [200]


def test_no_session_is_resumed(engines: Engines) -> None:
    """It would go on with a certificate that has expired or whose authority is gone."""
    server = engines.serve(engines.tls(PREFILL))
    name = "ns.c.prefill.r.0.engine.pdcluster.dev"
    with socket.create_connection(("127.0.0.1", server.port)) as plain:
        plain.settimeout(60)
        with engines.tls(DECODE).client().wrap_socket(plain, server_hostname=name) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")  # tickets would come before
            assert client.session is None or not client.session.has_ticket


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_of_tls_1_2_gets_nothing(engines: Engines, newest: ssl.TLSVersion) -> None:
    """It would send its certificate, and so its names, for everybody to read."""
    server = engines.serve(engines.tls(PREFILL))
    files = engines.files(DECODE)
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.certificate, files.key)
    context.maximum_version = newest
    name = "ns.c.prefill.r.0.engine.pdcluster.dev"

    def shake() -> str | None:
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname=name) as client,
        ):
            return client.version()

    if newest is ssl.TLSVersion.TLSv1_3:
        assert shake() == "TLSv1.3"
    else:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            shake()


def test_a_common_name_names_nobody(engines: Engines) -> None:
    """Authorities check names less strictly there; the name has to be a subjectAltName."""
    name = "ns.c.prefill.r.0.engine.pdcluster.dev"
    common = engines.authority.files(engines.folder / "cn", PREFILL, common_name=name, named=None)
    server = engines.serve(Tls(replace(common, named=False), PREFILL))
    refused(connect(engines.book(DECODE, engines.tls(DECODE)), server.port).wait())
    assert server.answered == []


def test_clients_that_never_shake_hands_are_bounded(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio's own server would hold any number of them while it waits for their TLS."""
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", 16)
    monkeypatch.setattr(listening, "IDLE_SECONDS", 600.0)
    monkeypatch.setattr(listening, "TLS_SECONDS", 600.0)
    server = engines.serve(engines.tls(PREFILL))
    guard = server._guard
    assert guard is not None
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(30)]
    try:
        for client in silent[:-8]:  # half of the room is for one address
            client.settimeout(60)
            with contextlib.suppress(ConnectionError):
                assert client.recv(1) == b"", "the oldest go"
        assert len(guard._held) == 8
    finally:
        for client in silent:
            client.close()
    until(lambda: not guard._held)
    monkeypatch.setattr(listening, "TLS_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"\x16")
        assert client.recv(1) == b"", "asyncio's own limit is 60 seconds"
    book = engines.book(DECODE, engines.tls(DECODE))
    assert isinstance(connect(book, server.port).wait(), EngineMetadata)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("expired", "expired"),
        ("other engine", "ns.c.prefill.r.0.engine.pdcluster.dev"),
        ("other authority", "signed by an authority of"),
        ("no key", "is not a file"),
        ("no ca", "holds no CA certificates"),
        ("a long path", "is not a file"),
        ("a password", "the key has a password"),
    ],
)
def test_wrong_files_are_refused_at_the_start(engines: Engines, fault: str, said: str) -> None:
    who = "ns.c.prefill.r.5/00" if fault == "other engine" else PREFILL
    files = engines.files(who, expired=fault == "expired")
    if fault == "other authority":
        stranger = engines.files(PREFILL, Authority("foreign CA"))
        files = TlsFiles(files.ca, stranger.certificate, stranger.key)
    if fault == "no key":
        files.key.unlink()
    if fault == "a password":
        key = load_pem_private_key(files.key.read_bytes(), None)
        files.key.write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
        )
    if fault == "a long path":
        files = replace(files, key=files.key.with_name("k" * 300))
    if fault == "no ca":
        files.ca.write_text("nothing")
    with pytest.raises(TlsError) as raised:
        Tls(files, PREFILL)
    assert said in str(raised.value)
    assert str(raised.value).startswith("tls: "), "the option that names the files"


def test_engines_whose_certificates_name_their_role_meet(engines: Engines) -> None:
    """The other replicas of the role have the same certificate, and each revision has it, too."""
    server = engines.serve(engines.tls(PREFILL, by_role=True))
    for decode in (DECODE, "ns.c.decode.other.7/00000000000000dd"):
        book = engines.book(decode, engines.tls(decode, by_role=True))
        answer = connect(book, server.port).wait()
        assert isinstance(answer, EngineMetadata), answer


@pytest.mark.parametrize(
    "stranger", [OTHER_CLUSTER, OTHER_NAMESPACE, "ns.c.prefill.r.1/00000000000000dd"]
)
def test_certificates_of_roles_keep_clusters_and_roles_apart(
    engines: Engines, stranger: str
) -> None:
    server = engines.serve(engines.tls(PREFILL, by_role=True))
    own = engines.book(stranger, engines.tls(stranger, by_role=True))
    refused(connect(own, server.port).wait())
    thief = engines.files(stranger, by_role=True, name=role_name(stranger))
    stolen = engines.book(DECODE, Tls(replace(thief, named=False), DECODE))
    answer = connect_to(stolen, "127.0.0.1", server.port)
    assert isinstance(answer, Failure), "the name in the certificate is not the role's"
    assert set(server.answered) == {("handshake", 403)}


def test_a_server_of_another_role_is_told_nothing(engines: Engines) -> None:
    """Decode expects the name of prefill's role, and ends the connection at any other one."""
    impostor = engines.files(PREFILL, by_role=True, name=role_name(DECODE))
    server = engines.serve(Tls(replace(impostor, named=False), PREFILL))
    book = engines.book(DECODE, engines.tls(DECODE, by_role=True))
    refused(connect(book, server.port).wait())
    assert server.answered == []


def test_a_certificate_of_the_wrong_role_is_refused_at_the_start(engines: Engines) -> None:
    with pytest.raises(TlsError, match=r"have the DNS name ns\.c\.prefill\.role\.pdcluster\.dev"):
        engines.tls(PREFILL, by_role=True, name=role_name(DECODE))


def test_certificates_of_hosts_need_the_hosts_name(engines: Engines) -> None:
    """``named=False``: any engine of the authority is a peer, at a host that it can prove."""
    server = engines.serve(engines.tls(PREFILL, named=False))
    by_address = engines.book("by-hand/0", engines.tls("by-hand/0", named=False))
    assert "127.0.0.1" in refused(connect(by_address, server.port).wait())
    by_name = engines.book("by-hand/1", engines.tls("by-hand/1", named=False))
    assert isinstance(connect_to(by_name, "localhost", server.port), EngineMetadata)


def connect_to(book: PeerBook, host: str, port: int) -> EngineMetadata | Failure:
    answer = Answer()
    ends = time.monotonic() + 30
    book.connect(PREFILL, host, port, lambda: ends, answer)
    return answer.wait()
