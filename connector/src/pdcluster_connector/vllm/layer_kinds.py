"""What kind of layer a KV cache spec of vLLM describes, and which of its heads this rank holds."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from pdcluster_connector.compat.shape import LayerKind, PartShape
from pdcluster_connector.plan.topology import head_interval


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


def heads_of(
    spec: Any, kind: LayerKind, vllm_config: Any, rank: int
) -> tuple[int, int, int] | None:
    """(heads of the layer, first head here, one past the last here); None if not known.

    vLLM gives rank r the heads from ``r * total // tensor`` on. If there are more ranks than heads,
    it replicates heads. MLA's latent counts as one head that every rank holds.
    """
    tensor = vllm_config.parallel_config.tensor_parallel_size
    local = getattr(spec, "num_kv_heads", None)
    if kind is LayerKind.MLA:
        return (1, 0, 1) if local == 1 else None
    if kind is LayerKind.MAMBA or local is None:
        return None
    total = vllm_config.model_config.get_total_num_kv_heads()
    if local == max(1, total // tensor) and (total % tensor == 0 or tensor % total == 0):
        return total, *head_interval(total, tensor, rank)
    if local > 1 or tensor == 1:  # a layer with head counts of its own, split evenly
        return local * tensor, rank * local, (rank + 1) * local
    return None


def token_bytes(spec: Any, parts: tuple[PartShape, ...]) -> int:
    """Return the bytes of one token of one head, or of the whole state in ``parts``."""
    if parts:
        return sum(part.heads * part.head_bytes for part in parts)
    return int(getattr(spec, "state_content_size_bytes", 0))
