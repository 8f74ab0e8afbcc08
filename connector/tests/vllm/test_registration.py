"""From strided cache views to regions: addresses are checked by writing through the views."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdcluster_connector.compat.shape import LayerKind, Memory
from pdcluster_connector.plan.geometry import Region
from pdcluster_connector.vllm.registration import register

pytestmark = pytest.mark.vllm

BLOCKS, BLOCK, HEADS, HEAD = 6, 64, 2, 32
NAMES = ["model.layers.0.attn", "model.layers.1.attn"]


class Attention:
    """As much of vLLM's attention layer as registration looks at."""

    def __init__(self, backend: str, isa: str | None = None) -> None:
        self._backend = backend
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
            tensor_parallel_size=tensor, pipeline_parallel_size=1, data_parallel_size=1,
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: total_heads),
        cache_config=SimpleNamespace(
            cache_dtype=cache_dtype, block_size=block, enable_prefix_caching=True
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={name: Attention(backend, isa) for name in NAMES}
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
    block_first = layout.is_block_outermost
    layer_stride = page if block_first else page * BLOCKS
    if layout is KVCacheLayout.BHLNC:
        layer_stride = page // HEADS
    placed = KVCacheTensor(
        size=size,
        layers=NAMES,
        layer_stride=layer_stride,
        block_stride=2 * page if block_first else page,
    )
    raw = torch.zeros(size, dtype=torch.int8)
    views = create_kv_cache_views(raw, spec, BLOCKS, layout, placed, kernel_block)
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[placed],
        kv_cache_groups=[KVCacheGroupSpec(NAMES, spec)],
    )
    return dict(zip(NAMES, views, strict=True)), config


def read(region: Region, raw: Any, block: int, head: int, token: int) -> float:
    """First element at (block, head, token), by the region's arithmetic alone."""
    assert region.token_stride is not None
    at = region.base + block * region.block_stride + head * region.head_stride
    at += token * region.token_stride
    memory = np.frombuffer(raw.numpy(), dtype=np.uint8)
    offset = at - raw.data_ptr()
    return float(memory[offset : offset + 4].view(np.float32)[0])


@pytest.mark.parametrize("layout", [layout for layout in KVCacheLayout if layout.name != "LHBNC"])
def test_addresses_in_every_layout(layout: KVCacheLayout) -> None:
    views, config = caches(layout)
    made = register(views, config, vllm_config(backend="FLASH_ATTN"), (0, 0), "digest")
    assert made.shape.token_sliceable is True
    assert made.shape.packing is None
    storage = next(iter(views.values())).untyped_storage()
    raw = torch.empty(0, dtype=torch.int8).set_(storage)
    assert [(m.address, m.length) for m in made.memory] == [(raw.data_ptr(), raw.nbytes)]
    for index, (name, view) in enumerate(views.items()):
        region = made.shard.regions[index]
        assert (region.layer, region.num_blocks, region.block_tokens) == (name, BLOCKS, BLOCK)
        assert region.token_bytes == 2 * HEAD * 4
        for block, head, token in [(0, 0, 0), (5, 1, 63), (3, 0, 17), (2, 1, 1)]:
            value = 1000 * index + 100 * block + 10 * head + token + 1.0
            view[block, head, token, 0] = value
            assert read(region, raw, block, head, token) == value


def test_cpu_attention_is_opaque_and_names_its_packing() -> None:
    views, config = caches(KVCacheLayout.LBHNC)
    made = register(views, config, vllm_config(), (0, 0), "digest")
    assert made.shape.token_sliceable is False
    assert made.shape.packing == "CPU_ATTN/vec"
    assert all(region.token_stride is None for region in made.shard.regions)
    assert made.shape.kv_dtype == "float32"
    assert made.shape.memory is Memory.DRAM
    assert made.shape.block_size == BLOCK
    assert made.shape.kernel_blocks_per_block == 1
    unknown = register(views, config, vllm_config(backend="NEW_ATTN", isa=None), (0, 0), "d")
    assert unknown.shape.token_sliceable is False, "what is not known to be sliceable is opaque"


def test_a_quantized_cache_is_named_by_its_dtype() -> None:
    views, config = caches(KVCacheLayout.LBHNC)
    made = register(views, config, vllm_config(cache_dtype="fp8"), (0, 0), "digest")
    assert made.shape.kv_dtype == "fp8_e4m3", "a rule refuses it; its layers are ordinary ones"
    assert made.shape.layers is not None
    assert made.shape.layers[0].kind is LayerKind.FULL_ATTENTION


def test_kernel_blocks_are_counted() -> None:
    views, config = caches(KVCacheLayout.LBHNC, kernel_block=16)
    made = register(views, config, vllm_config(), (0, 0), "digest")
    assert made.shape.kernel_blocks_per_block == 4
    region = made.shard.regions[0]
    assert (region.num_blocks, region.block_tokens) == (4 * BLOCKS, 16)
    assert region.block_stride * 4 == full().page_size_bytes


@pytest.mark.parametrize(
    ("total", "tensor", "rank", "expected"),
    [
        (2, 1, 0, (0, 2)),
        (4, 2, 1, (2, 4)),
        (8, 4, 3, (6, 8)),
        (1, 2, 1, (0, 1)),
        (2, 8, 3, (0, 1)),
        (2, 8, 4, (1, 2)),
    ],
)
def test_head_intervals(total: int, tensor: int, rank: int, expected: tuple[int, int]) -> None:
    local = max(1, total // tensor)
    views, config = caches(KVCacheLayout.LBHNC, spec=full(local))
    made = register(
        views, config, vllm_config(tensor=tensor, total_heads=total), (0, rank), "digest"
    )
    region = made.shard.regions[0]
    assert (region.head_start, region.head_stop) == expected
    assert made.shape.layers is not None
    assert made.shape.layers[0].kv_heads == total


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=HEAD, dtype=torch.float32,
                           sliding_window=128), LayerKind.SLIDING_WINDOW),
        (MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=96, dtype=torch.float32),
         LayerKind.MLA),
        (MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,)), LayerKind.MAMBA),
        (full(num_head_slots=1), LayerKind.OTHER),
    ],
)  # fmt: skip
def test_other_kinds_are_described_and_get_no_region(spec: Any, kind: LayerKind) -> None:
    config = KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(NAMES, spec)]
    )
    views = {name: torch.zeros(BLOCKS, 64) for name in NAMES}
    made = register(views, config, vllm_config(), (0, 0), "digest")
    assert made.shape.layers is not None
    assert [layer.kind for layer in made.shape.layers] == [kind, kind]
    assert made.shard.regions == ()
    assert made.memory == ()


def test_layers_that_share_a_cache_are_left_out() -> None:
    views, config = caches(KVCacheLayout.LBHNC)
    views["model.layers.9.attn"] = views[NAMES[0]]
    made = register(views, config, vllm_config(), (0, 0), "digest")
    assert [region.layer for region in made.shard.regions] == NAMES
