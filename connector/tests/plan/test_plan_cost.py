"""How many descriptors a request takes, counted against the very indices that would be posted."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from cache_orders import laid_out
from hypothesis import given, strategies as st
from msgspec.structs import replace

from pdcluster_connector.compat.shape import GroupShape, LayerKind
from pdcluster_connector.plan.block_pairs import (
    BlockList,
    EngineBlocks,
    GroupBlocks,
    pair_blocks,
)
from pdcluster_connector.plan.geometry import Shard
from pdcluster_connector.plan.peer_plan import MANY, PeerPlan, cost_notice, descriptors, plan_peer
from pdcluster_connector.plan.request_descriptors import descriptor_indices, plan_request

LAYERS, BLOCKS, TOKENS, HEADS = 3, 80, 16, 8


def engine(
    order: str, tensor: int, base: int, tokens: int = TOKENS, layers: int = LAYERS
) -> list[Shard]:
    local = HEADS // tensor
    return [
        Shard((0, rank), laid_out(
            order, base + (rank << 30), layers, BLOCKS, local, tokens, 32, first_head=rank * local
        )[0])
        for rank in range(tensor)
    ]  # fmt: skip


def plan(
    orders: tuple[str, str],
    tensors: tuple[int, int],
    blocks: int = TOKENS,
    layers: int = LAYERS,
    decode_blocks: int = TOKENS,
) -> PeerPlan:
    prefill = engine(orders[0], tensors[0], 1 << 40, blocks, layers)
    return plan_peer(engine(orders[1], tensors[1], 1 << 41, decode_blocks, layers)[0], prefill)


def posted(of: PeerPlan, tokens: int, block: int = TOKENS) -> int:
    blocks = np.random.default_rng(1).permutation(BLOCKS).astype(np.int32)
    pairs = pair_blocks(
        BlockList(blocks[: -(-tokens // block)], block), BlockList(blocks, TOKENS), 0, tokens
    )
    return sum(len(part.decode_indices) for part in descriptor_indices(of, pairs))


@pytest.mark.parametrize("tokens", [1, 16, 100, 1000])
@pytest.mark.parametrize("tensors", [(1, 1), (2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize(
    "orders", [("LBHNC", "LBHNC"), ("LBNHC", "LBNHC"), ("LBNHC", "LBHNC"), ("BLHNC", "BLHNC")]
)
def test_as_many_as_are_posted(
    orders: tuple[str, str], tensors: tuple[int, int], tokens: int
) -> None:
    made = plan(orders, tensors)
    assert descriptors(made, tokens)[0] == posted(made, tokens)


@given(tokens=st.integers(1, 1000), limit=st.integers(1, 700), tensors=st.sampled_from([1, 2, 4]))
def test_slices_are_what_the_whole_is(tokens: int, limit: int, tensors: int) -> None:
    made = plan(("LBNHC", "LBHNC"), (4, tensors))
    blocks = np.random.default_rng(tokens).permutation(BLOCKS).astype(np.int32)
    pairs = pair_blocks(BlockList(blocks, TOKENS), BlockList(blocks[::-1], TOKENS), 0, tokens)
    for part in descriptor_indices(made, pairs):
        cuts = [part.between(at, at + limit) for at in range(0, part.count, limit)]
        for whole, number in ((part.prefill_indices, 0), (part.decode_indices, 1)):
            assert np.array_equal(whole, np.concatenate([cut[number] for cut in cuts]))
        assert all(cut[0].size == limit for cut in cuts[:-1])


def test_a_long_prompt_is_planned_without_a_list_of_its_descriptors() -> None:
    """128k tokens and 80 layers: numpy would let no other thread run while it makes the list."""
    blocks = np.random.default_rng(1).permutation(8192).astype(np.int32)
    held = [
        Shard((0, rank), laid_out("LBHNC", base, 80, 8192, heads, TOKENS, 32, first_head=first)[0])
        for rank, base, heads, first in ((0, 1 << 40, 4, 0), (1, 1 << 42, 4, 4), (0, 1 << 44, 8, 0))
    ]
    made = plan_peer(held[2], held[:2])
    pairs = pair_blocks(BlockList(blocks, TOKENS), BlockList(blocks, TOKENS), 0, 8192 * TOKENS)
    tracemalloc.start()
    try:
        parts = descriptor_indices(made, pairs)
        for part in parts:
            part.between(part.count - 1024, part.count)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    count = sum(part.count for part in parts)
    assert count == 2 * 80 * 8192
    assert peak < count, "less than a byte for each descriptor"


def test_heads_first_needs_one_descriptor_a_block_and_layer() -> None:
    for tensors, sources in (((1, 1), 1), ((2, 4), 1), ((4, 2), 2)):
        made = plan(("LBHNC", "LBHNC"), tensors)
        assert descriptors(made, 1000) == (63 * LAYERS * sources,) * 2
        assert cost_notice(made, "LBHNC") == ""


def test_tokens_first_needs_one_a_token_between_different_sizes_and_says_so() -> None:
    made = plan(("LBNHC", "LBNHC"), (2, 4))
    assert descriptors(made, 1000) == (63 * 16 * LAYERS, 63 * LAYERS)
    notice = cost_notice(made, "LBNHC")
    assert "1,000 tokens take 3,024 descriptors on this rank; 189 would be enough" in notice
    assert "(LBNHC)" in notice
    assert "VLLM_KV_CACHE_LAYOUT=LBHNC" in notice
    assert cost_notice(plan(("LBNHC", "LBNHC"), (2, 2)), "LBNHC") == "", "equal sizes: whole blocks"
    assert "on prefill" not in cost_notice(made, None)


def test_blocks_of_different_sizes_are_not_blamed_on_the_layout() -> None:
    made = plan(("LBHNC", "LBHNC"), (1, 1), blocks=32)
    assert descriptors(made, 960)[0] == posted(made, 960, 32) == 60 * LAYERS * HEADS
    assert cost_notice(made, "LBHNC") == ""


@pytest.mark.parametrize(
    ("tensors", "taken", "larger"), [((4, 2), 10_080, 2560), ((8, 8), 5040, 1280)]
)
def test_many_descriptors_are_said_with_what_needs_fewer(
    tensors: tuple[int, int], taken: int, larger: int
) -> None:
    """The numbers that it promises are those of plans with these settings."""
    made = plan(("LBHNC", "LBHNC"), tensors, layers=80)
    with_64 = plan(("LBHNC", "LBHNC"), tensors, 64, 80, 64)
    outermost = plan(("BHLNC", "BHLNC"), tensors, layers=80)
    counts = [descriptors(one, 1000)[0] for one in (made, with_64, outermost)]
    assert counts[:2] == [taken, larger]
    assert cost_notice(made, "LBHNC") == (
        f"1,000 tokens take up to {taken:,} descriptors on this rank: {taken * 3 / 1000:.0f} ms to "
        "post at 3 µs each. Layers lie apart on prefill (LBHNC). Set on both engines: "
        f"--block-size 64 (then {larger:,}), or transfer.kvLayout BHLNC if their attention "
        f"backends have it (then {counts[2]:,})"
    )
    assert cost_notice(with_64, "LBHNC") == cost_notice(outermost, "BHLNC") == ""


def test_many_descriptors_because_of_different_block_sizes_need_equal_ones() -> None:
    """Not to the smaller one: CUTLASS_MLA takes 128 and no smaller one."""
    made = plan(("LBHNC", "LBHNC"), (1, 1), blocks=128, layers=80, decode_blocks=64)
    equal = plan(("LBHNC", "LBHNC"), (1, 1), 128, 80, 128)
    assert descriptors(made, 1000)[0] > MANY > descriptors(equal, 1000)[0] == 640
    assert cost_notice(made, None).endswith("apart. Set on both engines: --block-size 128")


def test_blocks_that_are_larger_than_a_kernel_takes_are_not_said_to_be_too_small() -> None:
    made = plan(("LBHNC", "LBHNC"), (1, 1), layers=80)
    for ratio in (1, 4):
        groups = (GroupShape(LayerKind.FULL_ATTENTION, TOKENS * ratio, ratio),)
        said = cost_notice(made, "LBHNC", groups)
        assert ("--block-size 64 (then 1,280), or" in said) == (ratio == 1)
        assert "transfer.kvLayout BHLNC" in said


def test_up_to_the_bound_nothing_is_said() -> None:
    layers = MANY // 63
    assert descriptors(made := plan(("LBHNC", "LBHNC"), (1, 1), layers=layers), 1000)[0] <= MANY
    assert cost_notice(made, "LBHNC") == ""
    assert cost_notice(plan(("LBHNC", "LBHNC"), (1, 1), layers=layers + 1), "LBHNC")


@given(tokens=st.integers(1, 1000), window=st.integers(1, 1200))
def test_with_a_window_only_its_blocks_count(tokens: int, window: int) -> None:
    made = plan(("LBHNC", "LBHNC"), (4, 2))
    groups = (GroupShape(LayerKind.SLIDING_WINDOW, TOKENS, window=window),)
    blocks = GroupBlocks(np.arange(1, BLOCKS, dtype=np.int32))  # block 0 is held by nobody
    held = EngineBlocks(groups, (blocks,))
    parts = plan_request(made, held, held, start=0, stop=tokens, tokens=tokens)
    assert descriptors(made, tokens, groups)[0] == sum(part.count for part in parts)


def test_layers_with_a_window_are_not_said_to_take_many() -> None:
    """GPT-OSS: what every layer would take with all tokens is said of no layer with a window."""
    made = plan(("LBHNC", "LBHNC"), (2, 1), layers=36)
    of = {None: 4536, 128: 36 * 2 * 9}
    for window, taken in of.items():
        groups = (GroupShape(LayerKind.SLIDING_WINDOW, TOKENS, window=window),)
        assert descriptors(made, 1000, groups)[0] == taken
        assert bool(cost_notice(made, "LBHNC", groups)) == (taken > MANY)


def test_a_state_takes_its_descriptors_once_whatever_the_tokens() -> None:
    """A state of two arrays in one layer, and a layer of attention beside it."""

    def shard(base: int) -> Shard:
        attention = laid_out("LBHNC", base, 1, BLOCKS, 1, TOKENS, 32)[0]
        states = [
            replace(
                laid_out("LBHNC", base + (number << 30), 1, BLOCKS, 1, 1, 64, opaque=True)[0][0],
                layer="m",
                part=f"part{number}",
                group=1,
            )
            for number in (1, 2)
        ]
        return Shard((0, 0), (*attention, *states))

    made = plan_peer(shard(1 << 40), [shard(1 << 41)])
    for tokens in (1, 16, 160):
        assert descriptors(made, tokens) == (2 + -(-tokens // TOKENS),) * 2
