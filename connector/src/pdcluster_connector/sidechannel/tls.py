"""Mutual TLS between engines: three files, read again when they change.

Both ends show a certificate of the same authority (TLS 1.3 only). What a certificate names is
compared in :mod:`pdcluster_connector.protocol.peer_name`. A change of the files holds for new
connections, and open ones go on: a rotation fails no request. If the new files cannot be used, the
former ones stay in use and the log says why. The files are loaded into new contexts, which replace
the old ones as a whole: a file that changes meanwhile cannot leave a context with half of a pair.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pdcluster_connector.protocol.peer_name import engine_name, role_name
from pdcluster_connector.protocol.tls_files import TlsFiles

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 5.0
_STEPS: Final = 10  # of a TLS handshake with oneself; three are enough
_SniCallback = Callable[[ssl.SSLObject, str | None, ssl.SSLContext], None]


class TlsError(Exception):
    """The TLS files cannot be used. The message names the file and says what to do."""


class Tls:
    """The TLS contexts of one engine. Thread-safe.

    Args:
        files: see :class:`TlsFiles`.
        engine_id: this engine; its certificate has to name it if certificates name engines.
        clock: seconds; says when to look at the files again.

    Attributes:
        expires: when the certificate in use expires, in seconds since the epoch; None if
            certificates name hosts.

    Raises:
        TlsError: the files cannot be used.
    """

    def __init__(
        self, files: TlsFiles, engine_id: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.named = files.named
        self.engine_id = engine_id
        self._files = files
        self._clock = clock
        self._lock = threading.RLock()  # a try of new files ends in _look again
        self._stamp = self._stamps()
        self._looked = clock()
        self.expires: int | None = None
        self._contexts = self._load_and_try()
        # A server keeps the context that it was given; each connection moves on to the present one.
        self._given = self._contexts
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
        self._look()
        return self._contexts.client

    def server_name(self, engine_id: str) -> str | None:
        """Return the name to expect of ``engine_id``; None for that of its host.

        Raises:
            ValueError: no certificate can name this engine.
        """
        return self._name(engine_id) if self.named else None

    def _name(self, engine_id: str) -> str:
        return role_name(engine_id) if self._files.by_role else engine_name(engine_id)

    def _look(self) -> None:
        """Take up changed files, for the connections that begin after this one."""
        with self._lock:
            now = self._clock()
            if now - self._looked < LOOK_SECONDS:
                return
            self._looked = now
            stamp = self._stamps()
            if stamp == self._stamp:
                return
            try:
                self._contexts = self._load_and_try()
            except TlsError as error:
                logger.warning("the new TLS files are not used, the former ones are: %s", error)
                return
            self._stamp = stamp
            logger.info("TLS files read again: %s", self._files.certificate)

    def _move_to(self, choose: Callable[[_Contexts], ssl.SSLContext]) -> _SniCallback:
        """Return what OpenSSL calls when a connection begins, also without a name."""

        def move(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            self._look()
            connection.context = choose(self._contexts)

        return move

    def _load_and_try(self) -> _Contexts:
        contexts = _Contexts.new()
        contexts.load(self._files)
        self.expires = self._try(contexts)
        return contexts

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        stamps = []
        for path in (self._files.ca, self._files.certificate, self._files.key):
            try:
                found = path.stat()
            except OSError:
                stamps.append((0, 0))
            else:
                stamps.append((found.st_mtime_ns, found.st_ino))
        return tuple(stamps)

    def _try(self, contexts: _Contexts) -> int | None:
        """Return when this certificate expires; raise TlsError if peers would not accept it."""
        if not self.named:
            return None
        try:
            name = self._name(self.engine_id)
        except ValueError as error:
            raise TlsError(f"engine_id: {error}") from None
        return _meet_oneself(contexts, name, self._files)


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
    def new(cls) -> _Contexts:
        server, open_server = (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) for _ in range(2))
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (server, open_server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
        for context in (server, open_server):
            context.num_tickets = 0  # a resumed session would not show its certificate again
        client.hostname_checks_common_name = False  # only the subjectAltName names (RFC 9525)
        open_server.verify_mode = ssl.CERT_OPTIONAL
        return cls(server, open_server, client)

    def load(self, files: TlsFiles) -> None:
        for context in (self.server, self.open_server, self.client):
            _load(context, files)


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    for path in (files.ca, files.certificate, files.key):
        if not os.path.isfile(path):  # Path.is_file raises where it may not look
            raise TlsError(f"tls: {path} is not a file; give the path of a PEM file")
    try:
        context.load_verify_locations(cafile=files.ca)
    except (OSError, ValueError) as error:
        raise TlsError(f"tls.ca: {files.ca} holds no CA certificates in PEM: {error}") from None
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except (OSError, ValueError) as error:
        raise TlsError(
            f"tls.certificate, tls.key: {files.certificate} and {files.key} are no certificate "
            f"and its key in PEM: {error}"
        ) from None


def _no_password() -> str:
    raise ValueError("the key has a password; give a key without one")


def _meet_oneself(contexts: _Contexts, name: str, files: TlsFiles) -> int:
    """Shake hands with oneself in memory: peers will do the same checks.

    Returns:
        When the certificate expires, in seconds since the epoch.
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
                    f"tls.certificate: {files.certificate} does not serve this engine: "
                    f"{getattr(error, 'verify_message', '') or error}. It must be signed by an "
                    f"authority of {files.ca}, be valid today, be allowed for servers and clients, "
                    f"and have the DNS name {name}"
                ) from None
            done.add(number)
        if len(done) == len(ends):
            break
    return int(ssl.cert_time_to_seconds(str((ends[0].getpeercert() or {})["notAfter"])))
