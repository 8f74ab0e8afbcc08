"""Mutual TLS between engines.

Both ends show a certificate of the same authority (TLS 1.3 only). What a certificate names is
compared in :mod:`pdcluster_connector.protocol.peer_name`. New files are taken up while the engine
runs, if its peers would accept them.
"""

from __future__ import annotations

import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pdcluster_connector.certificate_files import (
    TlsError,
    Watched,
    client_context,
    server_context,
)
from pdcluster_connector.protocol.peer_name import engine_name, role_name
from pdcluster_connector.protocol.tls_files import TlsFiles

_STEPS: Final = 10  # of a TLS handshake with oneself; three are enough
_SniCallback = Callable[[ssl.SSLObject, str | None, ssl.SSLContext], None]


class Tls:
    """The TLS contexts of one engine. Thread-safe.

    Args:
        files: see :class:`TlsFiles`.
        engine_id: this engine; its certificate has to name it if certificates name engines.
        clock: seconds; says when to look at the files again.

    Attributes:
        expires: when the certificate in use expires, or an authority above it if that is
            earlier, in seconds since the epoch; None if certificates name hosts.

    Raises:
        TlsError: the files cannot be used.
    """

    def __init__(
        self, files: TlsFiles, engine_id: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.named = files.named
        self.engine_id = engine_id
        self._by_role = files.by_role
        self.expires: int | None = None
        self._contexts = Watched(files, self._load_and_try, clock)
        # A server keeps the context that it was given; each connection moves on to the present one.
        self._given = self._contexts.present()
        self._given.server.sni_callback = self._move_to(lambda present: present.server)
        self._given.open_server.sni_callback = self._move_to(lambda present: present.open_server)

    def server(self) -> ssl.SSLContext:
        """Return the context of servers: without a certificate, there is no connection."""
        return self._given.server

    def open_server(self) -> ssl.SSLContext:
        """Return the context of servers that judge each request: a client may have none."""
        return self._given.open_server

    def client(self) -> ssl.SSLContext:
        """Return the context of clients, which compare the server's name."""
        return self._contexts.present().client

    def server_name(self, engine_id: str) -> str | None:
        """Return the name to expect of ``engine_id``; None for that of its host.

        Raises:
            ValueError: no certificate can name this engine.
        """
        return self._name(engine_id) if self.named else None

    def _name(self, engine_id: str) -> str:
        return role_name(engine_id) if self._by_role else engine_name(engine_id)

    def _move_to(self, choose: Callable[[_Contexts], ssl.SSLContext]) -> _SniCallback:
        """Return what OpenSSL calls when a connection begins, also without a name."""

        def move(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            connection.context = choose(self._contexts.present())

        return move

    def _load_and_try(self, files: TlsFiles) -> _Contexts:
        """Return new contexts; raise TlsError if peers would not accept them."""
        try:
            name = self.server_name(self.engine_id)
        except ValueError as error:
            raise TlsError(f"engine_id: {error}") from None
        try:
            contexts = _Contexts.of(files)
            if name is not None:
                self.expires = _meet_oneself(contexts, name, files)
        except TlsError as error:
            raise TlsError(f"tls: {error}") from None
        return contexts


def tls_of(files: TlsFiles | None, engine_id: str) -> Tls | None:
    """Return the contexts of an engine; None for an engine without TLS. May raise TlsError."""
    return None if files is None else Tls(files, engine_id)


def tls_arguments(tls: Tls | None, engine_id: str) -> dict[str, Any]:
    """Return what aiohttp has to be told so that only ``engine_id`` is spoken to.

    Raises:
        ValueError: no certificate can name this engine.
    """
    if tls is None:
        return {}
    return {"ssl": tls.client(), "server_hostname": tls.server_name(engine_id)}


def own_arguments(tls: Tls | None) -> dict[str, Any]:
    """Return what aiohttp has to be told so that only this engine's own pods are spoken to."""
    return {} if tls is None else tls_arguments(tls, tls.engine_id)


@dataclass(frozen=True, slots=True)
class _Contexts:
    server: ssl.SSLContext
    open_server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def of(cls, files: TlsFiles) -> _Contexts:
        server, open_server = server_context(files), server_context(files)
        open_server.verify_mode = ssl.CERT_OPTIONAL
        return cls(server, open_server, client_context(files))


def _meet_oneself(contexts: _Contexts, name: str, files: TlsFiles) -> int:
    """Shake hands with oneself in memory: peers will do the same checks.

    Returns:
        When peers no longer accept the certificate, in seconds since the epoch.
    """
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        contexts.client.wrap_bio(to_client, to_server, server_hostname=name),
        contexts.server.wrap_bio(to_server, to_client, server_side=True),
    )
    done: set[int] = set()
    for _ in range(_STEPS):
        for number, end in enumerate(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                raise TlsError(
                    f"{files.certificate} does not serve this engine: "
                    f"{getattr(error, 'verify_message', '') or error}. It must be signed by an "
                    f"authority of {files.ca}, be valid today, be allowed for servers and clients, "
                    f"and have the DNS name {name}"
                ) from None
            done.add(number)
        if len(done) == len(ends):
            break
    return _end_of_chain(ends[0])


def _end_of_chain(end: ssl.SSLObject) -> int:
    """Return when the first certificate of the other end's chain expires, up to its authority."""
    _, *above = _verified_chain(end)
    certificates = [end.getpeercert() or {}]
    if above:
        authorities = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authorities.load_verify_locations(cadata=b"".join(above))
        certificates += authorities.get_ca_certs()
    return min(int(ssl.cert_time_to_seconds(str(one["notAfter"]))) for one in certificates)


def _verified_chain(end: ssl.SSLObject) -> list[bytes]:
    """Return the certificates by which the other end was accepted, in DER, its own first."""
    if sys.version_info >= (3, 13):
        return list(end.get_verified_chain())
    # Python 3.13 made it public.
    found = end._sslobj.get_verified_chain()  # type: ignore[attr-defined]  # noqa: SLF001
    return [ssl.PEM_cert_to_DER_cert(one.public_bytes()) for one in found]
