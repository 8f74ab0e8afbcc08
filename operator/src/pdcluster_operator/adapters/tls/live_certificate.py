"""A server's certificate, taken up while it serves.

kopf's own server ends and begins anew for a renewed certificate. An API server's review that
comes in between fails, and what it was about is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from pathlib import Path

log = logging.getLogger(__name__)


def tls_problem(folder: Path) -> str | None:
    """Return why the folder's certificate cannot serve; None if it can."""
    try:
        load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), folder)
    except (OSError, ssl.SSLError) as error:
        return f"{folder} holds no usable tls.crt and tls.key: {error}"
    return None


def load(context: ssl.SSLContext, folder: Path) -> None:
    """Have new connections served with the folder's certificate; open ones go on with theirs.

    Raises:
        OSError: it cannot be read, or is none (ssl.SSLError).
    """
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")


async def keep_loaded(context: ssl.SSLContext, folder: Path, seconds: float) -> None:
    """Look every ``seconds`` whether the folder holds another certificate; never returns."""
    loaded = b""
    while True:
        await asyncio.sleep(seconds)
        found = _digest(folder)
        if found == loaded:
            continue
        # Tried elsewhere first: half of a pair would end every new connection.
        if (problem := tls_problem(folder)) is not None:
            log.warning("%s; the former one serves on", problem)
            continue
        load(context, folder)
        loaded = found


def _digest(folder: Path) -> bytes:
    digest = hashlib.sha256()
    for name in ("tls.crt", "tls.key"):
        try:
            digest.update((folder / name).read_bytes())
        except OSError:
            return b""
    return digest.digest()
