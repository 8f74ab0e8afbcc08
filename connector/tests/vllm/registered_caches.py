"""Cache tensors laid out by vLLM itself, and as much of its config as registration looks at.

Plans are carried out on the tensors' own memory (:func:`copy`).
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdcluster_connector.plan.peer_plan import PeerPlan
from pdcluster_connector.plan.request_descriptors import SourceIndices

BLOCKS, BLOCK, HEADS, HEAD = 6, 64, 2, 32
NAMES = ["model.layers.0.attn", "model.layers.1.attn"]


class Attention:
    """As much of vLLM's attention layer as registration looks at.

    ``scales``: of K and V; several of each where each head has its own.
    """

    def __init__(
        self, backend: str, isa: str | None = None, kv_cache_dtype: str = "auto",
        scales: tuple[Any, Any] = (1.0, 1.0),
    ) -> None:  # fmt: skip
        self._backend = backend
        self.dtype = torch.float32
        self.kv_cache_dtype = kv_cache_dtype
        self._k_scale, self._v_scale = (torch.tensor(scale) for scale in scales)
        if isa is not None:
            self.isa = isa

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self._backend)


def vllm_config(
    *, tensor: int = 1, total_heads: int = HEADS, backend: str = "CPU_ATTN",
    isa: str | None = "vec", cache_dtype: str = "auto", block: int = BLOCK,
) -> Any:  # fmt: skip
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor, pipeline_parallel_size=1, data_parallel_size=1, nnodes=1,
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: total_heads, dtype=torch.float32
        ),
        cache_config=SimpleNamespace(
            cache_dtype=cache_dtype, block_size=block, enable_prefix_caching=True
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={name: Attention(backend, isa, cache_dtype) for name in NAMES}
        ),
    )  # fmt: skip


def full(heads: int = HEADS, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=HEAD, dtype=torch.float32, **more
    )


def caches(
    layout: KVCacheLayout, kernel_block: int = BLOCK, spec: Any = None
) -> tuple[Any, KVCacheConfig]:
    """Views of two layers over one allocation, laid out by vLLM itself."""
    spec = spec or full()
    page = spec.page_size_bytes
    size = page * BLOCKS * 2
    layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, 2, layout)
    placed = KVCacheTensor(
        size=size, layers=NAMES, layer_stride=layer_stride, block_stride=block_stride
    )
    raw = torch.zeros(size, dtype=torch.int8)
    views = create_kv_cache_views(raw, spec, BLOCKS, layout, placed, kernel_block)
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[placed],
        kv_cache_groups=[KVCacheGroupSpec(NAMES, spec)],
    )
    return dict(zip(NAMES, views, strict=True)), config


def page_views(spec: Any, names: list[str] = NAMES) -> tuple[dict[str, Any], KVCacheTensor]:
    """Views of layers with ``spec``, one after the other in memory."""
    page = spec.page_size_bytes
    placed = KVCacheTensor(
        size=page * BLOCKS * len(names), layers=names, layer_stride=page * BLOCKS, block_stride=page
    )
    raw = torch.zeros(placed.size, dtype=torch.int8)
    views = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout.LBHNC, placed, spec.block_size)
    return dict(zip(names, views, strict=True)), placed


def copy(plan: PeerPlan, part: SourceIndices) -> None:
    """What NIXL does with the descriptors of a request's part, on this process's memory."""
    source = plan.sources[part.source]
    reads = _ranges(source.prefill_rows, part.prefill_indices)
    lands = _ranges(source.decode_rows, part.decode_indices)
    for (start, length), (target, same) in zip(reads, lands, strict=True):
        assert length == same
        ctypes.memmove(target, start, length)


def _ranges(rows: np.ndarray, indices: np.ndarray) -> list[tuple[int, int]]:
    every = [
        (int(address) + i * int(stride), int(length))
        for address, length, _, stride, count in rows.tolist()
        for i in range(count)
    ]
    return [every[index] for index in indices.tolist()]
