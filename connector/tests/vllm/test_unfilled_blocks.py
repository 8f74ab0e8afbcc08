"""What decode clears of a received prompt's last blocks, in tensors that vLLM itself lays out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from contract import STATE
from registered_caches import BLOCK, BLOCKS, HEAD, HEADS, NAMES, caches, vllm_config
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdcluster_connector.compat.shape import GroupShape, LayerKind
from pdcluster_connector.plan.block_pairs import EngineBlocks, GroupBlocks, Unfilled, unfilled
from pdcluster_connector.protocol.receive_order import ReceiveOrder
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.vllm.kv_caches.registration import register
from pdcluster_connector.vllm.step_messages import StepOrders
from pdcluster_connector.vllm.worker_side.worker import UnfilledBlocks, WorkerRole

pytestmark = pytest.mark.vllm

FILLED = 0xFF  # NaN as float32, and as either fp8


def engine(
    layout: KVCacheLayout, kernel: int, backend: str = "FLASH_ATTN", dtype: Any = torch.float32,
    hybrid: bool = True,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """vLLM's views full of NaN, its config, and the registration."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD, dtype=dtype)
    views, config = caches(layout, kernel, spec)
    if hybrid:
        groups = [*config.kv_cache_groups, KVCacheGroupSpec(["mamba"], STATE)]
        config = replace(config, kv_cache_groups=groups)
    for view in views.values():
        view.untyped_storage().fill_(FILLED)
    return views, config, register(views, config, vllm_config(backend=backend), (0, 0), "m")


def cleared(view: Any, kernel: int) -> np.ndarray:
    """[logical block, token] of a layer: 1 where all bytes are 0, 0 where none was touched."""
    ratio = BLOCK // kernel
    tokens = view.view(torch.uint8).transpose(1, 2).reshape(BLOCKS, ratio * kernel, -1).numpy()
    assert ((tokens == 0).all(-1) | (tokens == FILLED).all(-1)).all(), "half a token"
    return (tokens[..., 0] == 0).astype(int)


def held(made: Any, blocks: tuple[int, ...], first_token: int) -> EngineBlocks:
    return EngineBlocks(made.shape.groups, [GroupBlocks(blocks, first_token), GroupBlocks((1,))])


# Blocks of 64; the request's from token 64 on, its second one not held.
OWN, BEGIN = (5, 0, 2), BLOCK
# vLLM splits blocks into kernel blocks only where nothing else lies between them.
GRIDS = [
    *((layout, BLOCK) for layout in KVCacheLayout),
    (KVCacheLayout.LBHNC, 16),
    (KVCacheLayout.LBNHC, 16),
]
STOPS = [BLOCK, 150, 192, 200, 208, 255, 256]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize(("layout", "kernel"), GRIDS)
def test_what_no_token_fills_is_cleared_and_nothing_else(
    layout: KVCacheLayout, kernel: int, stop: int
) -> None:
    views, config, made = engine(layout, kernel)
    UnfilledBlocks(config, views, made.shard.regions).clear(held(made, OWN, BEGIN), stop)
    expected = np.zeros((BLOCKS, BLOCK), int)
    for index, block in enumerate(OWN):
        for token in range(BLOCK):
            if block and BEGIN + index * BLOCK + token >= stop:
                expected[block, token] = 1
    for name in NAMES:
        np.testing.assert_array_equal(cleared(views[name], kernel), expected)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("kernel", [BLOCK, 32])
def test_of_packed_blocks_those_are_cleared_that_hold_no_token(kernel: int, stop: int) -> None:
    """The others are received whole, prefill's cleared rest with them."""
    views, config, made = engine(KVCacheLayout.LBHNC, kernel, "CPU_ATTN")
    UnfilledBlocks(config, views, made.shard.regions).clear(held(made, OWN, BEGIN), stop)
    expected = np.zeros((BLOCKS, BLOCK), int)
    for index, block in enumerate(OWN):
        for first in range(0, BLOCK, kernel):
            if block and BEGIN + index * BLOCK + first >= stop:
                expected[block, first : first + kernel] = 1
    for name in NAMES:
        np.testing.assert_array_equal(cleared(views[name], kernel), expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.bfloat16])
def test_any_dtype(dtype: Any) -> None:
    views, config, made = engine(KVCacheLayout.LBNHC, 16, dtype=dtype)
    UnfilledBlocks(config, views, made.shard.regions).clear(held(made, OWN, BEGIN), 200)
    assert cleared(views[NAMES[0]], 16).sum() == 256 - 200


def test_caches_that_vllm_never_clears_are_left_alone() -> None:
    """Their blocks hold KV from before, of which attention's mask makes nothing."""
    views, config, made = engine(KVCacheLayout.LBHNC, 16, hybrid=False)
    held_here = EngineBlocks(made.shape.groups, [GroupBlocks(OWN, BEGIN)])
    UnfilledBlocks(config, views, made.shard.regions).clear(held_here, 200)
    assert not cleared(views[NAMES[0]], 16).any()


def test_a_hybrids_34_and_66() -> None:
    """Of 1500 tokens, 1056 and 444 in two blocks; 444 is 27 kernel blocks of 16 and 12 tokens."""
    groups = (GroupShape(LayerKind.FULL_ATTENTION, 1056, 66), GroupShape(LayerKind.MAMBA, 1056))
    blocks = EngineBlocks(groups, [GroupBlocks((7, 3)), GroupBlocks((4,))])
    assert list(unfilled(blocks, 1500)) == [Unfilled(0, 3 * 66 + 27, 12, 4 * 66)]
    assert list(unfilled(blocks, 2112)) == []


@pytest.mark.usefixtures("one_rank")
def test_a_worker_clears_before_anything_is_posted() -> None:
    views, config, made = engine(KVCacheLayout.LBHNC, 16)
    seen: list[int] = []

    class Receiver:
        def receive(self, orders: Any, since: float, events: Any) -> None:
            seen.extend(cleared(views[NAMES[0]], 16).sum() for _ in orders)
            assert events == []

        def pass_on(self, events: Any) -> None:
            assert events == []

    transfer = SimpleNamespace(is_kv_producer=False, is_kv_consumer=True)
    role: Any = WorkerRole(
        SimpleNamespace(kv_transfer_config=transfer), config, SimpleNamespace(), "e/1"
    )
    role._groups, role._receiver = made.shape.groups, Receiver()
    role._unfilled = UnfilledBlocks(config, views, made.shard.regions)
    ticket = Ticket("e/2", "h", 5, "r", 7, ((1,), (1,)), 16, 250, b"d" * 16, 0.0)
    blocks = GroupBlocks(OWN, BEGIN), GroupBlocks((1,))
    role.start(StepOrders(receive=[ReceiveOrder("d1", ticket, blocks, 64, 250, 60.0)]))
    assert seen == [256 - 250]
