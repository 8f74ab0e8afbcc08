"""Connections to a Kubernetes Service while its pods come and go.

For a moment a Service may still lead to a pod that is gone. Nobody answers the first packet then,
and the kernel sends it again to the same pod, for minutes. A new connection is led anew. To connect
is safe to repeat, unlike to send a request.
"""

from __future__ import annotations

import http.client
import socket
import time

ATTEMPT_SECONDS = 2.0


def connected(host: str, port: int, seconds: float) -> http.client.HTTPConnection:
    """Connect within some seconds, which is also how long each read may take.

    Raises TimeoutError after them, and any other OSError at once.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            made = socket.create_connection((host, port), timeout=min(ATTEMPT_SECONDS, seconds))
            break
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise
    made.settimeout(seconds)
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    connection.sock = made
    return connection
