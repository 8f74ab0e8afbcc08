"""From strided cache views to regions: addresses are checked by writing through the views."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from registered_caches import (
    BLOCK,
    BLOCKS,
    HEAD,
    HEADS,
    NAMES,
    caches,
    full,
    page_views,
    vllm_config,
)
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.v1.core.kv_cache_utils import unify_hybrid_kv_cache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdcluster_connector.compat.check import check, refused
from pdcluster_connector.compat.shape import GroupShape, LayerKind, Memory
from pdcluster_connector.plan.geometry import Region
from pdcluster_connector.vllm.kv_caches.registration import register

pytestmark = pytest.mark.vllm


def read(region: Region, raw: Any, block: int, head: int, token: int) -> float:
    """First element at (block, head, token), by the region's arithmetic alone."""
    assert region.token_stride is not None
    at = region.base + block * region.block_stride + head * region.head_stride
    at += token * region.token_stride
    memory = np.frombuffer(raw.numpy(), dtype=np.uint8)
    offset = at - raw.data_ptr()
    return float(memory[offset : offset + 4].view(np.float32)[0])


@pytest.mark.parametrize("layout", KVCacheLayout)
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
    "spec",
    [
        SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=HEAD, dtype=torch.float32,
                          sliding_window=128, extra_retained_tokens=2),
        MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=96, dtype=torch.float32,
                         model_version="deepseek_v4"),
        full(num_head_slots=1),
        ChunkedLocalAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=HEAD,
                                  dtype=torch.float32, attention_chunk_size=128),
    ],
    ids=lambda spec: type(spec).__name__,
)  # fmt: skip
def test_kinds_with_rules_of_their_own_are_described_and_get_no_region(spec: Any) -> None:
    config = KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(NAMES, spec)]
    )
    views = {name: torch.zeros(BLOCKS, 1, 1, 64) for name in NAMES}
    made = register(views, config, vllm_config(), (0, 0), "digest")
    assert made.shape.layers is not None
    assert [layer.kind for layer in made.shape.layers] == [LayerKind.OTHER] * 2
    assert made.shard.regions == ()
    assert made.memory == ()


@pytest.mark.parametrize("is_hybrid", [True, False], ids=["hybrid manager", "as by default"])
def test_llama_4_is_carried_where_vllm_keeps_all_of_its_blocks(is_hybrid: bool) -> None:
    """vLLM turns the hybrid manager off for a model with chunked local attention, unless
    VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE is set. Its layers then keep KV as those of
    full attention do."""
    settings = SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK))
    local = SimpleNamespace(
        attention_chunk_size=128, num_kv_heads=2, head_size=HEAD, kv_cache_dtype="auto",
        kv_cache_torch_dtype=torch.float32,
    )  # fmt: skip
    specs = {NAMES[0]: ChunkedLocalAttention.get_kv_cache_spec(local, settings), NAMES[1]: full()}
    if not is_hybrid:
        unify_hybrid_kv_cache_specs(specs)
    views, config = caches(KVCacheLayout.LBHNC)
    config.kv_cache_groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
    made = register(views, config, vllm_config(backend="FLASH_ATTN"), (0, 0), "digest").shape
    kinds = [layer.kind for layer in made.layers or ()]
    found = refused(check(made, made))
    if is_hybrid:
        assert kinds == [LayerKind.OTHER, LayerKind.FULL_ATTENTION]
        assert found is not None
        assert found.rule == "LayoutUnsupported/layers"
        assert NAMES[0] in found.message
    else:
        assert kinds == [LayerKind.FULL_ATTENTION] * 2
        assert found is None


def test_the_latent_is_one_head_that_every_rank_holds() -> None:
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=96, dtype=torch.float32)
    views, placed = page_views(spec)
    config = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(NAMES, spec)])
    for rank in (0, 3):
        made = register(views, config, vllm_config(tensor=4, total_heads=1), (0, rank), "digest")
        regions = made.shard.regions
        assert {(region.head_start, region.head_stop) for region in regions} == {(0, 1)}
        assert regions[0].token_bytes == 96 * 4
        assert made.shape.layers is not None
        assert made.shape.layers[0].kind is LayerKind.MLA
        assert made.shape.layers[0].kv_heads == 1


@pytest.mark.parametrize(("rank", "expected"), [(0, (0, 2)), (1, (2, 4))])
def test_a_layer_with_heads_of_its_own(rank: int, expected: tuple[int, int]) -> None:
    """Four heads over two ranks, where the model states eight."""
    views, config = caches(KVCacheLayout.LBHNC, spec=full(2))
    made = register(views, config, vllm_config(tensor=2, total_heads=8), (0, rank), "digest")
    region = made.shard.regions[0]
    assert (region.head_start, region.head_stop) == expected
    assert made.shape.layers is not None
    assert made.shape.layers[0].kv_heads == 4


def test_groups_carry_their_own_sizes() -> None:
    window = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32,
        sliding_window=100,
    )  # fmt: skip
    views, config = caches(KVCacheLayout.LBHNC)
    config.kv_cache_groups = [
        KVCacheGroupSpec(NAMES[:1], window), KVCacheGroupSpec(NAMES[1:], full())
    ]  # fmt: skip
    made = register(views, config, vllm_config(), (0, 0), "digest")
    assert made.shape.groups == (
        GroupShape(LayerKind.SLIDING_WINDOW, BLOCK, 1, 100),
        GroupShape(LayerKind.FULL_ATTENTION, BLOCK, 1, None),
    )
    assert [region.group for region in made.shard.regions] == [0, 1]


def test_layers_that_share_a_cache_are_left_out() -> None:
    views, config = caches(KVCacheLayout.LBHNC)
    views["model.layers.9.attn"] = views[NAMES[0]]
    made = register(views, config, vllm_config(), (0, 0), "digest")
    assert [region.layer for region in made.shard.regions] == NAMES
