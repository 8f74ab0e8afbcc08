"""What a layer of vLLM keeps in its KV cache: its kind, element type, KV heads, or states.

**Element types.** vLLM keeps fp8 KV as bytes and the scales on the attention layer. There is one
number for K and one for V, from the checkpoint, or 1.0. vLLM sets them when it loads the weights
and never changes them. The model's digest covers only a sample of the weights, which may miss a
scale. So the scales are compared by value. Some layers may not be quantised, so each layer is
asked, and not the engine.

**KV heads.** vLLM gives rank r of t the heads from ``r * total // t`` on. If there are more ranks
than heads, it replicates heads. A layer does not say how many heads it has in total, only how many
are here. Some models have layers with another number of heads than they state: MiMo-V2 and Gemma 4
in their windows, and draft models. With one head here, the total could then be that of either.

**Mamba states.** A page holds the layer's states one after the other. For Mamba2, these are the
conv state and the SSM state. ``VLLM_SSM_CONV_STATE_LAYOUT=DS`` makes the conv state (channels,
rows). Its channels are then those of x by head, and those of B and C by group. So states can be cut
for engines of different tensor sizes. With one group and several ranks, each rank has a copy of the
group beside its heads. The channels of a gated delta net, and of KDA, are those of the rank's
queries, keys and values, each by head. Any other state is one part that cannot be cut. Both engines
then need the same tensor parallel size. The comparison of the parts ensures this.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from math import prod
from typing import Any, Final

import torch
import vllm
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from pdcluster_connector.compat.shape import LayerKind, Memory, PartShape
from pdcluster_connector.compat.supported import BYTES, SCALED, WHOLE, dtype_name
from pdcluster_connector.plan import geometry, rank_pairs


def kind_of(spec: Any) -> LayerKind:
    """Return a layer's kind; OTHER if its rules are not known here."""
    # Subclasses (sinks, recycled windows, …) add their own rules to the same pages.
    if spec.tokens_per_state not in {1, -1}:
        return LayerKind.OTHER
    if type(spec) is interface.MambaSpec:
        return LayerKind.MAMBA
    if type(spec) is interface.MLAAttentionSpec and spec.model_version is None:
        return LayerKind.MLA
    if type(spec) is interface.SlidingWindowSpec and not spec.extra_retained_tokens:
        return LayerKind.SLIDING_WINDOW
    if type(spec) is interface.FullAttentionSpec:
        return LayerKind.FULL_ATTENTION
    return LayerKind.OTHER


def is_plain(spec: Any) -> bool:
    """Whether a block is nothing but KV heads, tokens and their values."""
    slots = getattr(spec, "num_head_slots", None)
    return slots is None and getattr(spec, "state_content_bytes", None) is None


def whole_block(attention: Any, spec: Any, cache: torch.Tensor, dtype: str) -> str:
    """Return what decides where bytes lie in a block that holds its own scales.

    As in :class:`~pdcluster_connector.compat.shape.LayerShape`. Empty if this backend is not known
    to keep the scales of ``dtype`` in the block, or the block is not one piece of memory.
    """
    backend = attention.get_attn_backend().get_name() if attention is not None else ""
    if backend not in WHOLE.get(dtype, ()):
        return ""
    _, slots, tokens, content = cache.shape
    inside = cache.stride()[1:]
    orders = {"heads": (tokens * content, content, 1), "tokens": (content, slots * content, 1)}
    names = [
        name
        for name, strides in orders.items()
        if all(a == b for a, b, n in zip(inside, strides, cache.shape[1:], strict=True) if n > 1)
    ]
    if not names or (dtype.endswith(_SCALES_WITHIN) and not _scales_are_set(attention, cache)):
        return ""
    facts = {
        "attention backend": backend,
        "element type": str(cache.dtype).removeprefix("torch."),
        "bytes of a slot": spec.state_content_size_bytes,
        "outermost axis": names[0],
        "version of vLLM": vllm.__version__,
        "kind of device": _device(),
    }
    return ",".join(f"{name}={value}" for name, value in facts.items())


_SCALES_WITHIN: Final = "per_token_head"


def share_cache(attention: Any, cache: torch.Tensor) -> None:
    """Prepare a layer that reads another's cache. Its backend, too, would set the scales later."""
    if str(getattr(attention, "kv_cache_dtype", "")).endswith(_SCALES_WITHIN):
        _scales_are_set(attention, cache)


def _scales_are_set(attention: Any, cache: torch.Tensor) -> bool:
    """Let a Triton backend set all scales to 1.0 now, and not when a step first uses the cache.

    Decode may have received scales by then. Source: vLLM 0.32 v1/attention/backends/triton_attn.py
    (_ensure_scale_caches does it once, and before a step reads or writes).
    """
    impl = getattr(attention, "impl", None)
    ensure = getattr(impl, "_ensure_scale_caches", None)
    if ensure is not None:
        ensure(cache)
    return getattr(impl, "_k_scale_cache", None) is not None


def _device() -> str:
    """Return platform and architecture, which decide the kernels that write a cache."""
    capability = current_platform.get_device_capability()
    return " ".join([current_platform._enum.name.lower(), *map(str, capability or ())])  # noqa: SLF001


def token_bytes(spec: Any, parts: tuple[PartShape, ...]) -> int:
    """Return the bytes of one token of one head, or of the whole state in ``parts``."""
    if parts:
        return sum(part.heads * part.head_bytes for part in parts)
    content = int(getattr(spec, "state_content_size_bytes", 0))
    slots = getattr(spec, "num_head_slots", None)  # of several for a head: all of them
    return content if slots is None else content * slots // spec.num_kv_heads


_UNNAMED: Final = frozenset({"auto", "", None})


def engine_dtype(vllm_config: Any) -> str:
    """Return the element type of the engine's attention caches; single layers may differ."""
    return _name(vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype)


def layer_dtype(attention: Any, spec: Any) -> str:
    """Return the element type of one layer's cache.

    Args:
        attention: vLLM's attention layer. If it names no type (an indexer's cache), the spec does.
        spec: its KV cache spec.
    """
    return _name(getattr(attention, "kv_cache_dtype", None), spec.dtype)


def layer_scales(attention: Any, dtype: str) -> str | None:
    """Return a layer's scales as in :class:`~pdcluster_connector.compat.shape.LayerShape`.

    Empty for a type without scales; None if there is not exactly one number for K and one for V.
    """
    if dtype not in SCALED | WHOLE.keys() - {BYTES}:
        return ""
    scales: list[Any] = [getattr(attention, name, None) for name in ("_k_scale", "_v_scale")]
    if not all(isinstance(scale, torch.Tensor) and scale.numel() == 1 for scale in scales):
        return None
    return ",".join(f"{side}={scale.item()}" for side, scale in zip("kv", scales, strict=True))


def _name(named: str | None, dtype: torch.dtype) -> str:
    if named in _UNNAMED:
        return str(dtype).removeprefix("torch.")
    name = dtype_name(str(named))
    if name == "fp8_e4m3" and current_platform.is_fp8_fnuz():
        return "fp8_e4m3fnuz"
    return name


# The fields of Hugging Face configurations that vLLM's models read such a number from.
COUNTS = re.compile(r"kv_(n_)?heads|key_value_heads|n_head_kv|attention_groups|query_group")
# Nemotron-NAS says for each layer how many query heads share a KV head.
GROUP = re.compile(r"^n_heads_in_group$")
DEEPEST = 8


def heads_of(
    spec: Any, kind: LayerKind, vllm_config: Any, rank: int
) -> tuple[int, int, int] | None:
    """(heads of the layer, first head here, one past the last here); None if not known.

    MLA's latent counts as one head that every rank holds. If several stated totals fit, the layer
    counts as having as many heads as their least common multiple. The real total divides it, so
    ranks that hold the same of these heads hold the same real one. If the totals of two engines
    differ, they are refused.
    """
    tensor = vllm_config.parallel_config.tensor_parallel_size
    local = getattr(spec, "num_kv_heads", None)
    if kind is LayerKind.MLA:
        return (1, 0, 1) if local == 1 else None
    if kind is LayerKind.MAMBA or local is None:
        return None
    fitting = [total for total in stated_totals(vllm_config) if _fits(total, tensor, local)]
    total = math.lcm(*fitting) if fitting else local * tensor
    return total, *rank_pairs.head_interval(total, tensor, rank)


def stated_totals(vllm_config: Any) -> frozenset[int]:
    """Return each number of KV heads that the model states, and its draft model."""
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    found: set[int] = set()
    for model in (vllm_config.model_config, draft):
        if model is not None:
            config: Any = getattr(model, "hf_text_config", None)
            fields = config.to_dict() if hasattr(config, "to_dict") else {}
            layers = getattr(getattr(model, "model_arch_config", None), "per_layer_overrides", None)
            found.update(_integers(model.get_total_num_kv_heads()))
            found.update(_numbers([fields, layers], COUNTS))
            sharing = [number for number in _numbers(fields, GROUP) if number > 0]
            queries = list(_integers(fields.get("num_attention_heads")))
            found.update(heads // one for heads in queries for one in sharing)
    return frozenset(total for total in found if total > 0)


def _fits(total: int, tensor: int, local: int) -> bool:
    """Whether vLLM gives each of ``tensor`` ranks ``local`` heads of this many."""
    return local == max(1, total // tensor) and (total % tensor == 0 or tensor % total == 0)


def _numbers(value: Any, names: re.Pattern[str], depth: int = 0) -> Iterator[int]:
    """Yield the integers at any depth under names that match."""
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, names, depth)
        return
    if is_dataclass(value):  # as a remote configuration has for each layer
        value = vars(value)
    if not isinstance(value, Mapping) or depth > DEEPEST:
        return
    for name, inner in value.items():
        if names.search(str(name)):
            yield from _integers(inner)
        yield from _numbers(inner, names, depth + 1)


def _integers(value: Any) -> Iterator[int]:
    """Yield an integer, or those of a list."""
    for one in value if isinstance(value, list | tuple) else (value,):
        if isinstance(one, int) and not isinstance(one, bool):
            yield one


def describe_states(
    name: str,
    cache: torch.Tensor,
    spec: interface.MambaSpec,
    group: int,
    mixer: Any,
    ranks: tuple[int, int],
) -> tuple[tuple[PartShape, ...], list[geometry.Region]]:
    """Describe a layer's states over all tensor ranks, and where this rank has its share.

    Args:
        cache: ``[slot, 1, 1, bytes]`` int8.
        mixer: vLLM's layer.
        ranks: this worker's tensor rank, and how many there are.
    """
    rank, tensor = ranks
    parts: list[PartShape] = []
    regions: list[geometry.Region] = []
    offset = 0
    for label, dtype, heads, head_bytes in _arrays(spec, mixer, tensor):
        start, stop = rank_pairs.head_interval(heads, tensor, rank)
        text = str(dtype).removeprefix("torch.")
        parts.append(PartShape(label, heads, head_bytes, text))
        regions.append(
            geometry.Region(
                layer=name,
                base=cache.data_ptr() + offset,
                num_blocks=cache.shape[0],
                block_stride=cache.stride(0) * cache.element_size(),
                block_tokens=1,
                head_start=start,
                head_stop=stop,
                head_stride=head_bytes,
                token_stride=None,
                token_bytes=head_bytes,
                device=max(cache.get_device(), 0),
                memory=Memory.DRAM if cache.device.type == "cpu" else Memory.VRAM,
                group=group,
                part=label,
            )
        )
        offset += (stop - start) * head_bytes
    return tuple(parts), regions


# Layers of linear attention that give rank r of t the heads from ``r * total // t`` on, and keep
# channels of queries, keys and values in this order. Source: vLLM 0.32 model_executor/layers/mamba/
# gdn (mamba_v2_sharded_weight_loader, _make_fused_conv1d_weight_loader).
QUERIES_KEYS_VALUES: Final = frozenset(
    {
        "KimiGatedDeltaNetAttention",
        "OlmoHybridGatedDeltaNetAttention",
        "QwenGatedDeltaNetAttention",
    }
)


def _arrays(
    spec: interface.MambaSpec, mixer: Any, tensor: int
) -> list[tuple[str, torch.dtype, int, int]]:
    """Return (name, dtype, heads over all ranks, bytes of a head) in the order of the page."""
    mamba2 = spec.mamba_type is MambaAttentionBackendEnum.MAMBA2
    cut = len(spec.shapes) == 2 and is_conv_state_dim_first() and not spec.tp_replicated
    if cut and not mamba2 and type(mixer).__name__ in QUERIES_KEYS_VALUES:
        (channels, rows), (heads, value, key) = spec.shapes
        local, rest = divmod(channels - heads * value, 2 * key)
        if local > 0 and rest == 0:  # no rank has a part of a head
            row, state = rows * spec.dtypes[0].itemsize, key * spec.dtypes[1].itemsize
            return [
                ("conv.q", spec.dtypes[0], local * tensor, key * row),
                ("conv.k", spec.dtypes[0], local * tensor, key * row),
                ("conv.v", spec.dtypes[0], heads * tensor, value * row),
                ("ssm", spec.dtypes[1], heads * tensor, value * state),
            ]
    if cut and mamba2:
        (channels, rows), (heads, head_dim, state) = spec.shapes
        local, rest = divmod(channels - heads * head_dim, 2 * state)
        groups = _groups(local, mixer, tensor)
        if groups > 0 and rest == 0:
            row = rows * spec.dtypes[0].itemsize
            return [
                ("conv.x", spec.dtypes[0], heads * tensor, head_dim * row),
                ("conv.b", spec.dtypes[0], groups, state * row),
                ("conv.c", spec.dtypes[0], groups, state * row),
                ("ssm", spec.dtypes[1], heads * tensor, head_dim * state * spec.dtypes[1].itemsize),
            ]
    order = "DS" if is_conv_state_dim_first() else "SD"
    heads = 1 if spec.tp_replicated else tensor  # one copy on every rank, or one share for each
    return [
        (f"state{i}.{order}", dtype, heads, prod(shape) * dtype.itemsize)
        for i, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True))
    ]


def _groups(local: int, mixer: Any, tensor: int) -> int:
    """Return the model's B/C groups, for a rank that has ``local`` of them; 0 if not known.

    vLLM divides groups evenly, or copies a model's only group to every rank. A rank with one group
    can be either case. The layer's norm has the model's own count.
    """
    if local != 1 or tensor == 1:
        return local * tensor
    stated = getattr(getattr(mixer, "norm", None), "n_groups", 0)
    return stated if stated in {1, tensor} else 0
