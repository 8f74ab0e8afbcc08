"""Rules that judge one engine by itself: what this connector does not support.

Each test looks at one shape; :func:`alone` turns it into a test of a pair that names the
values of both sides.
"""

from collections.abc import Callable

from pdcluster_connector.compat.findings import Clash, PairTest, Rule, Verdict, counted
from pdcluster_connector.compat.shape import EngineShape, LayerKind, Memory
from pdcluster_connector.compat.supported import (
    BYTES,
    CARRIED_DTYPES,
    LAYOUTS,
    LAYOUTS_OF,
    PLAIN,
    WHOLE,
)

# Looks at one shape: what is wrong with it, as a noun phrase, or None.
Look = Callable[[EngineShape], str | None]


def alone(field: str, look: Look, sentence: str, needs: str = "") -> PairTest:
    """Turn a look at one shape into a test of a pair.

    Args:
        field: the deciding field of EngineShape.
        look: called for each side whose ``needs`` field is known.
        sentence: the end of the message, after the names of the engines at fault.
        needs: the field that may be unknown; empty if the look always decides.
    """

    def test(prefill: EngineShape, decode: EngineShape) -> Clash | None:
        sides = {"prefill": prefill, "decode": decode}
        known = {
            side: shape
            for side, shape in sides.items()
            if not needs or getattr(shape, needs) is not None
        }
        offences = {side: look(shape) for side, shape in known.items()}
        bad = {side: offence for side, offence in offences.items() if offence}
        if bad:
            values = [_value(shape, field) for shape in sides.values()]
            named = " and ".join(f"{side} has {offence}" for side, offence in bad.items())
            return Clash(field, values[0], values[1], f"{named}; {sentence}")
        if len(known) < len(sides):
            values = [_value(shape, needs) for shape in sides.values()]
            return Clash(needs, values[0], values[1], verdict=Verdict.UNKNOWN)
        return None

    return test


def _value(shape: EngineShape, field: str) -> object:
    """Shorten the list of layers to what a line of a table can hold."""
    value = getattr(shape, field)
    if field != "layers" or value is None:
        return value
    kinds = sorted({layer.kind.value for layer in value})
    groups = len({layer.group for layer in value})
    number = counted(len(value), "layer")
    return f"{number} of {counted(groups, 'group')} ({', '.join(kinds)})"


def _data_nodes(shape: EngineShape) -> str | None:
    if shape.data == 1 or shape.data % shape.nodes == 0:
        return None
    return f"data parallel size {shape.data} over {shape.nodes} nodes"


def _quantized(shape: EngineShape) -> str | None:
    dtype = shape.kv_dtype or ""
    if dtype and dtype not in CARRIED_DTYPES | WHOLE.keys() - {BYTES}:
        return f"KV dtype {dtype}"
    if shape.backend and shape.backend not in WHOLE.get(dtype, {shape.backend}):
        return f"KV dtype {dtype} with {shape.backend}"
    if dtype in WHOLE and shape.layers is None and shape.memory is Memory.DRAM:
        return f"KV dtype {dtype} on CPUs"  # in a spec: all of these backends need a GPU
    for layer in shape.layers or ():
        own = layer.dtype or dtype
        known = CARRIED_DTYPES | WHOLE.keys() if layer.whole else CARRIED_DTYPES
        if own and layer.kind is not LayerKind.MAMBA and own not in known:
            return f"KV dtype {own} ({layer.name})"
    return None


def _scales(shape: EngineShape) -> str | None:
    for layer in shape.layers or ():
        dtype = layer.dtype or shape.kv_dtype
        plain = layer.kind is LayerKind.MAMBA or dtype in PLAIN | {BYTES}
        if dtype is not None and not plain and not layer.scales:
            return f"{dtype} KV without one known scale for a layer ({layer.name})"
    return None


def _kinds(shape: EngineShape) -> str | None:
    layers = shape.layers or ()
    found = [layer for layer in layers if layer.kind is LayerKind.OTHER]
    if not found:
        return None
    return f"layers of another kind ({len(found)} of {len(layers)}, first {found[0].name})"


def _heads(shape: EngineShape) -> str | None:
    for layer in shape.layers or ():
        arrays = [(part.heads, f"{layer.name} {part.name}") for part in layer.parts]
        for heads, name in arrays or [(layer.kv_heads, layer.name)]:
            small, large = sorted((heads, shape.tensor))
            if small < 1 or large % small:
                size = f"tensor parallel size {shape.tensor}"
                return f"{heads} heads over {size} ({name})"
    return None


def _order(shape: EngineShape) -> str | None:
    asked, has = shape.asked_layout, LAYOUTS_OF.get(shape.backend or "", LAYOUTS)
    if asked is None or asked == shape.layout:
        return None
    if shape.layout is not None:
        return f"KV in {shape.layout}, not in {asked}"
    if asked in has:
        return None
    return f"{shape.backend}, which has {' and '.join(has) or 'none of the layouts'}, not {asked}"


def _empty(shape: EngineShape) -> str | None:
    return None if shape.layers else "no layer with KV"


SHAPE_RULES: tuple[Rule, ...] = (
    Rule(
        id="ContextParallelUnsupported",
        description=(
            "Context parallelism (decode or prefill) spreads one sequence's tokens over ranks. "
            "vLLM checks this for its own NIXL connector only, so this rule has to."
        ),
        remedy="Run both engines without decode and prefill context parallelism.",
        source="vLLM 0.32 config/vllm.py (DCP checks)",
        test=alone(
            "context",
            lambda one: f"context parallel size {one.context}" if one.context != 1 else None,
            "context parallelism spreads a sequence's tokens over ranks, which is not supported",
        ),
    ),
    Rule(
        id="LayoutUnsupported/data-nodes",
        description=(
            "A data-parallel rank that spans several nodes is not supported. Each node of a "
            "data-parallel engine has the same number of whole ranks, with their schedulers and "
            "side channels. In vLLM 0.32, ranks of a dense model that span nodes do not find each "
            "other: each starts as an engine of its own and looks for the first node's address."
        ),
        remedy="Choose parallelism.data as a multiple of parallelism.nodes, or use replicas.",
        source=(
            "vLLM 0.32 engine/arg_utils.py (ranks of a node follow from its number), "
            "config/parallel.py (reconfigure_for_independent_dp_rank)"
        ),
        test=alone(
            "data", _data_nodes, "only whole data-parallel ranks on each node are supported"
        ),
    ),
    Rule(
        id="LayoutUnsupported/quantized",
        description=(
            "KV can be transferred in float32, float16, bfloat16, and in fp8 (e4m3, e5m2) with "
            "constant scales. A block of fp8_ds_mla, nvfp4_ds_mla, nvfp4, nvfp4_4over6, "
            "fp8_per_token_head, int8_per_token_head and of DeepSeek V3.2's indexer holds its own "
            "scales. It is moved whole if the attention backend is known to keep them there, the "
            "block is one piece of memory, and the connector of the engine is new enough to say "
            "so. All others are refused, because scales may lie elsewhere."
        ),
        remedy=(
            "Set engine.kvCacheDtype to auto, fp8_e4m3 or fp8_e5m2 on both roles, or to bfloat16 "
            "if auto chooses a type that is refused."
        ),
        source="vLLM 0.32 v1/kv_cache_interface.py (KVQuantMode), config/cache.py (CacheDType)",
        test=alone(
            "kv_dtype",
            _quantized,
            f"only {', '.join(sorted(CARRIED_DTYPES))} can be transferred, and blocks that are "
            "known to hold their own scales",
        ),
    ),
    Rule(
        id="LayoutUnsupported/scales",
        description=(
            "Quantized KV can be read only with its scales. Each layer needs one constant scale "
            "for K and one for V, from the checkpoint or 1.0. Scales for each head are refused, "
            "because each tensor rank has different ones."
        ),
        remedy=(
            "Use a checkpoint with one KV scale a layer, or set engine.kvCacheDtype to the model's "
            "own dtype, e.g. bfloat16."
        ),
        source="vLLM 0.32 model_executor/layers/quantization/kv_cache.py, compressed_tensors",
        test=alone(
            "layers", _scales, "the KV scales must be known, and equal on both engines", "layers"
        ),
    ),
    Rule(
        id="LayoutUnsupported/layers",
        description=(
            "Layers must be full attention, sliding window, MLA or Mamba layers. Others (chunked "
            "local attention, separate attention sinks, encoder caches, several tokens in a "
            "state) keep their KV in ways that this connector does not know."
        ),
        remedy="Serve a model that has only full attention, sliding window, MLA or Mamba layers.",
        source="vLLM 0.32 v1/kv_cache_interface.py",
        test=alone("layers", _kinds, "this version does not know how they keep their KV", "layers"),
    ),
    Rule(
        id="LayoutUnsupported/heads",
        description=(
            "The tensor parallel size must divide the number of KV heads, or be a multiple of it "
            "(heads are then replicated). The sizes of prefill and decode need not divide each "
            "other."
        ),
        remedy="Choose a tensor parallel size that divides the KV heads or is a multiple of them.",
        source="vLLM 0.32 model_executor/layers: QKV parallel linear asserts the same",
        test=alone("tensor", _heads, "neither divides the other", "layers"),
    ),
    Rule(
        id="LayoutUnsupported/asked",
        description=(
            "transfer.kvLayout asks vLLM for an order of KV in memory. An attention backend that "
            "does not have it gets another one, and VLLM_KV_CACHE_LAYOUT in the environment goes "
            "before it. Admission knows both if the manifest names them. Otherwise the engines "
            "compare what vLLM chose when they connect. A transfer would move the right bytes, "
            "but in many more descriptors than was asked for."
        ),
        remedy=(
            "Set transfer.kvLayout to a layout that the attention backends of both roles have, or "
            "to Auto, and remove VLLM_KV_CACHE_LAYOUT from engine.env."
        ),
        source="vLLM 0.32 v1/attention/backends (supported_kv_cache_layouts, utils.py)",
        test=alone(
            "asked_layout", _order, "vLLM must have the layout that transfer.kvLayout asks for"
        ),
    ),
    Rule(
        id="LayoutUnsupported/empty",
        description="An engine without a single layer of KV has nothing to exchange.",
        remedy="Serve a decoder model with attention layers.",
        source="definition",
        test=alone("layers", _empty, "there is nothing to transfer", "layers"),
    ),
)
