"""Locks between processes: two test runs may ask for the same cluster at the same time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.report import say


@contextmanager
def alone(lock: Path, doing: str) -> Iterator[None]:
    """Hold the lock file. While another process holds it, wait and say so."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"  waiting for another process that {doing}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
