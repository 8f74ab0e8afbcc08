"""How vLLM's attention backends order the inside of a block, by the backend's name."""

from __future__ import annotations

from typing import Final

# The bytes of one token of one head lie together.
TOKEN_SLICEABLE: Final = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"})
# K of all tokens of a head, then V of all of them. The byte order depends on the host's CPU.
PACKED: Final = frozenset({"CPU_ATTN"})


def token_sliceable(backend: str | None) -> bool | None:
    """Tell whether a backend's blocks can be cut by token; None for a name that is not known."""
    if backend in TOKEN_SLICEABLE:
        return True
    return False if backend in PACKED else None
