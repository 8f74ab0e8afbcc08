"""What kind of layer a KV cache spec of vLLM describes."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from pdcluster_connector.compat.shape import LayerKind, PartShape


def kind_of(spec: Any) -> LayerKind:
    """Return a layer's kind; OTHER if its rules are not known here."""
    # Subclasses (sinks, recycled windows, …) add their own rules to the same pages.
    plain = getattr(spec, "state_content_bytes", None) is None and spec.tokens_per_state in {1, -1}
    if not plain:
        return LayerKind.OTHER
    if type(spec) is MambaSpec and not spec.tp_replicated:
        return LayerKind.MAMBA
    if type(spec) is MLAAttentionSpec and spec.model_version is None:
        return LayerKind.MLA
    if type(spec) is SlidingWindowSpec and not spec.extra_retained_tokens:
        return LayerKind.SLIDING_WINDOW
    if type(spec) is FullAttentionSpec and spec.num_head_slots is None:
        return LayerKind.FULL_ATTENTION
    return LayerKind.OTHER


def token_bytes(spec: Any, parts: tuple[PartShape, ...]) -> int:
    """Return the bytes of one token of one head, or of the whole state in ``parts``."""
    if parts:
        return sum(part.heads * part.head_bytes for part in parts)
    return int(getattr(spec, "state_content_size_bytes", 0))
