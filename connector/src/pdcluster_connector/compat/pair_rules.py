"""Rules that compare a prefill engine with a decode engine.

Where a field is None on either side, a rule cannot decide.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from pdcluster_connector.compat.counted import counted
from pdcluster_connector.compat.findings import Clash, PairTest, Rule, Verdict, show
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape, LayerShape


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
    return replace(layer, group=0, dtype="", scales="", parts=parts)


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


IDENTITY_RULES: tuple[Rule, ...] = (
    Rule(
        id="ModelMismatch",
        reason=Reason.MODEL_MISMATCH,
        description="Both engines must serve the same model: KV of another model is noise.",
        remedy=(
            "Serve the same model, revision and weights on both engines. Models with LongRoPE and "
            "Llama 4 also need the same engine.maxModelLen."
        ),
        source="definition",
        test=equal("model", "the model's digest"),
    ),
    Rule(
        id="KVDtypeMismatch",
        reason=Reason.KV_DTYPE_MISMATCH,
        description="Bytes are copied unchanged, so both caches need the same element type.",
        remedy="Set the same engine.kvCacheDtype (and the same --dtype) on both roles.",
        source="definition",
        test=equal("kv_dtype", "the KV cache's dtype"),
    ),
    Rule(
        id="KVDtypeMismatch/layer",
        reason=Reason.KV_DTYPE_MISMATCH,
        description="Each layer (and each state of a Mamba layer) needs one dtype on both sides.",
        remedy="Set the same dtypes on both roles, also those of Mamba's caches.",
        source="definition",
        test=_layer_dtypes,
    ),
    Rule(
        id="KVScalesMismatch",
        reason=Reason.KV_SCALES_MISMATCH,
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
        reason=Reason.LAYER_MISMATCH,
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
        reason=Reason.MEMORY_TYPE_UNSUPPORTED,
        description="Both engines must keep KV in the same type of memory (DRAM or VRAM).",
        remedy="Run both engines on GPUs, or both on CPUs.",
        source="scope of this version",
        test=equal("memory", "the memory type"),
    ),
)
