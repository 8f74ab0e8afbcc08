"""From vLLM's KV cache tensors to regions, memory ranges and this rank's shape.

vLLM hands over one strided view ``[block, head, token, content]`` for each layer (vLLM RFC #42082),
whatever the physical order is. A region is read from the view's strides. A Mamba layer's view is
``[slot, 1, 1, bytes]`` (``layers.py``). The strides do not show whether a block can be cut by
token; the attention backend decides that. For example, CPU_ATTN keeps, for each (block, head), all
K tokens and then all V tokens, packed for the host's instruction set. Only backends that are known
to keep K and V of one token together count as sliceable.

The shape also describes layers whose rules this connector does not know, and a rule refuses them by
name at the handshake. They get no region. Their engine starts and serves normally.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from pdcluster_connector.compat import shape as shapes
from pdcluster_connector.compat.supported import SCALED, token_sliceable
from pdcluster_connector.plan.geometry import MemoryRange, Region, Shard
from pdcluster_connector.plan.slices import joined, sliced
from pdcluster_connector.vllm.kv_caches.groups import cache_groups
from pdcluster_connector.vllm.kv_caches.layers import (
    describe_states,
    engine_dtype,
    heads_of,
    is_plain,
    kind_of,
    layer_dtype,
    layer_scales,
    share_cache,
    token_bytes,
    whole_block,
)


@dataclass(frozen=True, slots=True)
class Registration:
    """One worker's caches, described for the handshake (shape, shard) and for NIXL (memory)."""

    shape: shapes.EngineShape
    shard: Shard
    memory: tuple[MemoryRange, ...]


def register(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    vllm_config: Any,
    rank: tuple[int, int],
    model: str,
    draft: str | None = None,
    asked: str | None = None,
) -> Registration:
    """Describe ``kv_caches`` (layer name -> tensor) of the worker at ``rank``.

    Layers without a spec of their own share another layer's cache and are left out.
    ``model`` and ``draft`` are digests (:mod:`..worker_side.fingerprint`); ``asked`` is the layout
    that vLLM was asked for.
    """
    parallel = vllm_config.parallel_config
    cache_config = vllm_config.cache_config
    layers: list[shapes.LayerShape] = []
    regions: list[Region] = []
    storages: set[MemoryRange] = set()
    packings: set[str | None] = set()
    ratios: dict[int, set[int]] = {}
    dtype: str | None = None
    modules = vllm_config.compilation_config.static_forward_context

    of_groups = cache_groups(kv_cache_config)
    specs = [(n, *item) for n, held in enumerate(of_groups) for item in held.layers.items()]
    for name in kv_caches.keys() - {name for _, name, _ in specs}:
        share_cache(modules.get(name), kv_caches[name])
    for group, name, spec in specs:
        cache = kv_caches.get(name)
        if cache is None:
            continue
        kind = kind_of(spec)
        heads = heads_of(spec, kind, vllm_config, rank[1])
        total, first, stop = heads or (1, 0, 0)
        parts: tuple[shapes.PartShape, ...] = ()
        held: list[Region] = []
        own_dtype = whole = ""
        scales: str | None = ""
        module = modules.get(name)
        if kind is not shapes.LayerKind.MAMBA and hasattr(spec, "dtype"):
            dtype = engine_dtype(vllm_config)
            own_dtype = layer_dtype(module, spec)
            scales = layer_scales(module, own_dtype)
            if kind is not shapes.LayerKind.OTHER and cache.dim() == 4:
                whole = whole_block(module, spec, cache, own_dtype)
        if kind is shapes.LayerKind.MAMBA:
            ranks = rank[1], parallel.tensor_parallel_size
            parts, held = describe_states(name, cache, spec, group, module, ranks)
        elif cache.dim() != 4 or heads is None or not (whole or is_plain(spec)):
            kind, whole = shapes.LayerKind.OTHER, ""
        elif kind is not shapes.LayerKind.OTHER:
            packing = _packing(module, own_dtype) or (whole and own_dtype) or None
            packings.add(packing)
            ratio = max(1, cache.shape[0] // max(1, kv_cache_config.num_blocks))
            ratios.setdefault(group, set()).add(ratio)
            held = [_region(name, cache, first, stop, packing is None, group, bool(whole))]
        layers.append(
            shapes.LayerShape(
                name=name,
                kind=kind,
                group=group,
                kv_heads=total,
                token_bytes=token_bytes(spec, parts),
                window=getattr(spec, "sliding_window", None) or None,
                dtype="" if own_dtype == dtype else own_dtype,
                scales=scales,
                parts=parts,
                whole=whole,
            )
        )
        regions += held
        if held:
            storage = cache.untyped_storage()
            place = held[0].device, held[0].memory
            storages.add(MemoryRange(storage.data_ptr(), storage.nbytes(), *place))

    shape = shapes.EngineShape(
        model=model,
        kv_dtype=dtype,
        block_size=cache_config.block_size,
        kernel_blocks_per_block=_only(set().union(*ratios.values())),
        prefix_caching=bool(cache_config.enable_prefix_caching),
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        data=parallel.data_parallel_size,
        context=max(
            parallel.decode_context_parallel_size,
            getattr(parallel, "prefill_context_parallel_size", 1),
        ),
        nodes=parallel.nnodes,
        memory=_only({region.memory for region in regions}),
        token_sliceable=(packings == {None}) if packings else None,
        packing="+".join(sorted(p for p in packings if p is not None)) or None,
        layers=tuple(layers),
        # The ratio is 1 if this rank has no layer of the group.
        groups=tuple(
            shapes.GroupShape(
                kind_of(held.spec), held.block_size, max(ratios.get(n, {1})), held.window
            )
            for n, held in enumerate(of_groups)
        ),
        layout=kv_cache_config.kv_cache_layout,
        draft=draft,
        asked_layout=asked,
    )
    shard = Shard(rank=rank, regions=tuple(regions))
    return Registration(shape=shape, shard=shard, memory=_memory(storages, regions))


def _memory(
    storages: Collection[MemoryRange], regions: Sequence[Region]
) -> tuple[MemoryRange, ...]:
    """Return the memory to register, each byte once: storages can overlap or share an address."""
    found = []
    for place in sorted({(storage.device, storage.memory) for storage in storages}):
        here = [region for region in regions if (region.device, region.memory) == place]
        for first, stop in joined(s.span for s in storages if (s.device, s.memory) == place):
            held = [region for region in here if first <= region.base < stop]
            slices = sliced((first, stop), held)
            found += [MemoryRange(low, high - low, *place) for low, high in slices]
    return tuple(found)


def _packing(attention: Any, dtype: str) -> str | None:
    """Return the id of a packed block interior; None if the interior can be cut by token."""
    if attention is None:
        return "unknown"
    backend = attention.get_attn_backend().get_name()
    if token_sliceable(backend):
        return None
    words = [backend, getattr(attention, "isa", None)]
    if dtype in SCALED:  # the packing depends on the type that the kernels compute with
        words.append(str(getattr(attention, "dtype", "")).removeprefix("torch."))
    return "/".join(filter(None, words))


def _region(
    name: str, cache: torch.Tensor, first: int, stop: int, sliceable: bool, group: int, whole: bool
) -> Region:
    size = cache.element_size()
    blocks, slots, tokens, content = cache.shape
    head_stride = cache.stride(1) * size
    if whole:  # one piece of memory, whatever is inside: an equal share of it for each head
        content = slots * content // (stop - first)
        head_stride = tokens * content * size
    return Region(
        layer=name,
        base=cache.data_ptr(),
        num_blocks=blocks,
        block_stride=cache.stride(0) * size,
        block_tokens=tokens,
        head_start=first,
        head_stop=stop,
        head_stride=head_stride,
        token_stride=cache.stride(2) * size if sliceable else None,
        token_bytes=content * size,
        device=max(cache.get_device(), 0),
        memory=shapes.Memory.DRAM if cache.device.type == "cpu" else shapes.Memory.VRAM,
        group=group,
    )


def _only(values: set[Any]) -> Any:
    """Return the only value of a set; None if it has no value, or more than one."""
    return next(iter(values)) if len(values) == 1 else None
