from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from loopback import free_ports
from pdcluster_connector import certificate_files
from pdcluster_connector.certificate_files import TlsError, TlsFiles
from pdcluster_operator.adapters import webhook_process
from pdcluster_operator.adapters.own_secrets import (
    Certificate,
    WebhookPlace,
    make_certificate,
    read_certificates,
    renew_certificate,
    why_renew,
)
from pdcluster_operator.adapters.webhook_process import (
    WebhookOptions,
    WebhookProcess,
    serving_context,
)

NAMES = ("hook.system.svc", "hook.system", "localhost", "127.0.0.1")
NOW = 1_800_000_000.0
DAY = 86_400.0
GOOD_FOR = 245 * DAY  # a year, less four months


@pytest.fixture(scope="module")
def made() -> Certificate:
    return make_certificate(NAMES, NOW)


def test_a_new_certificate_needs_no_renewal(made):
    assert why_renew(made, NAMES, NOW) is None
    assert why_renew(made, NAMES, NOW + GOOD_FOR) is None
    [serving] = read_certificates(made.certificate)
    assert serving.not_valid_after_utc.timestamp() == NOW + 365 * DAY
    assert why_renew(made, NAMES, NOW - 3600) is None, "clocks differ"


@pytest.mark.parametrize(
    ("change", "now", "why"),
    [
        ({"certificate": b""}, NOW, "there is none"),
        ({"certificate": b"-----BEGIN nonsense"}, NOW, "there is none"),
        ({"authorities": b""}, NOW, "there is none"),
        ({"key": b"-----BEGIN nonsense"}, NOW, "key"),
        ({}, NOW + GOOD_FOR + 1, "expires"),
        ({}, NOW - 3601, "not valid yet"),
    ],
)
def test_what_cannot_serve_is_renewed(made, change, now, why):
    parts = {one: getattr(made, one) for one in ("certificate", "key", "authorities")}
    assert why in (why_renew(Certificate(**{**parts, **change}), NAMES, now) or "")


def test_parts_of_two_certificates_are_renewed(made):
    other = make_certificate(NAMES, NOW)
    mixed_key = Certificate(made.certificate, other.key, made.authorities)
    assert "key" in (why_renew(mixed_key, NAMES, NOW) or "")
    mixed_authority = Certificate(made.certificate, made.key, other.authorities)
    assert "signed" in (why_renew(mixed_authority, NAMES, NOW) or "")


def test_another_service_needs_another_certificate(made):
    assert "other.system.svc" in (why_renew(made, ("other.system.svc",), NOW) or "")


def test_all_names_that_a_certificate_lacks_are_named(made):
    why = why_renew(made, ("a.svc", *NAMES, "10.0.0.1"), NOW)
    assert why == "it lacks a.svc, 10.0.0.1"


def test_what_is_no_certificate_holds_none():
    assert read_certificates(b"") == []
    assert read_certificates(b"-----BEGIN nonsense") == []


def test_a_renewal_trusts_the_former_authority_until_it_expires(made):
    second = make_certificate(NAMES, NOW + GOOD_FOR, made.authorities)
    assert why_renew(second, NAMES, NOW + GOOD_FOR) is None
    assert len(read_certificates(second.authorities)) == 2
    third = make_certificate(NAMES, NOW + 2 * GOOD_FOR, second.authorities)
    assert len(read_certificates(third.authorities)) == 2, "the first has expired by now"


def test_a_bundle_does_not_grow_without_bound(made):
    bundle = made.authorities
    for day in range(12):
        bundle = make_certificate(NAMES, NOW + day, bundle).authorities
    assert len(read_certificates(bundle)) == 5


class Server:
    """Has no certificate and one webhook; takes notes of what is written."""

    def __init__(self) -> None:
        self.written: list[str] = []

    async def read(self, path: str) -> None:
        return None

    async def call(self, method: str, path: str, **_: Any) -> dict[str, Any]:
        if method != "GET":
            self.written.append(path.rpartition("/")[2])
        return {"metadata": {"resourceVersion": "1"}, "webhooks": [{"clientConfig": {}}]}


async def test_an_authority_is_announced_before_its_certificate_is_stored():
    """A webhook pod may use it at once, and the API server would refuse every change."""
    server: Any = Server()
    place = WebhookPlace("configuration", ("system", "hook"), ("system", "secret"))
    assert await renew_certificate(server, place, NOW) == NOW + 365 * DAY
    assert server.written == ["configuration", "secret"]


@pytest.mark.parametrize("host", NAMES)
def test_strict_clients_accept_it_before_and_after_a_renewal(tmp_path, host):
    first = make_certificate(NAMES, now=_now())
    second = make_certificate(NAMES, _now(), first.authorities)
    for served in (first, second):
        assert _shake_hands(tmp_path, served, second.authorities, host)
    assert not _shake_hands(tmp_path, second, first.authorities, host), "trusted by no one"


def _now() -> float:
    import time

    return time.time()


def _shake_hands(folder, served: Certificate, trusted: bytes, host: str) -> bool:
    (folder / "crt").write_bytes(served.certificate)
    (folder / "key").write_bytes(served.key)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(folder / "crt", folder / "key")
    client = ssl.create_default_context(cadata=trusted.decode())
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    here, there = socket.socketpair()

    def serve() -> None:
        try:
            server.wrap_socket(there, server_side=True).close()
        except OSError:
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(here, server_hostname=host):
            return True
    except ssl.SSLCertVerificationError:
        return False
    finally:
        here.close()
        thread.join()


async def test_the_webhook_waits_for_a_certificate_and_uses_new_ones_for_new_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_process, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(certificate_files, "LOOK_SECONDS", 0.0)
    health, metrics = free_ports(2)
    options = WebhookOptions(tmp_path, host="127.0.0.1", health_port=health, metrics_port=metrics)
    process = WebhookProcess(options)
    starting = asyncio.create_task(process.start())
    async with asyncio.timeout(60):
        while "holds no usable tls.crt and tls.key" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # it looks again, and says nothing new
    assert caplog.text.count("holds no usable tls.crt and tls.key") == 1
    first, second = (make_certificate(NAMES, _now()) for _ in range(2))

    def put(certificate: bytes, key: bytes) -> None:
        (tmp_path / "tls.crt").write_bytes(certificate)
        (tmp_path / "tls.key").write_bytes(key)

    put(first.certificate, first.key)
    async with asyncio.timeout(60):
        await starting
    served = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=process.context
    )
    try:
        address = served.sockets[0].getsockname()

        async def shown() -> x509.Certificate:
            pem = await asyncio.to_thread(ssl.get_server_certificate, address)
            return read_certificates(pem.encode())[0]

        assert await shown() == read_certificates(first.certificate)[0]
        put(second.certificate, b"spoiled")
        for _ in range(3):
            assert await shown() == read_certificates(first.certificate)[0]
        assert caplog.text.count("The old ones stay in use") == 1
        put(second.certificate, second.key)
        assert await shown() == read_certificates(second.certificate)[0]
    finally:
        served.close()
        await process.stop()


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    made = make_certificate(["webhook.svc"], NOW)
    key = serialization.load_pem_private_key(made.key, None)
    secret = serialization.BestAvailableEncryption(b"secret")
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret
    (tmp_path / "tls.crt").write_bytes(made.certificate)
    (tmp_path / "tls.key").write_bytes(key.private_bytes(*form))
    files = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.crt", tmp_path / "tls.key")
    with pytest.raises(TlsError, match="the key has a password"):
        serving_context(files)
