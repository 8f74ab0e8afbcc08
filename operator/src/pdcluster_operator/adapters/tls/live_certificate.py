"""Loads a renewed certificate into a server that is running.

kopf would restart its server for a renewed certificate. A review that arrives during the restart
fails, and the API server then refuses the change.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from pathlib import Path

from pdcluster_connector.certificate_files import no_password

log = logging.getLogger(__name__)


def tls_problem(folder: Path) -> str | None:
    """Return why the folder's certificate cannot serve; None if it can."""
    try:
        load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), folder)
    except (OSError, ValueError) as error:
        return f"{folder} holds no usable tls.crt and tls.key: {error}"
    return None


def load(context: ssl.SSLContext, folder: Path) -> None:
    """Use the folder's certificate for new connections; open ones keep theirs.

    Raises:
        OSError: it cannot be read, or is none (ssl.SSLError).
        ValueError: its key has a password.
    """
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key", password=no_password)


async def keep_loaded(context: ssl.SSLContext, folder: Path, seconds: float) -> None:
    """Load the folder's certificate when it changes. Look every ``seconds``; never return."""
    loaded = refused = b""
    while True:
        await asyncio.sleep(seconds)
        found = _digest(folder)
        if found == loaded:
            continue
        # Try it in another context first. While only one of the two files is new, every new
        # connection would fail.
        if (problem := tls_problem(folder)) is not None:
            if found != refused:
                refused = found
                log.warning("%s; the former certificate stays in use", problem)
            continue
        load(context, folder)
        loaded = refused = found


def _digest(folder: Path) -> bytes:
    digest = hashlib.sha256()
    for name in ("tls.crt", "tls.key"):
        try:
            digest.update((folder / name).read_bytes())
        except OSError:
            return b""
    return digest.digest()
