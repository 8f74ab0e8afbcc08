"""Mutual TLS from certificate files in PEM.

Both ends show a certificate of the same authority (TLS 1.3 only). ``protocol/engine_id.py``
compares what a certificate names. The connector's option ``tls`` says which files an engine uses::

    {"ca": "/tls/ca.crt", "certificate": "/tls/tls.crt", "key": "/tls/tls.key", "names": "engines"}

``names`` says what a certificate names: ``engines``, ``roles`` or ``hosts``.

When the files change, they are read again. New connections use the new files, and open ones go on:
a rotation fails no request. If the new files cannot be used, or if peers would not accept them, the
former ones stay in use and the log says why. The files are loaded into new contexts, which replace
the old ones as a whole: a file that changes meanwhile cannot leave a context with half of a pair.
"""

import logging
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

from pdcluster_connector.protocol.engine_id import engine_name, role_name

_PATHS = ("ca", "certificate", "key")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the PEM files lie.

    Attributes:
        ca: certificates of the authorities whose engines are peers.
        certificate: this engine's certificate, for servers and clients, with its chain.
        key: its private key, without a password.
        named: whether certificates name engines. If not, everybody with a certificate of the
            authority is a peer, and a server's certificate names its host.
        by_role: whether the certificates that name engines name the role instead. All engines of
            one role of a PDCluster then share a certificate.
    """

    ca: Path
    certificate: Path
    key: Path
    named: bool = True
    by_role: bool = False

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        """All of them."""
        return self.ca, self.certificate, self.key


def tls_files(value: object) -> TlsFiles:
    """Return the files that the option ``tls`` names; raises ValueError with what is wrong."""
    if not isinstance(value, dict) or set(value) - {"names"} != set(_PATHS):
        raise ValueError('is not {"ca": PATH, "certificate": PATH, "key": PATH}')
    for name in _PATHS:
        if not isinstance(value[name], str) or not value[name]:
            raise ValueError(f"holds a {name} that is not a path")
    names = value.get("names", "engines")
    if not isinstance(names, str) or names not in {"engines", "roles", "hosts"}:
        raise ValueError(f"holds names {names!r}; allowed are engines, roles or hosts")
    ca, certificate, key = (Path(value[name]) for name in _PATHS)
    return TlsFiles(ca, certificate, key, named=names != "hosts", by_role=names == "roles")


logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 5.0
Made = TypeVar("Made")


class TlsError(Exception):
    """The files cannot be used. The message names the file and says what to do."""


@dataclass(eq=False)
class Watched(Generic[Made]):
    """What was made from files, and is made again when they change. Thread-safe.

    If the new files cannot be used, what was made before stays in use, and the log says why.

    Args:
        make: makes it from the files. May raise TlsError or ValueError, here and later.
        clock: seconds; says when to look at the files again.
        what: the files' name in the log.
    """

    files: Sequence[Path]
    make: Callable[[], Made]
    clock: Callable[[], float] = time.monotonic
    what: str = "TLS files"

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._used = self._refused = _stamps(self.files)
        self._looked = self.clock()
        self._made = self.make()

    def present(self) -> Made:
        """Return what was made from the present files, as far as they can be used.

        The files are looked at every few seconds.
        """
        with self._lock:
            now = self.clock()
            if not 0 <= now - self._looked < LOOK_SECONDS:  # a clock may be set back
                self._looked = now
                self._look()
            return self._made

    def _look(self) -> None:
        stamps = _stamps(self.files)
        if stamps == self._used:
            return
        try:
            self._made = self.make()
        except (TlsError, ValueError) as error:
            if stamps != self._refused:  # once for each change; a certificate may become valid
                self._refused = stamps
                why = "the new %s cannot be used: %s. The old ones stay in use"
                logger.warning(why, self.what, error)
            return
        self._used = self._refused = stamps
        logger.info("%s read again: %s", self.what, ", ".join(map(str, self.files)))


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of clients. It checks the server's name.

    Raises:
        TlsError: the files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.hostname_checks_common_name = False  # only the subjectAltName names (RFC 9525)
    load(context, files)
    return context


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of servers that want a certificate of each client.

    Raises:
        TlsError: the files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # a resumed session would not show its certificate again
    load(context, files)
    return context


def load(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Load the files into a context, which speaks TLS 1.3 alone; raises TlsError."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    for path in files.paths:
        if not os.path.isfile(path):  # Path.is_file raises where it may not look
            raise TlsError(f"{path} is not a file; give the path of a PEM file")
    try:
        context.load_verify_locations(cafile=files.ca)
    except (OSError, ValueError) as error:
        raise TlsError(f"{files.ca} holds no CA certificates in PEM: {error}") from None
    try:
        context.load_cert_chain(files.certificate, files.key, password=no_password)
    except (OSError, ValueError) as error:
        raise TlsError(
            f"{files.certificate} and {files.key} are no certificate and its key in PEM: {error}"
        ) from None


def no_password() -> str:
    """Refuse a key that has a password. Without this, OpenSSL would ask for it on a terminal."""
    raise ValueError("the key has a password; give a key without one")


def _stamps(files: Sequence[Path]) -> tuple[tuple[int, int], ...]:
    """Return what changes with each file: its time, and its inode where a link points elsewhere."""
    stamps = []
    for path in files:
        try:
            found = path.stat()
        except OSError:
            stamps.append((0, 0))
        else:
            stamps.append((found.st_mtime_ns, found.st_ino))
    return tuple(stamps)


class _Contexts(NamedTuple):
    server: ssl.SSLContext
    open_server: ssl.SSLContext
    client: ssl.SSLContext


_STEPS: Final = 10  # of a TLS handshake with oneself; three are enough


class Tls:
    """The TLS contexts of one engine. Thread-safe.

    Args:
        files: see :class:`TlsFiles`.
        engine_id: this engine; its certificate has to name it if certificates name engines.
        clock: seconds; says when to look at the files again.

    Attributes:
        expires: when the certificate in use expires, or an authority above it if that is
            earlier, in seconds since the epoch; None if certificates name hosts.
        server: the context of servers: without a certificate, there is no connection.
        open_server: the context of servers that judge each request: a client may have none.

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
        self._contexts = Watched(files.paths, lambda: self._load_and_try(files), clock)
        # A server keeps the context that it was given; each connection moves on to the present one.
        self.server, self.open_server, _ = self._contexts.present()
        # OpenSSL calls this when a connection begins, also without a name.
        self.server.sni_callback = lambda connection, *_: self._move(connection, 0)
        self.open_server.sni_callback = lambda connection, *_: self._move(connection, 1)

    def _move(self, connection: ssl.SSLObject, place: int) -> None:
        connection.context = self._contexts.present()[place]

    def client(self) -> ssl.SSLContext:
        """Return the context of clients, which compare the server's name."""
        return self._contexts.present().client

    def server_name(self, engine_id: str) -> str | None:
        """Return the name to expect of ``engine_id``; None for that of its host.

        Raises:
            ValueError: no certificate can name this engine.
        """
        if not self.named:
            return None
        return role_name(engine_id) if self._by_role else engine_name(engine_id)

    def _load_and_try(self, files: TlsFiles) -> _Contexts:
        """Return new contexts; raise TlsError if peers would not accept them."""
        try:
            name = self.server_name(self.engine_id)
        except ValueError as error:
            raise TlsError(f"engine_id: {error}") from None
        try:
            contexts = _Contexts(
                server_context(files), server_context(files), client_context(files)
            )
            contexts.open_server.verify_mode = ssl.CERT_OPTIONAL
            if name is not None:
                self.expires = _meet_oneself(contexts, name, files)
        except TlsError as error:
            raise TlsError(f"tls: {error}") from None
        return contexts


def tls_arguments(tls: Tls | None, engine_id: str | None = None) -> dict[str, Any]:
    """Return the arguments of aiohttp with which a request reaches no server but ``engine_id``.

    None: this engine's own pods.

    Raises:
        ValueError: no certificate can name this engine.
    """
    if tls is None:
        return {}
    return {"ssl": tls.client(), "server_hostname": tls.server_name(engine_id or tls.engine_id)}


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
    for _ in range(_STEPS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise TlsError(
                    f"{files.certificate} does not serve this engine: "
                    f"{getattr(error, 'verify_message', '') or error}. It must be signed by an "
                    f"authority of {files.ca}, be valid today, be allowed for servers and clients, "
                    f"and have the DNS name {name}"
                ) from None
    _, *above = _verified_chain(ends[0])
    certificates = [ends[0].getpeercert() or {}]
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
