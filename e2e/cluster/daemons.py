"""What the node's first process must know about a program that it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.places import Places

Programs = dict[str, Path]


@dataclass(frozen=True)
class Daemon:
    """A program that runs as long as the node; its output goes to `logs/NAME.log`."""

    name: str
    command: tuple[str | Path, ...]


# Writes the daemon's settings and says how it is started.
Prepare = Callable[[Places, Programs], Daemon]
