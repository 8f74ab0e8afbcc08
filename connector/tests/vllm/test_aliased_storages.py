"""Caches that share memory: each stays a region of its own, and every byte is registered once.

vLLM's hybrid caches put layers of several groups on one allocation. Two that begin at one address
may differ in stride, length or spec (vLLM #57661 took them for one).
"""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm")

import torch
from hypothesis import example, given, settings, strategies as st
from registered_caches import Attention, vllm_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from pdcluster_connector.plan.geometry import Shard, region_extent
from pdcluster_connector.plan.peer_plan import plan_peer
from pdcluster_connector.plan.slices import seams, sliced
from pdcluster_connector.vllm.kv_caches import registration
from pdcluster_connector.vllm.kv_caches.registration import Registration

pytestmark = pytest.mark.vllm

SIZE = 1 << 18
HEADS, CONTENT = 2, 8  # float32

# One layer's cache: (storage, first element, blocks, block tokens, elements between blocks,
# head or token outermost, sliding window or None)
layer = st.tuples(
    st.integers(0, 3), st.sampled_from([0, 0, 0, 64, 1024]), st.sampled_from([3, 5, 8]),
    st.sampled_from([1, 16, 32]), st.sampled_from([0, 0, 16]), st.booleans(),
    st.sampled_from([None, None, 128]),
)  # fmt: skip


def storages(raw: torch.Tensor) -> list[torch.UntypedStorage]:
    """Four over the same memory: of two lengths, as a view has, and one further back."""

    def over(first: int, size: int) -> torch.UntypedStorage:
        held = (ctypes.c_char * size).from_address(raw.data_ptr() + first)
        return torch.frombuffer(held, dtype=torch.uint8).untyped_storage()

    return [raw.untyped_storage(), over(0, SIZE // 2), over(0, SIZE), over(4096, SIZE // 2)]


def registered(drawn: list[Any], raw: torch.Tensor, slice_bytes: int) -> tuple[Any, Registration]:
    views, groups = {}, []
    for number, (which, first, blocks, tokens, gap, head_outer, window) in enumerate(drawn):
        inner = (tokens * CONTENT, CONTENT) if head_outer else (CONTENT, HEADS * CONTENT)
        strides = (HEADS * tokens * CONTENT + gap, *inner, 1)
        name = f"model.layers.{number}.attn"
        views[name] = torch.empty(0).set_(
            torch.empty(0).set_(storages(raw)[which]).untyped_storage(),
            first, (blocks, HEADS, tokens, CONTENT), strides,
        )  # fmt: skip
        shape = {"block_size": tokens, "num_kv_heads": HEADS, "head_size": CONTENT // 2}
        spec: Any = FullAttentionSpec(**shape, dtype=torch.float32)
        if window:
            spec = SlidingWindowSpec(**shape, dtype=torch.float32, sliding_window=window)
        groups.append(KVCacheGroupSpec([name], spec))
    config = vllm_config(backend="FLASH_ATTN", isa=None)
    config.compilation_config = SimpleNamespace(
        static_forward_context={name: Attention("FLASH_ATTN") for name in views}
    )
    with patch.object(registration, "sliced", partial(sliced, limit=slice_bytes)):
        made = registration.register(views, KVCacheConfig(3, [], groups), config, (0, 0), "digest")
    return views, made


# Two layers a quarter of a block apart on the same memory, each in blocks of its own grid.
SHIFTED = [(0, 1024, 3, 16, 0, False, None), (3, 64, 3, 16, 0, False, None)]


@example([(0, 0, 3, 1, 0, False, None), *SHIFTED], 7_000)
@settings(max_examples=2 * settings().max_examples)
@given(st.lists(layer, min_size=1, max_size=6), st.sampled_from([SIZE * 2, 40_000, 7_000]))
def test_no_region_is_taken_for_another(drawn: list[Any], slice_bytes: int) -> None:
    raw = torch.zeros(SIZE, dtype=torch.uint8)
    views, made = registered(drawn, raw, slice_bytes)
    regions = made.shard.regions
    assert [region.layer for region in regions] == list(views), "one region for each layer"
    assert [region.group for region in regions] == list(range(len(views)))
    for region, (name, view) in zip(regions, views.items(), strict=True):
        for index in ((0, 0, 0), tuple(size - 1 for size in view.shape[:3])):
            block, head, token = index
            assert region.token_stride is not None
            at = region.base + block * region.block_stride + head * region.head_stride
            assert at + token * region.token_stride == view[index].data_ptr(), name
        extent = region_extent(region)
        assert extent is not None
        covered = 0
        for item in made.memory:
            low, high = max(region.base, item.address), region.base + extent
            covered += max(0, min(high, item.address + item.length) - low)
        assert covered == extent, "all of it is registered, and nothing twice"
    # And each layer can be read: no descriptor lies across a seam.
    shard = Shard((0, 0), regions, seams(item.span for item in made.memory))
    plan = plan_peer(shard, [shard]).sources[0]
    for address, length, _, stride, count in plan.prefill_rows.tolist():
        end = address + (count - 1) * stride + length
        assert any(item.address <= address and end <= sum((item.address, item.length))
                   for item in made.memory)  # fmt: skip


def test_of_two_storages_at_one_address_the_longer_one_counts() -> None:
    raw = torch.zeros(SIZE, dtype=torch.uint8)
    short, long = (1, 0, 3, 1, 0, True, None), (2, 0, 8, 32, 0, True, None)
    for drawn in ([short, long], [long, short]):
        _, made = registered(drawn, raw, SIZE)
        assert [(item.address, item.length) for item in made.memory] == [(raw.data_ptr(), SIZE)]
