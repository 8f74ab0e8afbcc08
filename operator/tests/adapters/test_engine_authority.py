"""The operator's CA: real handshakes between an engine's launcher and the operator's client."""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdcluster_connector.certificate_files import LOOK_SECONDS, Tls, TlsError, tls_files
from pdcluster_connector.protocol.engine_id import OPERATOR_NAME, names_in, why_not_peer
from pdcluster_operator.adapters import engines_http, own_secrets
from pdcluster_operator.adapters.engine_authority import (
    AuthorityError,
    EngineAuthority,
    held_certificates,
    with_certificates,
)
from pdcluster_operator.adapters.engines_http import EnginesHttp
from pdcluster_operator.adapters.own_secrets import find_authority
from pdcluster_operator.api.object_names import CERTIFICATES_HASH_ANNOTATION
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.launchers import Target
from pdcluster_operator.plan.renewals import MOST_CERTIFICATES
from pdcluster_operator.plan.types import HeldCertificates, WriteCertificates
from pdcluster_operator.runtime.interfaces import Conflict, LauncherError

NOW = time.time()
DAY = 86_400.0
PREFILL, DECODE = "ns.tiny.prefill.aaaaa.0", "ns.tiny.decode.bbbbb.0"
ENGINES = {"prefill-aaaaa-0": PREFILL, "decode-bbbbb-0": DECODE}


@pytest.fixture(scope="module")
def authority() -> EngineAuthority:
    return EngineAuthority.new(NOW)[0]


def step_of(start: float = NOW - DAY, end: float = NOW + 90 * DAY) -> WriteCertificates:
    annotations = {"pdcluster.dev/certificates": f"x.{int(start)}"}
    manifest = {"kind": "Secret", "metadata": {"name": "tiny", "annotations": annotations}}
    return WriteCertificates(manifest, ENGINES, start, end, "why")


def mounted(authority: EngineAuthority, engine: str, folder: Path, **times: float) -> Tls:
    """What an engine does with the files that its pod mounts."""
    write(authority, engine, folder, **times)
    files = {"ca": "ca.crt", "certificate": "tls.crt", "key": "tls.key"}
    option = {name: str(folder / file) for name, file in files.items()}
    return Tls(tls_files(option), f"{engine}/1", clock=CLOCK)


CLOCK: Callable[[], float] = time.monotonic


def write(authority: EngineAuthority, engine: str, folder: Path, **times: float) -> None:
    data = with_certificates(step_of(**times), authority)["data"]
    [entry] = [name for name, logical in ENGINES.items() if logical == engine]
    folder.mkdir(exist_ok=True)
    for key, file in (("ca.crt",) * 2, (f"{entry}.crt", "tls.crt"), (f"{entry}.key", "tls.key")):
        new = folder / f".{file}"
        new.write_bytes(base64.b64decode(data[key]))
        new.rename(folder / file)


def test_what_is_written_is_the_same_each_time_and_is_recognized(
    authority: EngineAuthority,
) -> None:
    step = step_of()
    secret = with_certificates(step, authority)
    assert with_certificates(step, authority) == secret
    held = held_certificates(secret, authority)
    issue = step.manifest["metadata"]["annotations"]["pdcluster.dev/certificates"]
    assert held == HeldCertificates(authority.fingerprint, issue, frozenset(ENGINES))
    assert held_certificates(None, authority) == HeldCertificates(authority.fingerprint)
    other = with_certificates(step_of(start=NOW), authority)
    assert all(other["data"][key] != secret["data"][key] for key in secret["data"] if "-" in key)


@pytest.mark.parametrize("lost", ["ca.crt", "prefill-aaaaa-0.crt", "prefill-aaaaa-0.key"])
def test_a_file_that_somebody_deleted_is_missed(authority: EngineAuthority, lost: str) -> None:
    secret = with_certificates(step_of(), authority)
    whole = held_certificates(secret, authority)
    del secret["data"][lost]
    assert held_certificates(secret, authority) != whole


@pytest.mark.parametrize("changed", ["ca.crt", "prefill-aaaaa-0.crt", "prefill-aaaaa-0.key"])
def test_a_file_that_somebody_changed_is_made_again(
    authority: EngineAuthority, changed: str
) -> None:
    secret = with_certificates(step_of(), authority)
    whole = held_certificates(secret, authority)
    secret["data"][changed] = secret["data"]["decode-bbbbb-0.crt"]
    assert held_certificates(secret, authority) != whole


@pytest.mark.parametrize("note", ["", "{", "[]", "[" * 100_000, '{"ca.crt": 1}', "null"])
def test_a_spoiled_note_of_what_was_written_makes_all_again(
    authority: EngineAuthority, note: str
) -> None:
    secret = with_certificates(step_of(), authority)
    secret["metadata"]["annotations"][CERTIFICATES_HASH_ANNOTATION] = note
    held = held_certificates(secret, authority)
    assert (held.issue, held.engines) == ("", frozenset())


def test_entries_of_others_are_left_alone(authority: EngineAuthority) -> None:
    """An apply does not remove them, so to count them would write the Secret for ever."""
    secret = with_certificates(step_of(), authority)
    whole = held_certificates(secret, authority)
    secret["data"] |= {"foo.crt": "Zm9v", "foo.key": "Zm9v", "note": "Zm9v"}
    assert held_certificates(secret, authority) == whole


def test_a_certificate_names_one_engine_and_is_no_ca(authority: EngineAuthority) -> None:
    data = with_certificates(step_of(), authority)["data"]
    pem = base64.b64decode(data["decode-bbbbb-0.crt"])
    leaf = x509.load_pem_x509_certificate(pem)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [f"{DECODE}.engine.pdcluster.dev"]
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_an_authority_lasts_twenty_years_and_signs_engines_alone() -> None:
    authority, stored = EngineAuthority.new(NOW)
    assert re.fullmatch("[0-9a-f]{16}", authority.fingerprint), "it is a part of an annotation"
    found = x509.load_pem_x509_certificate(stored.certificate)
    assert found.not_valid_before_utc.timestamp() == pytest.approx(NOW - DAY, abs=1)
    assert found.not_valid_after_utc.timestamp() == pytest.approx(NOW + 20 * 365 * DAY, abs=1)
    limits = found.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (limits.critical, limits.value.ca, limits.value.path_length) == (True, True, 0)
    usage = found.extensions.get_extension_for_class(x509.KeyUsage)
    assert (usage.critical, usage.value.key_cert_sign, usage.value.digital_signature) == (
        True, True, False,
    )  # fmt: skip
    leaf = x509.load_pem_x509_certificate(authority.sign("x", NOW, NOW + DAY).certificate)
    usage = leaf.extensions.get_extension_for_class(x509.KeyUsage)
    assert (usage.value.key_cert_sign, usage.value.digital_signature) == (False, True)
    purposes = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(purposes) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}


def test_a_long_name_stands_whole_where_it_counts(authority: EngineAuthority) -> None:
    """A common name has at most 64 characters; nobody reads it."""
    name = "a" * 60 + "." + "b" * 60
    leaf = x509.load_pem_x509_certificate(authority.sign(name, NOW, NOW + DAY).certificate)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [name]
    [common] = leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert common.value == name[:64]


def test_the_operator_speaks_the_newest_tls_and_reads_no_common_name(
    authority: EngineAuthority,
) -> None:
    context = authority.client_context(authority.sign("x", NOW, NOW + DAY))
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.hostname_checks_common_name is False
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1, "no CA of the machine"


def test_without_a_note_of_their_authority_certificates_are_made_again(
    authority: EngineAuthority,
) -> None:
    secret = with_certificates(step_of(), authority)
    del secret["metadata"]["annotations"]["pdcluster.dev/certificates"]
    assert held_certificates(secret, authority).issue == ""


def test_a_secret_without_files_or_notes_holds_nothing(authority: EngineAuthority) -> None:
    nothing = HeldCertificates(authority.fingerprint, "")
    assert held_certificates({"metadata": {}}, authority) == nothing
    bare = {"metadata": {"uid": "u", "annotations": None}, "data": None}
    assert held_certificates(bare, authority) == replace(nothing, uid="u")


@pytest.mark.parametrize(
    ("live", "version"), [(None, "1"), ({"metadata": {"resourceVersion": "7"}}, "7")]
)
async def test_of_two_operators_that_make_the_authority_at_once_the_first_wins(
    monkeypatch: pytest.MonkeyPatch, live: dict[str, Any] | None, version: str
) -> None:
    """The other one would sign with a CA that no engine trusts after a restart."""
    monkeypatch.setattr(own_secrets, "WAIT_SECONDS", 0.0)
    _, theirs = EngineAuthority.new(NOW)
    parts = {"ca.crt": theirs.certificate, "ca.key": theirs.key}
    held, sent = [live], []

    class Server:
        async def read(self, path: str) -> dict[str, Any] | None:
            assert path.endswith("/namespaces/system/secrets/ca")
            return held[0]

        async def call(self, *_: Any, body: dict[str, Any], **__: Any) -> None:
            sent.append(body["metadata"].get("resourceVersion"))
            held[0] = {"data": {key: base64.b64encode(one).decode() for key, one in parts.items()}}
            raise Conflict("another version")

    server: Any = Server()
    assert (await find_authority(server, ("system", "ca"))).pem == theirs.certificate
    assert sent == [version], "the API server compares it; no object has the first one"


def test_a_stored_authority_is_the_same_and_a_spoiled_one_is_refused() -> None:
    authority, stored = EngineAuthority.new(NOW)
    again = EngineAuthority(stored.certificate, stored.key)
    assert again.fingerprint == authority.fingerprint
    assert again.sign("x", NOW, NOW + DAY) == authority.sign("x", NOW, NOW + DAY)
    _, other = EngineAuthority.new(NOW)
    leaf = authority.sign("x", NOW, NOW + DAY)
    for certificate, key, why in (
        (stored.certificate, other.key, "not the certificate's"),
        (b"", stored.key, "PEM"),
        (stored.certificate, b"", "PEM"),
        (leaf.certificate, leaf.key, "signed itself"),
    ):
        with pytest.raises(AuthorityError, match=why):
            EngineAuthority(certificate, key)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls for seconds is no launcher that does not answer."""
    monkeypatch.setattr(engines_http, "TIMEOUT", aiohttp.ClientTimeout(total=120.0))


def talk(server: Tls, authority: EngineAuthority, engine: str) -> tuple[str, ...]:
    """The operator asks a launcher for its state; returns the names that the launcher saw."""
    seen: list[tuple[str, ...]] = []

    async def changes(request: web.Request) -> web.Response:
        assert request.transport is not None
        seen.append(names_in(request.transport.get_extra_info("peercert")))
        return web.json_response({"revision": "1"})

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/v1/changes", changes)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server.open_server)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with EnginesHttp(authority) as engines:
                url = f"https://127.0.0.1:{port}"
                await engines.changes(Target(engine, Role.DECODE, url, "1/0"), "", wait=False)
        finally:
            await runner.cleanup()

    asyncio.run(run())
    return seen[0]


def test_the_operator_and_a_launcher_know_each_other(
    authority: EngineAuthority, tmp_path: Path
) -> None:
    launcher = mounted(authority, DECODE, tmp_path / "decode")
    assert talk(launcher, authority, DECODE) == (OPERATOR_NAME,)
    with pytest.raises(LauncherError, match=r"[Hh]ostname mismatch"):
        talk(launcher, authority, PREFILL)
    stranger, _ = EngineAuthority.new(NOW)
    with pytest.raises(LauncherError, match="certificate"):
        talk(mounted(stranger, DECODE, tmp_path / "stranger"), authority, DECODE)


def test_expired_certificates_are_refused_at_the_start(
    authority: EngineAuthority, tmp_path: Path
) -> None:
    with pytest.raises(TlsError, match="expired"):
        mounted(authority, DECODE, tmp_path, start=NOW - 2 * DAY, end=NOW - DAY)


def test_engines_of_two_periods_speak_with_each_other_and_new_files_are_taken_up(
    authority: EngineAuthority, tmp_path: Path
) -> None:
    """The kubelets of two nodes bring new files at different times."""
    now = [0.0]
    folder = tmp_path / "decode"
    write(authority, DECODE, folder)
    files = tls_files({k: str(folder / f) for k, f in option_names().items()})
    decode = Tls(files, f"{DECODE}/1", clock=lambda: now[0])
    prefill = mounted(authority, PREFILL, tmp_path / "prefill")
    before = shaken(decode, prefill)
    write(authority, DECODE, folder, start=NOW, end=NOW + 90 * DAY)
    now[0] += 2 * LOOK_SECONDS
    after = shaken(decode, prefill)
    assert before != after, "another certificate"
    for certificate in (before, after):
        leaf = x509.load_der_x509_certificate(certificate)
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        held = names.get_values_for_type(x509.DNSName)
        assert why_not_peer(f"{PREFILL}/1", held, f"{DECODE}/1", "decode") is None
        other = "ns.other.prefill.aaaaa.0/1"
        assert "another one" in str(why_not_peer(other, held, f"{DECODE}/1", "decode"))


def test_strict_clients_and_servers_take_the_certificates(
    authority: EngineAuthority, tmp_path: Path
) -> None:
    """``ssl.create_default_context`` of Python 3.13 and later is strict."""
    decode, prefill = (mounted(authority, one, tmp_path / one) for one in (DECODE, PREFILL))
    for context in (decode.client(), prefill.server):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    assert shaken(decode, prefill)


def option_names() -> dict[str, str]:
    return {"ca": "ca.crt", "certificate": "tls.crt", "key": "tls.key"}


def shaken(client: Tls, server: Tls) -> bytes:
    """Shake hands in memory; returns the client's certificate as the server saw it (DER)."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    name = server.server_name(server.engine_id)
    ends = (
        client.client().wrap_bio(to_client, to_server, server_hostname=name),
        server.server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(10):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    certificate = ends[1].getpeercert(binary_form=True)
    assert certificate
    return certificate


def test_a_secret_holds_the_certificates_of_so_many_engines_with_the_longest_names(
    authority: EngineAuthority,
) -> None:
    """Its data may have 1 MiB, and all annotations 256 KiB."""
    of_all = (f"{'n' * 63}.{'c' * 34}.prefill.{'r' * 5}.{number}" for number in range(1024))
    engines = {f"prefill-{'r' * 5}-{number}": one for number, one in enumerate(of_all)}
    assert len(engines) == MOST_CERTIFICATES
    secret = with_certificates(replace(step_of(), engines=engines), authority)
    assert sum(len(base64.b64decode(one)) for one in secret["data"].values()) <= 1 << 20
    noted = secret["metadata"]["annotations"].items()
    assert sum(len(name) + len(value) for name, value in noted) < 256 << 10
