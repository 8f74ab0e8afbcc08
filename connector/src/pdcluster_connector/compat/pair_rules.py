"""Rules that compare a prefill engine with a decode engine.

A field that is None on either side leaves a rule undecided. One exception, by design:
block sizes that are known to differ are refused whatever else is unknown, because a wrong
guess there gives wrong tokens without an error.
"""

from __future__ import annotations

from pdcluster_connector.compat.findings import Clash, PairTest, Rule, Verdict, show
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape, LayerShape


def _equal(field: str, noun: str) -> PairTest:
    def test(prefill: EngineShape, decode: EngineShape) -> Clash | None:
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours is None or theirs is None:
            return Clash(field, ours, theirs, verdict=Verdict.UNKNOWN)
        if ours == theirs:
            return None
        message = f"{noun} differs: prefill {show(ours)}, decode {show(theirs)}"
        return Clash(field, ours, theirs, message)

    return test


def _block_difference(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    """Return the first known difference of the block grids, or None."""
    names = {
        "block_size": "block size in tokens",
        "kernel_blocks_per_block": "number of kernel blocks in a logical block",
    }
    for field, noun in names.items():
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours is not None and theirs is not None and ours != theirs:
            message = f"{noun} differs (prefill {ours}, decode {theirs})"
            return Clash(field, ours, theirs, message)
    return None


def _may_cache_prefixes(prefill: EngineShape, decode: EngineShape) -> bool:
    # Unknown counts as on: it is vLLM's default.
    return prefill.prefix_caching is not False or decode.prefix_caching is not False


def _known_opaque(prefill: EngineShape, decode: EngineShape) -> bool:
    return prefill.token_sliceable is False or decode.token_sliceable is False


def _prefix_caching_heterogeneous(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    clash = _block_difference(prefill, decode)
    if clash is None or not _may_cache_prefixes(prefill, decode):
        return None
    caching = f"prefill {show(prefill.prefix_caching)}, decode {show(decode.prefix_caching)}"
    message = f"{clash.message} while prefix caching is possible ({caching}; vLLM's default is on)"
    return Clash(clash.field, clash.prefill, clash.decode, message)


def _block_interior_opaque(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    clash = _block_difference(prefill, decode)
    if clash is None or _may_cache_prefixes(prefill, decode) or not _known_opaque(prefill, decode):
        return None
    message = f"{clash.message} and the inside of a block cannot be cut by token"
    return Clash(clash.field, clash.prefill, clash.decode, message)


def _block_size(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    clash = _block_difference(prefill, decode)
    if clash is None:
        for field in ("block_size", "kernel_blocks_per_block"):
            ours, theirs = getattr(prefill, field), getattr(decode, field)
            if ours is None or theirs is None:
                return Clash(field, ours, theirs, verdict=Verdict.UNKNOWN)
        return None
    if _may_cache_prefixes(prefill, decode) or _known_opaque(prefill, decode):
        return None
    return Clash(clash.field, clash.prefill, clash.decode, clash.message)


def _interior(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    field = "token_sliceable"
    ours, theirs = prefill.token_sliceable, decode.token_sliceable
    if ours is None or theirs is None:
        return Clash(field, ours, theirs, verdict=Verdict.UNKNOWN)
    if ours == theirs:
        return None
    words = {True: "ordered by token", False: "packed"}
    message = f"the inside of a block is {words[ours]} on prefill and {words[theirs]} on decode"
    return Clash(field, ours, theirs, message)


def _packing(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    # A packing id says something only about interiors that are packed on both sides.
    if prefill.token_sliceable is not False or decode.token_sliceable is not False:
        return None
    return _equal("packing", "the byte order inside a packed block")(prefill, decode)


def _layer_text(layer: LayerShape) -> str:
    window = "" if layer.window is None else f", window {layer.window}"
    return (
        f"{layer.name}: {layer.kind.value}, group {layer.group}, {layer.kv_heads} KV heads, "
        f"{layer.token_bytes} bytes a token and head{window}"
    )


def _layers(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    if prefill.layers is None or decode.layers is None:
        counts = [
            None if shape.layers is None else f"{len(shape.layers)} layers"
            for shape in (prefill, decode)
        ]
        return Clash("layers", counts[0], counts[1], verdict=Verdict.UNKNOWN)
    ours = {layer.name: layer for layer in prefill.layers}
    theirs = {layer.name: layer for layer in decode.layers}
    for side, layers, names in (
        ("prefill", prefill.layers, ours),
        ("decode", decode.layers, theirs),
    ):
        if len(names) != len(layers):
            message = f"{side} names {len(layers)} layers but only {len(names)} different ones"
            return Clash("layers", len(prefill.layers), len(decode.layers), message)
    for name in [*theirs, *ours]:
        have, want = ours.get(name), theirs.get(name)
        if have is None or want is None:
            side = "prefill" if have is None else "decode"
            message = f"layer {name} is absent on {side} ({len(ours)} and {len(theirs)} layers)"
            shown = ["absent" if layer is None else _layer_text(layer) for layer in (have, want)]
            return Clash("layers", shown[0], shown[1], message)
        if have != want:
            message = f"layer {name} differs: prefill {_layer_text(have)}, decode "
            message += _layer_text(want)
            return Clash("layers", _layer_text(have), _layer_text(want), message)
    return None


IDENTITY_RULES: tuple[Rule, ...] = (
    Rule(
        id="ModelMismatch",
        reason=Reason.MODEL_MISMATCH,
        description="Both engines must serve the same model: KV of another model is noise.",
        remedy="Serve the same model, revision and weights on both engines.",
        source="definition",
        test=_equal("model", "the model's digest"),
    ),
    Rule(
        id="KVDtypeMismatch",
        reason=Reason.KV_DTYPE_MISMATCH,
        description="Bytes are moved as they are, so both caches need the same element type.",
        remedy="Set the same engine.kvCacheDtype (and the same --dtype) on both roles.",
        source="definition",
        test=_equal("kv_dtype", "the KV cache's dtype"),
    ),
)

PAIR_RULES: tuple[Rule, ...] = (
    Rule(
        id="PrefixCachingHeterogeneousBlocks",
        reason=Reason.PREFIX_CACHING_HETEROGENEOUS_BLOCKS,
        description=(
            "Block sizes (or kernel blocks per logical block) differ while prefix caching is on, "
            "or may be on, on either side. A prefix hit then ends inside a peer's block; where "
            "the layout inside a block is not known to be cut by token, that gives wrong tokens "
            "without an error. This version refuses it whatever the layout."
        ),
        remedy=(
            "Set the same engine.blockSize on both roles; engine.prefixCaching: Disabled alone "
            "does not help in this version."
        ),
        source="vLLM PR #42097; reproduced with stock NIXL on CPU: block 32 to 128, 0 of 4 right",
        test=_prefix_caching_heterogeneous,
    ),
    Rule(
        id="BlockInteriorOpaque/size",
        reason=Reason.BLOCK_INTERIOR_OPAQUE,
        description=(
            "Block sizes differ and at least one backend packs the inside of a block (CPU_ATTN "
            "keeps all K tokens, then all V tokens), so only whole blocks can be moved."
        ),
        remedy="Set the same engine.blockSize on both roles.",
        source="vLLM 0.32 platforms/cpu.py (CPU_ATTN cache layout)",
        test=_block_interior_opaque,
    ),
    Rule(
        id="BlockSizeMismatch",
        reason=Reason.BLOCK_SIZE_MISMATCH,
        description="Different block sizes are not carried by this version.",
        remedy="Set the same engine.blockSize on both roles.",
        source="scope of this version; the plan itself pairs by token position",
        test=_block_size,
    ),
    Rule(
        id="BlockInteriorOpaque/interior",
        reason=Reason.BLOCK_INTERIOR_OPAQUE,
        description=(
            "One engine packs the inside of a block and the other orders it by token: the same "
            "block holds the same KV in another byte order."
        ),
        remedy="Set the same engine.attentionBackend on both roles.",
        source="vLLM 0.32 platforms/cpu.py (CPU_ATTN cache layout)",
        test=_interior,
    ),
    Rule(
        id="BlockInteriorOpaque/packing",
        reason=Reason.BLOCK_INTERIOR_OPAQUE,
        description=(
            "Both engines pack the inside of a block, in different byte orders: CPU_ATTN chooses "
            "its packing by the host's instruction set."
        ),
        remedy="Run both engines on the same kind of CPU with the same attention backend.",
        source="vLLM 0.32 attention/backends/cpu_attn.py (instruction set choice)",
        test=_packing,
    ),
    Rule(
        id="LayerMismatch",
        reason=Reason.LAYER_MISMATCH,
        description=(
            "Both engines must have the same layers with KV, matched by name, each with the same "
            "kind, KV heads and bytes per token. A speculative draft model on one side only "
            "shows here."
        ),
        remedy="Serve the same model with the same speculative decoding on both engines.",
        source="definition",
        test=_layers,
    ),
    Rule(
        id="MemoryTypeUnsupported",
        reason=Reason.MEMORY_TYPE_UNSUPPORTED,
        description="Both engines must keep KV in the same type of memory (DRAM or VRAM).",
        remedy="Use one transfer.device for both roles.",
        source="scope of this version",
        test=_equal("memory", "the memory type"),
    ),
)
