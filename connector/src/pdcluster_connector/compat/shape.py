"""What two engines must know of each other to decide whether KV can be exchanged.

An :class:`EngineShape` comes from one of three places: a PDCluster spec (many fields
unknown, ``None``), a spec with the model's config, or a handshake (all fields known).
The rules in :mod:`pdcluster_connector.compat.rules` read nothing else, so admission and
handshake cannot disagree about the same facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LayerKind(StrEnum):
    """How a layer keeps its KV."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    MLA = "mla"
    MAMBA = "mamba"
    OTHER = "other"


class Memory(StrEnum):
    """NIXL memory type of a region."""

    DRAM = "DRAM"
    VRAM = "VRAM"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's KV, over all ranks of the engine.

    Attributes:
        name: vLLM's layer name, e.g. ``model.layers.0.self_attn.attn``.
        kind: how the layer keeps its KV.
        group: KV cache group index in its engine.
        kv_heads: KV heads of the model (before tensor parallelism).
        token_bytes: bytes of one token of one head (K and V together).
        window: sliding window in tokens; None for full attention.
    """

    name: str
    kind: LayerKind
    group: int
    kv_heads: int
    token_bytes: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class EngineShape:
    """One engine, as far as KV exchange is concerned. None means unknown.

    Attributes:
        model: digest of the model's config and weights sample; equal digests mean equal KV.
        kv_dtype: element type of the KV cache, e.g. ``float32``, ``fp8_e4m3``.
        block_size: tokens in a logical block of the scheduler.
        kernel_blocks_per_block: kernel blocks that one logical block is expanded to.
        prefix_caching: whether automatic prefix caching is on.
        tensor, pipeline, data, context: parallel sizes.
        memory: where KV lives.
        token_sliceable: whether a block's interior can be cut by token.
        packing: identifies an opaque interior's byte order (host instruction set, backend).
        layers: all layers of the model that have KV, over all pipeline ranks.
    """

    model: str | None = None
    kv_dtype: str | None = None
    block_size: int | None = None
    kernel_blocks_per_block: int | None = None
    prefix_caching: bool | None = None
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    memory: Memory | None = None
    token_sliceable: bool | None = None
    packing: str | None = None
    layers: tuple[LayerShape, ...] | None = None
