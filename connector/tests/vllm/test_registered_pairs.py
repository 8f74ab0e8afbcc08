"""Two engines' cache tensors in different orders: KV that is planned from what they register.

vLLM itself lays the tensors out, as ``VLLM_KV_CACHE_LAYOUT`` asks it to; the plan's descriptors
are carried out on the memory, and what arrived is read through the views that attention uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from registered_caches import BLOCK, BLOCKS, HEAD, HEADS, NAMES, caches, copy, vllm_config
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdcluster_connector.compat.check import check
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.plan.block_pairs import EngineBlocks, GroupBlocks, groups_of
from pdcluster_connector.plan.peer_plan import plan_peer
from pdcluster_connector.plan.rank_pairs import head_interval
from pdcluster_connector.plan.request_descriptors import plan_request
from pdcluster_connector.vllm.kv_caches.registration import Registration, register

pytestmark = pytest.mark.vllm

HND, NHD = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC  # vLLM takes these names too
TOKENS = 150  # two blocks and a part of a third
PREFILL, DECODE = (4, 1, 3), (2, 5, 1)


@dataclass(frozen=True)
class Rank:
    """A worker's tensors, and what it says of them."""

    views: dict[str, Any]
    made: Registration

    @property
    def memory(self) -> Any:
        return next(iter(self.views.values())).untyped_storage()

    def read(self, name: str, blocks: Sequence[int], head: int) -> np.ndarray:
        """[token, byte] of a global head, through the view."""
        low, high = head_interval(HEADS, self.made.shape.tensor, self.made.shard.rank[1])
        assert low <= head < high
        held = torch.cat([self.views[name][block, head - low] for block in blocks])
        return held.contiguous().view(torch.uint8).numpy()[:TOKENS]

    @property
    def heads(self) -> range:
        return range(*head_interval(HEADS, self.made.shape.tensor, self.made.shard.rank[1]))


def engine(
    layout: KVCacheLayout, tensor: int, dtype: torch.dtype, seed: int = -1,
    backend: str = "FLASH_ATTN",
) -> list[Rank]:  # fmt: skip
    """An engine's ranks, with random bytes (zeros without a seed)."""
    kinds = {torch.uint8: "fp8", torch.float32: "auto"}
    config = vllm_config(
        tensor=tensor, total_heads=HEADS, backend=backend, cache_dtype=kinds[dtype]
    )
    ranks = []
    for rank in range(tensor):
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=max(1, HEADS // tensor), head_size=HEAD, dtype=dtype
        )
        views, cache_config = caches(layout, spec=spec)
        made = register(views, cache_config, config, (0, rank), "digest")
        ranks.append(Rank(views, made))
    if seed >= 0:
        _fill(ranks, np.random.default_rng(seed))
    return ranks


def _fill(ranks: list[Rank], random: np.random.Generator) -> None:
    """Write through the views; ranks that share a head hold the same."""
    view = ranks[0].views[NAMES[0]]
    size = (len(NAMES), HEADS, BLOCKS, BLOCK, view.shape[3] * view.element_size())
    content = random.integers(0, 255, size, dtype=np.uint8)
    for rank, (index, name) in itertools.product(ranks, enumerate(NAMES)):
        for position, head in enumerate(rank.heads):
            own = torch.from_numpy(content[index, head]).view(view.dtype)
            rank.views[name][:, position].copy_(own)


def transfer(prefill: list[Rank], decode: list[Rank]) -> tuple[int, int]:
    """Bring the request's KV to every decode rank; returns the bytes and descriptors."""
    sides = (prefill[0].made.shape, decode[0].made.shape)
    assert check(*sides) == ()
    held, wanted = (_held(*pair) for pair in zip(sides, (PREFILL, DECODE), strict=True))
    moved = descriptors = 0
    for rank in decode:
        plan = plan_peer(rank.made.shard, [peer.made.shard for peer in prefill])
        for part in plan_request(plan, held, wanted, start=0, stop=TOKENS, tokens=TOKENS):
            copy(plan, part)
            moved += part.nbytes
            descriptors += len(part.prefill_indices)
    return moved, descriptors


def _held(shape: EngineShape, blocks: tuple[int, ...]) -> EngineBlocks:
    return EngineBlocks(groups_of(shape), [GroupBlocks(blocks)])


def check_arrived(prefill: list[Rank], decode: list[Rank]) -> None:
    for rank, name in itertools.product(decode, NAMES):
        for head in rank.heads:
            peer = next(p for p in prefill if head in p.heads)
            arrived = rank.read(name, DECODE, head)
            assert arrived.any()
            assert np.array_equal(arrived, peer.read(name, PREFILL, head)), (name, head)
        others = [block for block in range(BLOCKS) if block not in DECODE]
        assert not rank.views[name][others].any(), "another block was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=["float32", "fp8"])
@pytest.mark.parametrize(("prefill", "decode"), itertools.product(KVCacheLayout, repeat=2))
def test_each_order_to_each_other(
    prefill: KVCacheLayout, decode: KVCacheLayout, dtype: torch.dtype
) -> None:
    ours, theirs = engine(prefill, 1, dtype, seed=7), engine(decode, 1, dtype)
    transfer(ours, theirs)
    check_arrived(ours, theirs)


@pytest.mark.parametrize("order", [(NHD, HND), (HND, NHD)], ids=["NHD-HND", "HND-NHD"])
@pytest.mark.parametrize("tensor", [(2, 1), (1, 2), (4, 1), (2, 4)])
def test_the_other_order_and_other_tensor_sizes(
    order: tuple[KVCacheLayout, KVCacheLayout], tensor: tuple[int, int]
) -> None:
    ours = engine(order[0], tensor[0], torch.float32, seed=8)
    theirs = engine(order[1], tensor[1], torch.float32)
    transfer(ours, theirs)
    check_arrived(ours, theirs)


@pytest.mark.parametrize("tensor", [(1, 1), (2, 1), (1, 2), (4, 1), (2, 4)])
def test_packed_fp8_of_other_tensor_sizes(tensor: tuple[int, int]) -> None:
    """vLLM's CPU engines have such caches, on processors that can compute with them."""
    ours = engine(HND, tensor[0], torch.uint8, seed=10, backend="CPU_ATTN")
    theirs = engine(HND, tensor[1], torch.uint8, backend="CPU_ATTN")
    assert ours[0].made.shape.packing == "CPU_ATTN/vec/float32"
    transfer(ours, theirs)
    check_arrived(ours, theirs)


@pytest.mark.parametrize(
    ("prefill", "decode", "pieces"),
    [(HND, HND, 3), (NHD, NHD, 3), (NHD, HND, 3 * BLOCK * HEADS), (HND, NHD, 3 * BLOCK * HEADS)],
    ids=["HND-HND", "NHD-NHD", "NHD-HND", "HND-NHD"],
)
def test_what_another_order_costs(
    prefill: KVCacheLayout, decode: KVCacheLayout, pieces: int
) -> None:
    """Whole blocks where the order is the same; each token of each head where it is not."""
    moved, descriptors = transfer(
        engine(prefill, 1, torch.float32, seed=9), engine(decode, 1, torch.float32)
    )
    assert descriptors == pieces * len(NAMES)
    assert moved == 3 * BLOCK * HEADS * 2 * HEAD * 4 * len(NAMES)
