"""Which NIXL backends can move KV between engines, and which of their options can be set."""

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


MAX_THREADS: Final = 64
MAX_TEXT: Final = 1024
# From NIXL 1.5 src/plugins/ucx. Name -> (least, most) of a number, or None for text. NIXL ignores
# any other option, or it must not be changed: ucx_error_handling_mode makes a lost peer visible.
OPTIONS: Final[dict[str, dict[str, tuple[int, int] | None]]] = {
    "UCX": {
        "device_list": None,
        "engine_config": None,
        "num_workers": (1, 64),
        "split_batch_size": (1, 2**20),
        "ucx_devices": None,
    }
}


def wrong_option(backend: str, name: str, value: object) -> str | None:
    """Return why an option of a backend cannot be set so; None if it can."""
    known = OPTIONS.get(backend, {})
    if name not in known:
        listed = ", ".join(sorted(known)) or "none"
        return f"is not an option of {backend}; the options are {listed}"
    bounds = known[name]
    if bounds is None:
        if isinstance(value, str) and 0 < len(value) <= MAX_TEXT:
            return None
        return f"is not a text of 1 to {MAX_TEXT} characters"
    low, high = bounds
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return None
    return f"is not a whole number from {low} to {high}"
