"""What is known of vLLM's attention backends by their names."""

from __future__ import annotations

from typing import Final

# A block's inside is [head, token, K|V] in some order, each token's bytes whole.
TOKEN_SLICEABLE: Final = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"})
# All K tokens of a head, then all its V tokens, packed for the host's instruction set.
PACKED: Final = frozenset({"CPU_ATTN"})


def token_sliceable(backend: str | None) -> bool | None:
    """Tell whether a backend's blocks can be cut by token; None where its name does not say."""
    if backend in TOKEN_SLICEABLE:
        return True
    return False if backend in PACKED else None
