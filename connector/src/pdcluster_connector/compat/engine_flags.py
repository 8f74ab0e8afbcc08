"""Flags of ``vllm serve`` with which the connector does not run: one list for all who refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Flag -> why, as the end of a sentence that begins with the flag.
REFUSED_FLAGS: Final[Mapping[str, str]] = {
    "--enable-sleep-mode": (
        "unmaps the KV cache whose memory is registered with NIXL, and peers would read other "
        "pages after waking up"
    ),
    "--enable-cumem-allocator": (
        "puts the KV cache into memory of CUDA's virtual memory management, which UCX cannot "
        "share over NVLink: KV would go over TCP without a word"
    ),
}
