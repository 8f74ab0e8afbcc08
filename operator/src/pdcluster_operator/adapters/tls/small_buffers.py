"""TLS connections with one small buffer in common, so that a thousand of them need little memory.

asyncio gives each TLS connection a buffer of 256 KiB. The operator holds a connection to each
launcher while the launcher has no news, so with a thousand PDClusters these buffers would be half a
gigabyte. Here, all connections of a thread share one buffer, of one TLS record. That is safe where
an event loop reads into it and hands it on in one step, as it does everywhere but on Windows.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import sslproto
from typing import Any

BUFFER_BYTES = 16 * 1024
_held = threading.local()


class SharedBuffer(sslproto.SSLProtocol):
    """asyncio's TLS; what it receives goes into OpenSSL's own buffer at once."""

    max_size = BUFFER_BYTES

    def __init__(self, loop: asyncio.AbstractEventLoop, *rest: Any, **more: Any) -> None:
        super().__init__(loop, *rest, **more)
        if isinstance(loop, asyncio.SelectorEventLoop):
            if not hasattr(_held, "buffer"):
                _held.buffer = bytearray(BUFFER_BYTES)
            self._ssl_buffer = _held.buffer
            self._ssl_buffer_view = memoryview(_held.buffer)


def use_small_buffers() -> None:
    """Let all TLS connections that this process makes from now on have small buffers."""
    sslproto.SSLProtocol = SharedBuffer  # type: ignore[misc]
