"""The operator's certificate for engines whose certificates a user mounts: three files, read again.

The operator's own CA is unknown to such engines. So somebody else has to give it a certificate that
they trust, and the CA of theirs.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from pdcluster_connector.protocol.peer_name import OPERATOR_NAME

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
FILES = ("ca.crt", "tls.crt", "tls.key")


class IdentityError(Exception):
    """The files cannot be used. The message names the folder and says what to do."""


class MountedIdentity:
    """Makes the TLS context of the operator's requests. Changed files hold for new connections.

    Args:
        folder: holds ``ca.crt``, ``tls.crt`` and ``tls.key``.
        clock: seconds; says when to look at the files again.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._looked = float("-inf")
        self._seen: tuple[bytes, ...] = ()
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext:
        """Return the context. It checks the server's name.

        Raises:
            IdentityError: there are no files that can be used, and there were none before.
        """
        now, former = self._clock(), self._context
        if former is not None and now - self._looked < LOOK_SECONDS:
            return former
        self._looked = now
        try:
            self._context = self._look()
        except (OSError, ValueError) as error:
            problem = (
                f"{self._folder} holds no usable {', '.join(FILES)}: {error}. Put the operator's "
                f"certificate there, with the DNS name {OPERATOR_NAME}"
            )
            if former is None:
                raise IdentityError(problem) from error
            log.warning("%s; the former certificate stays in use", problem)
            return former
        return self._context

    def _look(self) -> ssl.SSLContext:
        seen = tuple((self._folder / name).read_bytes() for name in FILES)
        if self._context is not None and seen == self._seen:
            return self._context
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.hostname_checks_common_name = False  # only the subjectAltName names (RFC 9525)
        ca, certificate, key = (self._folder / name for name in FILES)
        context.load_verify_locations(ca)
        context.load_cert_chain(certificate, key, password=_no_password)
        self._seen = seen
        return context


def _no_password() -> str:
    raise ValueError("the key has a password; give a key without one")
