"""The operator's certificate for engines whose certificates a user mounts.

The operator's own CA is unknown to such engines. So somebody else has to give it a certificate that
they trust, and the CA of theirs.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path

from pdcluster_connector.certificate_files import TlsError, Watched, client_context
from pdcluster_connector.protocol.peer_name import OPERATOR_NAME
from pdcluster_connector.protocol.tls_files import TlsFiles

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
        self._watched: Watched[ssl.SSLContext] | None = None

    def context(self) -> ssl.SSLContext:
        """Return the context. It checks the server's name.

        Raises:
            IdentityError: there are no files that can be used, and there were none before.
        """
        if self._watched is None:
            ca, certificate, key = (self._folder / name for name in FILES)
            files = TlsFiles(ca, certificate, key)
            try:
                self._watched = Watched(files, client_context, self._clock)
            except TlsError as error:
                raise IdentityError(
                    f"{self._folder} holds no usable {', '.join(FILES)}: {error}. Put the "
                    f"operator's certificate there, with the DNS name {OPERATOR_NAME}"
                ) from error
        return self._watched.present()
