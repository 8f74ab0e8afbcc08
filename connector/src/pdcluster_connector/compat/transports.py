"""Which of NIXL's backends can carry KV from engine to engine."""

from __future__ import annotations

from typing import Final

CARRIES: Final = frozenset({"UCX"})
# NIXL 1.5 src/plugins: these read and write files, objects or disks.
STORAGE: Final = frozenset(
    {"AZURE_BLOB", "GDS", "GDS_MT", "GUSLI", "HF3FS", "INFINIA", "OBJ", "POSIX"}
)


def why_not(backend: str) -> str | None:
    """Return why a backend cannot be used, as the end of a sentence; None if it can."""
    if backend in CARRIES:
        return None
    if backend in STORAGE:
        return "moves data between memory and storage, never between two engines"
    return "is not known to carry KV in this version"
