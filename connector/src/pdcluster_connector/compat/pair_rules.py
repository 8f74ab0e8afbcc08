"""Rules that compare a prefill engine with a decode engine.

Where a field is None on either side, a rule cannot decide.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from pdcluster_connector.compat.findings import Clash, PairTest, Rule, Verdict, counted, show
from pdcluster_connector.compat.shape import EngineShape, GroupShape, LayerKind, LayerShape
from pdcluster_connector.compat.supported import WHOLE


def equal(field: str, noun: str) -> PairTest:
    """Return a test that both engines have the same value in ``field``."""

    def test(prefill: EngineShape, decode: EngineShape) -> Clash | None:
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours is None or theirs is None:
            return Clash(field, ours, theirs, verdict=Verdict.UNKNOWN)
        if ours == theirs:
            return None
        message = f"{noun} differs: prefill {show(ours)}, decode {show(theirs)}"
        return Clash(field, ours, theirs, message)

    return test


def _models(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    clash = equal("model", "the model's digest")(prefill, decode)
    # An engine of version 0.1.0 does not state its draft model, which is then not compared.
    if clash is None and prefill.draft is not None and decode.draft is not None:
        clash = equal("draft", "the draft model")(prefill, decode)
    return clash


def _layer_text(layer: LayerShape) -> str:
    window = "" if layer.window is None else f", window {layer.window}"
    parts = "".join(
        f", {p.name}: {counted(p.heads, 'head')} of {p.head_bytes} bytes" for p in layer.parts
    )
    return (
        f"{layer.name}: {layer.kind.value}, {layer.kv_heads} KV heads, "
        f"{layer.token_bytes} bytes a token and head{window}{parts}"
    )


def _compared(layer: LayerShape) -> LayerShape:
    """Return the layer without the fields that may differ or that have a rule of their own."""
    parts = tuple(replace(part, dtype="") for part in layer.parts)
    return replace(layer, group=0, dtype="", scales="", parts=parts, whole="")


def _dtypes(layer: LayerShape, shape: EngineShape) -> dict[str, str | None]:
    return {part.name: part.dtype for part in layer.parts} or {"": layer.dtype or shape.kv_dtype}


def _layer_dtypes(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    for name, have, want in _both(prefill, decode):
        theirs = _dtypes(want, decode)
        for part, dtype in _dtypes(have, prefill).items():
            other = theirs.get(part)
            if dtype is not None and other is not None and dtype != other:
                where = " ".join(filter(None, (name, part)))
                message = f"the dtype of layer {where} differs: prefill {dtype}, decode {other}"
                return Clash("layers", dtype, other, message)
    return None


def _layer_scales(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    for name, have, want in _both(prefill, decode):
        if have.scales != want.scales:
            ours, theirs = (show(layer.scales) or "none" for layer in (have, want))
            message = f"the KV scales of layer {name} differ: prefill {ours}, decode {theirs}"
            return Clash("layers", ours, theirs, message)
    return None


def _both(
    prefill: EngineShape, decode: EngineShape
) -> Iterator[tuple[str, LayerShape, LayerShape]]:
    theirs = {layer.name: layer for layer in decode.layers or ()}
    for layer in prefill.layers or ():
        if layer.name in theirs:
            yield layer.name, layer, theirs[layer.name]


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
        if _compared(have) != _compared(want):
            message = f"layer {name} differs: prefill {_layer_text(have)}, decode "
            message += _layer_text(want)
            return Clash("layers", _layer_text(have), _layer_text(want), message)
    return None


# Blocks: their sizes, kernel blocks, and the order of bytes inside of a block. At most one of the
# first two rules refuses a pair: the one that names the cause.

GRID = {
    "block_size": "block size in tokens",
    "kernel_blocks_per_block": "number of kernel blocks in a logical block",
}


def _block_difference(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    """Return the first known difference of the block grids, or None."""
    groups = [(f" of {name}", *both) for name, *both in _shared_groups(prefill, decode)]
    for where, have, want in [("", prefill, decode), *groups]:
        for field, noun in GRID.items():
            ours, theirs = getattr(have, field), getattr(want, field)
            if None not in (ours, theirs) and ours != theirs:
                message = f"{noun}{where} differs (prefill {ours}, decode {theirs})"
                return Clash(field, ours, theirs, message)
    return None


def _shared_groups(
    prefill: EngineShape, decode: EngineShape
) -> list[tuple[str, GroupShape, GroupShape]]:
    """Return, for attention layers that both engines have, the layer and both sides' groups."""
    ours, theirs = _groups_by_layer(prefill), _groups_by_layer(decode)
    return [(name, ours[name], theirs[name]) for name in ours if name in theirs]


def _groups_by_layer(shape: EngineShape) -> dict[str, GroupShape]:
    groups = shape.groups or ()
    return {
        layer.name: groups[layer.group]
        for layer in shape.layers or ()
        if layer.kind is not LayerKind.MAMBA and layer.group < len(groups)
    }


def _cut_blocks(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    """Return the first difference of the block grids, if the kernel blocks differ too.

    Blocks must then be cut inside. A ratio that is not known counts as 1.
    """
    clash = _block_difference(prefill, decode)
    if clash is None:
        return None
    if shared := _shared_groups(prefill, decode):
        alike = all(have.kernel_tokens == want.kernel_tokens for _, have, want in shared)
    else:
        ours, theirs = (
            None
            if shape.block_size is None
            else shape.block_size // (shape.kernel_blocks_per_block or 1)
            for shape in (prefill, decode)
        )
        alike = ours is not None and ours == theirs
    return None if alike else clash


def _hybrid(prefill: EngineShape, decode: EngineShape) -> bool | None:
    known = {prefill.has_mamba, decode.has_mamba}
    return True if True in known else None if None in known else False


def _unknown_grid(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    if prefill.groups is not None and decode.groups is not None:
        return None
    found = (equal(field, noun)(prefill, decode) for field, noun in GRID.items())
    return next((one for one in found if one and one.verdict is Verdict.UNKNOWN), None)


def _opaque_size(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    clash = _cut_blocks(prefill, decode)
    if clash is None or False not in (prefill.token_sliceable, decode.token_sliceable):
        return None
    message = f"{clash.message} and the inside of a block cannot be cut by token"
    return Clash(clash.field, clash.prefill, clash.decode, message)


def _prefix_caching_heterogeneous(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    clash = _block_difference(prefill, decode)
    if clash is None:
        return _unknown_grid(prefill, decode)
    # Unknown counts as on: it is vLLM's default.
    if prefill.prefix_caching is decode.prefix_caching is False or _opaque_size(prefill, decode):
        return None
    hybrid = _hybrid(prefill, decode)
    sliceable = prefill.token_sliceable is True and decode.token_sliceable is True
    caching = f"prefill {show(prefill.prefix_caching)}, decode {show(decode.prefix_caching)}"
    if hybrid is False and (sliceable or _cut_blocks(prefill, decode) is None):
        return None
    why = {
        True: "the model has Mamba layers",
        False: "nothing says that a block can be cut by token",
        None: "whether the model has Mamba layers is not known",
    }[hybrid]
    message = f"{clash.message} while prefix caching is possible ({caching}), and {why}"
    return Clash(clash.field, clash.prefill, clash.decode, message)


def _interior(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    clash = equal("token_sliceable", "the inside of a block")(prefill, decode)
    if clash is None or clash.verdict is Verdict.UNKNOWN:
        return clash
    words: dict[object, str] = {True: "ordered by token", False: "packed"}
    ours, theirs = words[prefill.token_sliceable], words[decode.token_sliceable]
    message = f"the inside of a block is {ours} on prefill and {theirs} on decode"
    return Clash(clash.field, clash.prefill, clash.decode, message)


def _packing(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    # A packing id says something only about interiors that are packed on both sides.
    if prefill.token_sliceable is not False or decode.token_sliceable is not False:
        return None
    return equal("packing", "the byte order inside a packed block")(prefill, decode)


def _facts(layer: LayerShape, shape: EngineShape) -> dict[str, str]:
    """Return what decides the bytes of a block that is moved whole, by name."""
    held = str(max(1, layer.kv_heads // shape.tensor))
    pairs = (fact.partition("=")[::2] for fact in layer.whole.split(",") if fact)
    return {_HEADS: held, **dict(pairs)}


def _whole(prefill: EngineShape, decode: EngineShape) -> Clash | None:
    pairs = [(name, a, b) for name, a, b in _both(prefill, decode) if a.whole or b.whole]
    if not pairs and not {prefill.kv_dtype, decode.kv_dtype} & WHOLE.keys():
        return None
    for name, have, want in pairs:
        ours, theirs = _facts(have, prefill), _facts(want, decode)
        for fact in {**ours, **theirs}:
            mine, other = ours.get(fact, "absent"), theirs.get(fact, "absent")
            if mine != other:
                message = f"{fact} of layer {name} differs: prefill {mine}, decode {other}"
                field = "tensor" if fact == _HEADS else "layers"
                return Clash(field, mine, other, f"{message}; {_AS_BYTES}")
    clash = equal("backend", "the attention backend")(prefill, decode)
    if clash is None or clash.verdict is Verdict.UNKNOWN:
        clash = None if _opaque_size(prefill, decode) else _block_difference(prefill, decode)
    if clash is None:
        return None
    return Clash(clash.field, clash.prefill, clash.decode, f"{clash.message}; {_AS_BYTES}")


_HEADS = "number of KV heads in a rank"
_AS_BYTES = "blocks that hold their own scales are moved as bytes"

IDENTITY_RULES: tuple[Rule, ...] = (
    Rule(
        id="ModelMismatch",
        description=(
            "Both engines must serve the same model: KV of another model is noise. The same holds "
            "for a draft model with KV of its own (EAGLE, MTP, draft_model). With KV of another "
            "one, tokens stay right, but nearly every draft is rejected. An engine of version "
            "0.1.0 does not state its draft model, which is then not compared."
        ),
        remedy=(
            "Serve the same model, revision and weights on both engines, with the same draft model "
            "in --speculative-config. Models with LongRoPE and Llama 4 also need the same "
            "engine.maxModelLen."
        ),
        source="definition",
        test=_models,
    ),
    Rule(
        id="KVDtypeMismatch",
        description="Bytes are copied unchanged, so both caches need the same element type.",
        remedy="Set the same engine.kvCacheDtype (and the same --dtype) on both roles.",
        source="definition",
        test=equal("kv_dtype", "the KV cache's dtype"),
    ),
    Rule(
        id="KVDtypeMismatch/layer",
        description="Each layer (and each state of a Mamba layer) needs one dtype on both sides.",
        remedy="Set the same dtypes on both roles, also those of Mamba's caches.",
        source="definition",
        test=_layer_dtypes,
    ),
    Rule(
        id="KVScalesMismatch",
        description=(
            "Both engines must use the same scales for quantized KV. The bytes are copied "
            "unchanged, so other scales would turn them into other numbers."
        ),
        remedy="Serve the same checkpoint, with the same --quantization, on both engines.",
        source="vLLM 0.32 model_executor/layers/quantization/kv_cache.py (_k_scale, _v_scale)",
        test=_layer_scales,
    ),
)

PAIR_RULES: tuple[Rule, ...] = (
    Rule(
        id="LayerMismatch",
        description=(
            "Both engines must have the same layers with KV, matched by name, each with the same "
            "kind, KV heads and bytes per token. This rule also refuses a speculative draft model "
            "that only one engine has."
        ),
        remedy=(
            "Serve the same model with the same speculative decoding on both engines. If only the "
            "numbers of KV heads differ, use the same tensor parallel size on both: the model does "
            "not say how many KV heads this layer has."
        ),
        source="definition",
        test=_layers,
    ),
    Rule(
        id="MemoryTypeUnsupported",
        description="Both engines must keep KV in the same type of memory (DRAM or VRAM).",
        remedy="Run both engines on GPUs, or both on CPUs.",
        source="scope of this version",
        test=equal("memory", "the memory type"),
    ),
)

BLOCK_RULES: tuple[Rule, ...] = (
    Rule(
        id="BlockInteriorOpaque/whole",
        description=(
            "Some quantized caches keep their scales in the block: fp8_ds_mla, nvfp4, types with a "
            "scale for each token and head, and the cache of DeepSeek V3.2's indexer. Such a block "
            "is moved as bytes. So everything that decides where its bytes lie must be equal on "
            "both sides: attention backend, element type, block size, KV heads in a rank, order of "
            "heads and tokens, version of vLLM, and kind of device."
        ),
        remedy=(
            "Set the same engine.attentionBackend, engine.blockSize and parallelism.tensor on both "
            "roles, and run the same image on the same kind of device."
        ),
        source="vLLM 0.32 v1/attention/backends (customize_spec, mla/flashmla_sparse.py)",
        test=_whole,
    ),
    Rule(
        id="BlockInteriorOpaque/size",
        description=(
            "Kernel block sizes differ and at least one backend packs the inside of a block "
            "(CPU_ATTN keeps all K tokens, then all V tokens), so only whole blocks can be moved."
        ),
        remedy="Set the same engine.blockSize on both roles.",
        source="vLLM 0.32 platforms/cpu.py (CPU_ATTN cache layout)",
        test=_opaque_size,
    ),
    Rule(
        id="PrefixCachingHeterogeneousBlocks",
        description=(
            "Block sizes (or the numbers of kernel blocks in a block) differ, the model has Mamba "
            "layers, and prefix caching is on, or may be on, in either engine. A prefix hit ends "
            "at the end of one engine's block, and the other engine keeps no Mamba state for that "
            "token. Such a pair is also refused while it is not known whether the model has Mamba "
            "layers, or whether its blocks can be cut by token: a wrong guess would give wrong "
            "tokens without an error. A spec does not say what layers a model has, so admission "
            "always refuses such a pair. The handshake knows the layers. It accepts models "
            "without Mamba layers whose blocks can be cut by token on both sides."
        ),
        remedy=(
            "Set the same engine.blockSize on both roles, or engine.prefixCaching: Disabled on "
            "both roles."
        ),
        source="vLLM PR #42097; reproduced with stock NIXL on CPU: block 32 to 128, 0 of 4 right",
        test=_prefix_caching_heterogeneous,
    ),
    Rule(
        id="BlockInteriorOpaque/interior",
        description=(
            "One engine packs the inside of a block and the other orders it by token. The same "
            "KV then has different bytes in the two engines."
        ),
        remedy="Set the same engine.attentionBackend on both roles.",
        source="vLLM 0.32 platforms/cpu.py (CPU_ATTN cache layout)",
        test=_interior,
    ),
    Rule(
        id="BlockInteriorOpaque/packing",
        description=(
            "Both engines pack the inside of a block, in different byte orders. CPU_ATTN chooses "
            "its order by the CPU's instruction set."
        ),
        remedy="Run both engines on the same kind of CPU with the same attention backend.",
        source="vLLM 0.32 attention/backends/cpu_attn.py (instruction set choice)",
        test=_packing,
    ),
)
