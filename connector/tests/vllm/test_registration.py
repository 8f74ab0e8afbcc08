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

from pdcluster_connector.compat.shape import GroupShape, LayerKind, Memory, PartShape
from pdcluster_connector.plan.geometry import Region
from pdcluster_connector.vllm import states
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
            tensor_parallel_size=tensor, pipeline_parallel_size=1, data_parallel_size=1, nnodes=1,
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


def page_views(spec: Any, names: list[str] = NAMES) -> tuple[dict[str, Any], KVCacheTensor]:
    """Views of layers with ``spec``, one after the other in memory."""
    page = spec.page_size_bytes
    placed = KVCacheTensor(
        size=page * BLOCKS * len(names), layers=names, layer_stride=page * BLOCKS, block_stride=page
    )
    raw = torch.zeros(placed.size, dtype=torch.int8)
    views = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout.LBHNC, placed, spec.block_size)
    return dict(zip(names, views, strict=True)), placed


@pytest.mark.parametrize(
    "spec",
    [
        SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=HEAD, dtype=torch.float32,
                          sliding_window=128, extra_retained_tokens=2),
        MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=96, dtype=torch.float32,
                         model_version="deepseek_v4"),
        MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,), tp_replicated=True),
        full(num_head_slots=1),
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


MAMBA2 = MambaSpec(
    block_size=BLOCK, shapes=((4 * 16 + 2 * 2 * 8, 3), (4, 16, 8)),
    dtypes=(torch.float32, torch.float32), page_size_padded=8192,
)  # fmt: skip


def test_mamba_states_are_cut_into_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Second of two ranks: 4 heads of 16 channels, 2 groups of 8; conv rows 3."""
    monkeypatch.setattr(states, "is_conv_state_dim_first", lambda: True)
    views, placed = page_views(MAMBA2)
    config = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(NAMES, MAMBA2)])
    made = register(views, config, vllm_config(tensor=2), (0, 1), "digest")
    assert made.shape.layers is not None
    assert made.shape.layers[0].parts == (
        PartShape("conv.x", 8, 16 * 3 * 4, "float32"),
        PartShape("conv.b", 4, 8 * 3 * 4, "float32"),
        PartShape("conv.c", 4, 8 * 3 * 4, "float32"),
        PartShape("ssm", 8, 16 * 8 * 4, "float32"),
    )
    # What a layer sees in its states, found again by the regions' arithmetic.
    pages = views[NAMES[1]].squeeze(dim=(1, 2))
    conv = pages[:, : 96 * 3 * 4].view(torch.float32).view(BLOCKS, 96, 3)
    ssm = pages[:, 96 * 3 * 4 : 96 * 3 * 4 + 4 * 16 * 8 * 4].view(torch.float32)
    conv[5, 64 + 16 + 8, 0], ssm.view(BLOCKS, 4, 16, 8)[5, 3, 0, 0] = 7.0, 9.0
    regions = {r.part: r for r in made.shard.regions if r.layer == NAMES[1]}
    raw = torch.empty(0, dtype=torch.int8).set_(pages.untyped_storage())
    memory = np.frombuffer(raw.numpy(), dtype=np.uint8)
    for part, head, value in (("conv.c", 3, 7.0), ("ssm", 7, 9.0)):
        region = regions[part]
        at = region.base + 5 * region.block_stride
        at += (head - region.head_start) * region.head_stride - raw.data_ptr()
        assert memory[at : at + 4].view(np.float32)[0] == value, part


def test_states_in_another_order_are_moved_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "is_conv_state_dim_first", lambda: False)
    views, placed = page_views(MAMBA2)
    config = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(NAMES, MAMBA2)])
    made = register(views, config, vllm_config(), (0, 0), "digest")
    assert made.shape.layers is not None
    assert [part.name for part in made.shape.layers[0].parts] == ["state0.SD", "state1.SD"]
    assert (
        sum(region.token_bytes for region in made.shard.regions)
        == 2 * MAMBA2.state_content_size_bytes
    )


def test_layers_that_share_a_cache_are_left_out() -> None:
    views, config = caches(KVCacheLayout.LBHNC)
    views["model.layers.9.attn"] = views[NAMES[0]]
    made = register(views, config, vllm_config(), (0, 0), "digest")
    assert [region.layer for region in made.shard.regions] == NAMES
