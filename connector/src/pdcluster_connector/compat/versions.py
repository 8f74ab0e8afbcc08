"""The versions of vLLM and NIXL that the connector works with.

The launcher compares the installed versions with them, and admission the tags of images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Release = tuple[int, int]

# From (inclusive) and below (exclusive).
SUPPORTED: Final[Mapping[str, tuple[Release, Release]]] = {
    "vllm": ((0, 32), (0, 34)),
    "nixl": ((1, 5), (2, 0)),
}
# In an engine's environment, "1" lets it start with any version.
ANY_VERSION: Final = "PDCLUSTER_ANY_VERSION"


def supported(name: str, release: Release) -> bool:
    """Whether a release (major, minor) of ``vllm`` or ``nixl`` is in the range."""
    low, high = SUPPORTED[name]
    return low <= release < high


def text_of(release: Release) -> str:
    """Return ``0.32`` for (0, 32)."""
    return f"{release[0]}.{release[1]}"
