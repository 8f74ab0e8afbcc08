"""Ports of this machine, for tests that name a port before a process listens on it."""

from __future__ import annotations

import random
import socket

# Below what the kernel gives to outgoing connections, and away from Kubernetes' own.
PORTS = range(12_000, 30_000)
_given: set[int] = set()


def free_port() -> int:
    """Return a free port of 127.0.0.1 that no earlier call has returned.

    Asking the kernel (port 0) is not enough. As long as nobody listens on a port, the kernel may
    give it to another caller or to an outgoing connection.
    """
    while True:
        port = random.SystemRandom().choice(PORTS)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port


def free_ports(count: int) -> list[int]:
    """Several such ports."""
    return [free_port() for _ in range(count)]
