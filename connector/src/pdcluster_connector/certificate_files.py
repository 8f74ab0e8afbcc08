"""Certificate files in PEM: loaded into TLS contexts, and again when they change.

Engines and the operator use it. A change of the files holds for new connections, and open ones go
on: a rotation fails no request. If the new files cannot be used, the former ones stay in use and
the log says why. The files are loaded into new contexts, which replace the old ones as a whole: a
file that changes meanwhile cannot leave a context with half of a pair.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from pdcluster_connector.protocol.tls_files import TlsFiles

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 5.0
Made = TypeVar("Made")


class TlsError(Exception):
    """The files cannot be used. The message names the file and says what to do."""


class Watched(Generic[Made]):
    """What was made from certificate files, and is made again when they change. Thread-safe.

    Args:
        make: makes it from the files. May raise TlsError.
        clock: seconds; says when to look at the files again.

    Raises:
        TlsError: the files cannot be used.
    """

    def __init__(
        self,
        files: TlsFiles,
        make: Callable[[TlsFiles], Made],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._make = make
        self._clock = clock
        self._lock = threading.RLock()
        self._used = _stamps(files)
        self._refused = self._used
        self._looked = clock()
        self._made = make(files)

    def present(self) -> Made:
        """Return what was made from the present files, as far as they can be used.

        The files are looked at every few seconds.
        """
        with self._lock:
            now = self._clock()
            if now - self._looked >= LOOK_SECONDS:
                self._looked = now
                self._look()
            return self._made

    def _look(self) -> None:
        stamps = _stamps(self._files)
        if stamps == self._used:
            return
        try:
            self._made = self._make(self._files)
        except TlsError as error:
            if stamps != self._refused:  # once for each change; a certificate may become valid
                self._refused = stamps
                logger.warning(
                    "the new TLS files cannot be used: %s. The old ones stay in use", error
                )
            return
        self._used = self._refused = stamps
        logger.info("TLS files read again: %s", self._files.certificate)


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
    for path in (files.ca, files.certificate, files.key):
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


def _stamps(files: TlsFiles) -> tuple[tuple[int, int], ...]:
    """Return what changes with each file: its time, and its inode where a link points elsewhere."""
    stamps = []
    for path in (files.ca, files.certificate, files.key):
        try:
            found = path.stat()
        except OSError:
            stamps.append((0, 0))
        else:
            stamps.append((found.st_mtime_ns, found.st_ino))
    return tuple(stamps)
