"""What a manifest does not say about the engines, in words that its author knows.

A rule that compares two engines needs values that a manifest may leave out. Such a rule is
checked when the engines connect to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

NAMES: Mapping[str, tuple[str, str]] = {
    "kv_dtype": ("the data type of the KV cache", "engine.kvCacheDtype"),
    "block_size": ("the block size of the KV cache", "engine.blockSize"),
    "token_sliceable": ("the order of the values in a block", "engine.attentionBackend"),
    "layers": ("the model's layers", ""),
    "kernel_blocks_per_block": ("the block size of the attention kernel", ""),
    "packing": ("how vLLM packs a block on this CPU", ""),
    "memory": ("the kind of memory of the KV cache", "transfer.device"),
}
"""Field of ``EngineShape`` -> what it is, and the field of a spec that says it; empty for none."""


def unchecked_message(fields: Iterable[str]) -> str:
    """Return what is not checked yet, when it will be, and what checks it earlier.

    Args:
        fields: names of ``EngineShape`` fields, from ``Findings.unchecked``.
    """
    named = [NAMES.get(field, (field, "")) for field in fields]
    if not named:
        return ""
    parts = ", ".join(f"{words} ({setting})" if setting else words for words, setting in named)
    when = "The engines check this when they connect to each other."
    sooner = " Set a field in brackets to have it checked now." if any(s for _, s in named) else ""
    return f"Not checked yet: {parts}. {when}{sooner}"
