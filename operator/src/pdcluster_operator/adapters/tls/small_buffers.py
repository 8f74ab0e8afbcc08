"""What one TLS connection costs.

asyncio gives each TLS connection a buffer of 256 KiB. The operator holds a connection to each
launcher while the launcher has no news, so with a thousand PDClusters these buffers would be half a
gigabyte. What launchers say is short, and a TLS record has at most 16 KiB.
"""

from __future__ import annotations

from asyncio import sslproto

BUFFER_BYTES = 16 * 1024


def use_small_buffers() -> None:
    """Let all TLS connections that this process makes from now on have small buffers."""
    sslproto.SSLProtocol.max_size = BUFFER_BYTES
