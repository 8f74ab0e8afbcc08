"""Ports and addresses of this machine, for tests that name them before a process listens there.

What one process was given, no other process is given as long as the first one lives. The workers of
one run, and the runs of several working trees, share the machine.
"""

from __future__ import annotations

import fcntl
import functools
import os
import random
import socket
import tempfile

# Below what the kernel gives to outgoing connections, and away from Kubernetes' own.
PORTS = range(12_000, 30_000)
# Networks 127.x.y, as numbers behind those of the ports; local mode begins at 127.0 and 127.81.
NETWORKS = range(100_000 + (100 << 8), 100_000 + (250 << 8))
_given: set[int] = set()


def free_port() -> int:
    """Return a port that is free on all addresses, and that no earlier call has returned.

    Asking the kernel (port 0) is not enough. As long as nobody listens on a port, the kernel may
    give it to another caller or to an outgoing connection.
    """
    while True:
        port = _claimed(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        return port


def free_ports(count: int) -> list[int]:
    """Several such ports."""
    return [free_port() for _ in range(count)]


def free_network() -> str:
    """The first three numbers of loopback addresses that no other test uses: ``127.101.7``."""
    network = _claimed(NETWORKS) - 100_000
    return f"127.{network >> 8}.{network & 255}"


def _claimed(numbers: range) -> int:
    """Return one of ``numbers`` that nobody else has, in this process or in another one."""
    while True:
        number = random.SystemRandom().choice(numbers)
        if number in _given:
            continue
        try:
            fcntl.lockf(_claims(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError:
            continue
        _given.add(number)
        return number


@functools.cache
def _claims() -> int:
    """A file in which a process locks one byte for each number that it has, until it ends."""
    path = os.path.join(tempfile.gettempdir(), f"pdcluster-test-claims-{os.getuid()}")
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
