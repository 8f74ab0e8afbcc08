"""From vLLM's KV cache tensors to regions, memory ranges and this engine's shape.

vLLM hands over one strided view ``[block, head, token, content]`` a layer (vLLM RFC #42082),
whatever the physical order, so a region is read off the view's strides. Whether the inside of
a block can be cut by token is a property of the attention backend and not of the strides:
CPU_ATTN keeps, for each (block, head), all K tokens and then all V tokens, packed for the
host's instruction set. Only backends that are known to keep K and V of one token together are
treated as sliceable.

Kinds that cannot be transferred yet are described in the shape, where a rule refuses them by
name at the handshake, and get no region: their engine starts and serves normally.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from pdcluster_connector.compat.shape import EngineShape, LayerKind, LayerShape, Memory
from pdcluster_connector.plan.geometry import Region, Shard
from pdcluster_connector.runtime.nixl_port import MemoryRange

# Backends whose block interior is [head, token, K|V] in some order, each token's bytes whole.
_TOKEN_SLICEABLE: Final = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"})


@dataclass(frozen=True, slots=True)
class Registration:
    """What one worker's caches are: for the handshake (shape, shard) and for NIXL (memory)."""

    shape: EngineShape
    shard: Shard
    memory: tuple[MemoryRange, ...]


def register(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    vllm_config: Any,
    rank: tuple[int, int],
    model: str,
) -> Registration:
    """Describe ``kv_caches`` (layer name -> tensor) of the worker at ``rank``.

    Layers without a spec of their own share another layer's cache and are left out.
    ``model`` is the model's digest (:mod:`fingerprint`).
    """
    parallel = vllm_config.parallel_config
    total_heads = vllm_config.model_config.get_total_num_kv_heads()
    layers: list[LayerShape] = []
    regions: list[Region] = []
    storages: dict[tuple[int, int], MemoryRange] = {}
    packings: set[str | None] = set()
    ratios: set[int] = set()
    dtypes: set[str] = set()

    for name, (group, spec) in _specs(kv_cache_config).items():
        cache = kv_caches.get(name)
        if cache is None:
            continue
        kind = _kind(spec)
        heads = _heads(spec, total_heads, parallel.tensor_parallel_size, rank[1])
        if kind is LayerKind.FULL_ATTENTION and (cache.dim() != 4 or heads is None):
            kind = LayerKind.OTHER
        token_bytes = getattr(spec, "state_content_size_bytes", 0)
        layers.append(
            LayerShape(
                name=name,
                kind=kind,
                group=group,
                kv_heads=heads[0] if heads else 1,
                token_bytes=token_bytes,
                window=getattr(spec, "sliding_window", None) or None,
            )
        )
        if kind is not LayerKind.FULL_ATTENTION or heads is None:
            continue
        packing = _packing(name, vllm_config)
        packings.add(packing)
        ratios.add(max(1, cache.shape[0] // max(1, kv_cache_config.num_blocks)))
        dtypes.add(_dtype(vllm_config.cache_config.cache_dtype, spec.dtype))
        regions.append(_region(name, cache, heads[1], heads[2], packing is None))
        storage = cache.untyped_storage()
        region = regions[-1]
        storages.setdefault(
            (storage.data_ptr(), region.device),
            MemoryRange(storage.data_ptr(), storage.nbytes(), region.device, region.memory),
        )

    memories = {region.memory for region in regions}
    shape = EngineShape(
        model=model,
        kv_dtype=_only(dtypes),
        block_size=vllm_config.cache_config.block_size,
        kernel_blocks_per_block=_only(ratios),
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        data=parallel.data_parallel_size,
        context=max(
            parallel.decode_context_parallel_size,
            getattr(parallel, "prefill_context_parallel_size", 1),
        ),
        memory=_only(memories),
        token_sliceable=(packings == {None}) if packings else None,
        packing="+".join(sorted(p for p in packings if p is not None)) or None,
        layers=tuple(layers),
    )
    shard = Shard(rank=rank, regions=tuple(regions))
    return Registration(shape=shape, shard=shard, memory=tuple(storages.values()))


def _specs(config: KVCacheConfig) -> dict[str, tuple[int, Any]]:
    """Layer name -> (KV cache group, spec), for layers that take part in transfers."""
    found: dict[str, tuple[int, Any]] = {}
    for index, group in enumerate(config.transfer_groups):
        spec = group.kv_cache_spec
        for name in group.layer_names:
            single = (
                spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            )
            found[name] = (index, single)
    return found


def _kind(spec: Any) -> LayerKind:
    if isinstance(spec, MambaSpec):
        return LayerKind.MAMBA
    if isinstance(spec, MLAAttentionSpec):
        return LayerKind.MLA
    if isinstance(spec, SlidingWindowSpec):
        return LayerKind.SLIDING_WINDOW
    plain = (
        # Subclasses (sinks, recycled windows, …) add rules of their own to the same pages.
        type(spec) is FullAttentionSpec
        and spec.num_head_slots is None
        and spec.state_content_bytes is None
        and spec.tokens_per_state == 1
    )
    return LayerKind.FULL_ATTENTION if plain else LayerKind.OTHER


def _heads(spec: Any, total: int, tensor: int, rank: int) -> tuple[int, int, int] | None:
    """(heads of the layer, first head here, one past the last here); None if not known.

    vLLM gives rank r the heads from ``r * total // tensor`` on, and replicates heads where
    there are more ranks than heads.
    """
    local = getattr(spec, "num_kv_heads", None)
    if local is None:
        return None
    if local == max(1, total // tensor) and (total % tensor == 0 or tensor % total == 0):
        start = rank * total // tensor
        return total, start, start + local
    if local > 1 or tensor == 1:  # a layer with head counts of its own, split evenly
        return local * tensor, rank * local, (rank + 1) * local
    return None


def _packing(layer: str, vllm_config: Any) -> str | None:
    """Id of an opaque block interior; None if the interior is sliceable by token."""
    attention = vllm_config.compilation_config.static_forward_context.get(layer)
    if attention is None:
        return "unknown"
    backend = attention.get_attn_backend().get_name()
    if backend in _TOKEN_SLICEABLE:
        return None
    isa = getattr(attention, "isa", None)
    return f"{backend}/{isa}" if isa else backend


def _region(
    name: str, cache: torch.Tensor, head_start: int, head_stop: int, sliceable: bool
) -> Region:
    size = cache.element_size()
    blocks, _, tokens, content = cache.shape
    return Region(
        layer=name,
        base=cache.data_ptr(),
        num_blocks=blocks,
        block_stride=cache.stride(0) * size,
        block_tokens=tokens,
        head_start=head_start,
        head_stop=head_stop,
        head_stride=cache.stride(1) * size,
        token_stride=cache.stride(2) * size if sliceable else None,
        token_bytes=content * size,
        device=max(cache.get_device(), 0),
        memory=Memory.DRAM if cache.device.type == "cpu" else Memory.VRAM,
    )


def _dtype(cache_dtype: str, spec_dtype: torch.dtype) -> str:
    if cache_dtype in ("auto", "", None):
        return str(spec_dtype).removeprefix("torch.")
    return {"fp8": "fp8_e4m3"}.get(cache_dtype, cache_dtype)


def _only(values: set[Any]) -> Any:
    """The one value of a set; None if there is none, or more than one."""
    return next(iter(values)) if len(values) == 1 else None
