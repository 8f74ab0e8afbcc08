"""Flags of ``vllm serve`` that the connector does not work with.

Admission and the launcher refuse them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Flag -> why, as the end of a sentence that begins with the flag.
REFUSED_FLAGS: Final[Mapping[str, str]] = {
    "--enable-sleep-mode": (
        "unmaps the KV cache while its memory is registered with NIXL, and peers would read wrong "
        "pages after a wake-up"
    ),
    "--enable-cumem-allocator": (
        "puts the KV cache into memory of CUDA's virtual memory management, which UCX cannot "
        "share over NVLink, and KV would go over TCP without a warning"
    ),
}
