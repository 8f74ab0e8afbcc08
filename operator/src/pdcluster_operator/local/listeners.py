"""Who listens on a port of this machine, read from the kernel's tables."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Listener:
    """Who listens on a port: on every address of the machine, or on the one that was asked for.

    Attributes:
        holder: `` by NAME (pid N)``, or empty if it is not known.
    """

    everywhere: bool
    holder: str


def listener(address: str, port: int) -> Listener | None:
    """Return who listens on a port of an address; None if nobody is known to."""
    packed = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
    everywhere = {f"{host}:{port:04X}" for host in ("00000000", "0" * 32)}
    found = {
        fields[9]: fields[1] in everywhere
        for table in ("tcp", "tcp6")
        for line in _table(Path("/proc/net", table))
        if (fields := line.split())
        and fields[1] in {*everywhere, f"{packed}:{port:04X}"}
        and fields[3] == "0A"
    }
    # If there is also a listener on this address, the one on every address is for IPv6 only.
    return Listener(all(found.values()), _holder(set(found))) if found else None


def _holder(inodes: set[str]) -> str:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if any(_socket(link) in inodes for link in (process / "fd").iterdir()):
                return f" by {(process / 'comm').read_text().strip()} (pid {process.name})"
    return ""


def _socket(descriptor: Path) -> str:
    """Return the inode of a socket; nothing for a descriptor that was closed meanwhile."""
    try:
        return os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")
    except OSError:
        return ""


def _table(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:] if path.exists() else []
