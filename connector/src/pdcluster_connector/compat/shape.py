"""The shape of an engine: the facts that decide whether two engines can exchange KV.

The same types travel in a handshake. A layer, a part and a group are sent as arrays, because there
are many of them: a new field goes to the end. The bounds of the fields are checked while a message
is decoded, not when a value is made here. So a peer cannot send a field that is too large.

An :class:`EngineShape` comes from one of three places: a PDCluster spec (many fields
unknown, ``None``), a spec with the model's config, or a handshake (all fields known).
The rules read nothing else, so admission and handshake cannot disagree about the
same facts.

For a handshake, the engine reads vLLM's ``KVCacheConfig`` and tensors. It states one
:class:`GroupShape` for each KV cache group, in vLLM's order, and one :class:`LayerShape` for each
layer. Sizes are those of the whole model, before tensor parallelism. The regions say what one rank
holds (``plan/geometry.py``).
"""

from enum import StrEnum
from typing import Annotated, Self

from msgspec import Meta, Struct

Identifier = Annotated[str, Meta(min_length=1, max_length=512)]
Name = Annotated[str, Meta(max_length=64)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
ParallelSize = Annotated[int, Meta(ge=1, le=4096)]
GroupNumber = Annotated[int, Meta(ge=0, le=255)]
HeadNumber = Annotated[int, Meta(ge=0, le=2**20)]
DeviceNumber = Annotated[int, Meta(ge=0, le=4096)]
Address = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Bytes = Annotated[int, Meta(ge=0, le=2**48)]


class LayerKind(StrEnum):
    """How a layer keeps its KV."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    MLA = "mla"
    MAMBA = "mamba"
    OTHER = "other"

    @classmethod
    def _missing_(cls, _: object) -> Self:
        """Return OTHER for the kind of a newer peer; a rule then refuses the layer by name."""
        return cls.OTHER


class Memory(StrEnum):
    """NIXL memory type of a region."""

    DRAM = "DRAM"
    VRAM = "VRAM"


class PartShape(Struct, frozen=True, array_like=True):
    """One of several arrays that a layer's KV consists of, over all ranks of the engine.

    Attributes:
        name: equal on both engines: ``conv.x``, ``conv.b``, ``conv.c``, ``ssm``, or ``conv.q``,
            ``conv.k``, ``conv.v``, ``ssm``. A state that cannot be cut by head is one part,
            ``state0.DS``, with one head for each rank, so engines of different tensor sizes are
            refused.
        heads: what tensor parallelism divides, or replicates where there are more ranks:
            Mamba heads for ``conv.x`` and ``ssm``, B/C groups for ``conv.b`` and ``conv.c``.
        head_bytes: bytes of one head's state (all of its channels, rows and elements).
        dtype: element type.
    """

    name: Identifier
    heads: Count
    head_bytes: Count
    dtype: Identifier


class LayerShape(Struct, frozen=True, array_like=True):
    """One layer's KV, over all ranks of the engine.

    Attributes:
        name: vLLM's layer name, e.g. ``model.layers.0.self_attn.attn``.
        kind: how the layer keeps its KV.
        group: KV cache group index in its engine; the two engines may number differently.
        kv_heads: KV heads of the model (before tensor parallelism); 1 for MLA, whose latent
            every rank holds; 1 for Mamba, whose ``parts`` have heads of their own.
        token_bytes: bytes of one token of one head (K and V together); for Mamba the bytes of
            one state over all parts.
        window: sliding window in tokens; None for full attention.
        dtype: element type of this layer's cache; empty: the engine's ``kv_dtype``.
        scales: the constant scales of a quantized layer as text, e.g. ``k=0.25,v=0.5``. Equal
            texts mean equal scales. Empty for a layer without scales; None if the layer has
            several scales, or they are not known.
        parts: a Mamba layer's states, in a fixed order; empty for one array.
        whole: what decides where bytes lie in a block that holds its own scales, and is moved as
            bytes, as ``backend=FLASHINFER,vllm=0.32.0``. Empty if heads and tokens describe the
            block. An older engine does not state it, and its layers of such types are refused.
    """

    name: Identifier
    kind: LayerKind
    group: GroupNumber
    kv_heads: Count
    token_bytes: Bytes
    window: Count | None = None
    dtype: Name = ""
    scales: Annotated[str, Meta(max_length=512)] | None = ""
    parts: Annotated[tuple[PartShape, ...], Meta(max_length=16)] = ()
    whole: Annotated[str, Meta(max_length=512)] = ""


class GroupShape(Struct, frozen=True, array_like=True):
    """One KV cache group of one engine: layers whose blocks a request holds in one list.

    Attributes:
        kind: of its layers.
        block_size: tokens in a logical block, as the scheduler counts this group's blocks.
        kernel_blocks_per_block: kernel blocks in a logical block on this engine; 1 for Mamba.
        window: sliding window in tokens; None without.
    """

    kind: LayerKind
    block_size: Count
    kernel_blocks_per_block: Count = 1
    window: Count | None = None

    @property
    def kernel_tokens(self) -> int:
        """Return the tokens of a kernel block; a Mamba slot counts as one token."""
        if self.kind is LayerKind.MAMBA:
            return 1
        return self.block_size // self.kernel_blocks_per_block


class EngineShape(Struct, frozen=True):
    """One engine, as far as KV exchange is concerned. None means unknown.

    Attributes:
        model: digest of the model's config and weights sample; equal digests mean equal KV.
        kv_dtype: element type of the attention KV cache, e.g. ``float32``, ``fp8_e4m3``.
        block_size: tokens in a logical block, ``--block-size``; with several groups the
            attention groups' own sizes are in ``groups``.
        kernel_blocks_per_block: kernel blocks that one logical block is expanded to, the same
            in all attention groups; None where they differ (then ``groups`` decides).
        prefix_caching: whether automatic prefix caching is on.
        tensor, pipeline, context: parallel sizes.
        data: data-parallel size; each rank holds KV of its own requests, for itself.
        nodes: machines (pods) that the engine spans.
        memory: where KV lives.
        token_sliceable: whether the inside of a block can be cut by token, in all layers.
        packing: names the byte order of blocks that cannot be cut by token (backend, CPU).
        layers: all layers of the model that have KV, over all pipeline ranks.
        groups: the KV cache groups; ``LayerShape.group`` and ``Region.group`` index them.
        layout: vLLM's name of the physical order (``LBHNC``, ``LBNHC``, …), for messages only:
            plans use the regions' strides.
        hybrid: whether the model has Mamba layers, where ``layers`` is not known.
        draft: digest of the draft model of speculative decoding, if it has KV; None also from an
            engine of version 0.1.0, which does not state it.
        asked_layout: the layout that the engine was told to ask vLLM for; None for none.
        backend: vLLM's name of the attention backend, in a spec; engines do not state it.
    """

    model: Identifier | None = None
    kv_dtype: Identifier | None = None
    block_size: Count | None = None
    kernel_blocks_per_block: Count | None = None
    prefix_caching: bool | None = None
    tensor: ParallelSize = 1
    pipeline: ParallelSize = 1
    data: ParallelSize = 1
    context: ParallelSize = 1
    nodes: ParallelSize = 1
    memory: Memory | None = None
    token_sliceable: bool | None = None
    packing: Identifier | None = None
    layers: Annotated[tuple[LayerShape, ...], Meta(max_length=8192)] | None = None
    groups: Annotated[tuple[GroupShape, ...], Meta(max_length=256)] | None = None
    layout: Identifier | None = None
    hybrid: bool | None = None
    draft: Identifier | None = None
    asked_layout: Identifier | None = None
    backend: Identifier | None = None

    @property
    def has_mamba(self) -> bool | None:
        """Return whether any layer is a Mamba layer; None if nothing says so."""
        if self.layers is not None:
            return any(layer.kind is LayerKind.MAMBA for layer in self.layers)
        return self.hybrid
