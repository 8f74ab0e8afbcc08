"""Caches of two block sizes as vLLM lays them out: registered, planned, copied, and read again.

Both sides' bytes are looked at through the views that an attention layer computes with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from labelled_engine import bytes_of, descriptors
from test_registration import HEADS, NAMES, vllm_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdcluster_connector.compat.check import check
from pdcluster_connector.plan.block_pairs import EngineBlocks, GroupBlocks, groups_of
from pdcluster_connector.plan.peer_plan import plan_peer
from pdcluster_connector.plan.request_descriptors import plan_request
from pdcluster_connector.vllm.kv_caches.registration import register

pytestmark = pytest.mark.vllm

TOKENS, HIT, BLOCKS = 333, 128, 40


def engine(layout: KVCacheLayout, block: int, kernel: int, start: float) -> tuple[Any, Any, Any]:
    """Return views whose elements all differ, the memory under them, and the registration."""
    spec = FullAttentionSpec(block_size=block, num_kv_heads=HEADS, head_size=4, dtype=torch.float32)
    page = spec.page_size_bytes
    outermost = layout.is_block_outermost
    placed = KVCacheTensor(
        size=page * BLOCKS * 2,
        layers=NAMES,
        layer_stride=page if outermost else page * BLOCKS,
        block_stride=2 * page if outermost else page,
    )
    raw = torch.arange(placed.size // 4, dtype=torch.float32).add_(start).view(torch.int8)
    views = create_kv_cache_views(raw, spec, BLOCKS, layout, placed, kernel)
    config = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(NAMES, spec)])
    named = dict(zip(NAMES, views, strict=True))
    made = register(named, config, vllm_config(backend="FLASH_ATTN", block=block), (0, 0), "m")
    return views, raw.numpy().view(np.uint8), made


def tokens_of(view: Any, blocks: list[int], ratio: int) -> Any:
    """[token, head, content] of a request, as the layer sees it."""
    kernel = [block * ratio + i for block in blocks for i in range(ratio)]
    return view[kernel].transpose(1, 2).reshape(-1, HEADS, view.shape[-1]).clone()


@pytest.mark.parametrize(
    "layouts", [("LBHNC", "LBHNC"), ("LBNHC", "LBNHC"), ("LBHNC", "BLNHC"), ("LBNHC", "BLHNC")]
)
@pytest.mark.parametrize("sizes", [(16, 16, 64, 64), (64, 64, 16, 16), (64, 16, 32, 32)])
def test_each_token_is_found_again(
    layouts: tuple[str, str], sizes: tuple[int, int, int, int]
) -> None:
    """Block and kernel block of prefill, then of decode."""
    theirs, source, prefill = engine(KVCacheLayout[layouts[0]], *sizes[:2], start=1.0)
    ours, target, decode = engine(KVCacheLayout[layouts[1]], *sizes[2:], start=1e6)
    assert check(prefill.shape, decode.shape) == ()
    dice = np.random.default_rng(3)
    lists = [(1 + dice.permutation(BLOCKS - 1))[: -(-TOKENS // s)].tolist() for s in sizes[::2]]
    ratios = sizes[0] // sizes[1], sizes[2] // sizes[3]
    before = [tokens_of(view, lists[1], ratios[1]) for view in ours]
    untouched = target.copy()
    plan = plan_peer(decode.shard, [prefill.shard])
    held = [
        EngineBlocks(groups_of(made.shape), [GroupBlocks(tuple(blocks))])
        for made, blocks in ((prefill, lists[0]), (decode, lists[1]))
    ]
    moved = 0
    for part in plan_request(plan, *held, start=HIT, stop=TOKENS, tokens=TOKENS):
        rows = plan.sources[part.source]
        take = bytes_of(*descriptors(rows.prefill_rows, part.prefill_indices))
        put = bytes_of(*descriptors(rows.decode_rows, part.decode_indices))
        target[put - target.ctypes.data] = source[take - source.ctypes.data]
        moved += take.size
    changed = (target.view(np.uint32) != untouched.view(np.uint32)).sum()
    assert moved == (336 - HIT) * HEADS * 8 * 4 * 2 == changed * 4
    for ours_, theirs_, old in zip(ours, theirs, before, strict=True):
        received = tokens_of(ours_, lists[1], ratios[1])
        assert torch.equal(
            received[HIT:TOKENS], tokens_of(theirs_, lists[0], ratios[0])[HIT:TOKENS]
        )
        assert torch.equal(received[:HIT], old[:HIT])
