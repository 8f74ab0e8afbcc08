from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.plan import CoverageError
from pdcluster_connector.plan.block_pairs import (
    BlockList,
    Pairs,
    expand_blocks,
    pair_blocks,
)


def spelled_out(blocks: BlockList) -> dict[int, tuple[int, int]]:
    """Token -> (block, offset), one by one."""
    return {
        blocks.first_token + position * blocks.block_tokens + offset: (block, offset)
        for position, block in enumerate(blocks.blocks)
        if block >= 0
        for offset in range(blocks.block_tokens)
    }


def tokens_of(pairs: Pairs) -> list[tuple[int, int, int, int]]:
    return [
        (int(pb), int(po) + i, int(db), int(do) + i)
        for pb, po, db, do, n in zip(
            pairs.prefill.blocks,
            pairs.prefill.offsets,
            pairs.decode.blocks,
            pairs.decode.offsets,
            pairs.tokens,
            strict=True,
        )
        for i in range(int(n))
    ]


@st.composite
def block_lists(draw: st.DrawFn) -> BlockList:
    ids = draw(st.lists(st.integers(0, 99), unique=True, max_size=12))
    nulls = draw(st.sets(st.integers(0, 11), max_size=2))
    return BlockList(
        blocks=[-1 if i in nulls else block for i, block in enumerate(ids)],
        block_tokens=draw(st.integers(1, 9)),
        first_token=draw(st.integers(0, 20)),
    )


@given(block_lists(), block_lists(), st.integers(0, 60), st.integers(0, 60))
def test_each_token_is_paired_once_and_in_order_or_the_interval_fails(
    prefill: BlockList, decode: BlockList, start: int, length: int
) -> None:
    stop = start + length
    ours, theirs = spelled_out(prefill), spelled_out(decode)
    wanted = range(start, stop)
    if not all(token in ours and token in theirs for token in wanted):
        with pytest.raises(CoverageError):
            pair_blocks(prefill, decode, start, stop)
        return
    pairs = pair_blocks(prefill, decode, start, stop)
    assert tokens_of(pairs) == [(*ours[token], *theirs[token]) for token in wanted]
    for column in (pairs.prefill.blocks, pairs.prefill.offsets, pairs.decode.blocks, pairs.tokens):
        assert column.dtype == np.int32


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 500))
def test_pieces_are_as_few_as_the_two_grids_allow(ours: int, theirs: int, length: int) -> None:
    prefill = BlockList(range(-(-length // ours)), ours)
    decode = BlockList(range(-(-length // theirs)), theirs)
    boundaries = {t for t in range(1, length) if t % ours == 0 or t % theirs == 0}
    assert len(pair_blocks(prefill, decode, 0, length).tokens) == len(boundaries) + 1


def test_a_hit_that_decode_lists_or_leaves_out_pairs_alike() -> None:
    prefill = BlockList([10, 11, 12, 13], 16)
    listed = pair_blocks(prefill, BlockList([1, 2, 3, 4], 16), 32, 50)
    left_out = pair_blocks(prefill, BlockList([3, 4], 16, 32), 32, 50)
    assert tokens_of(listed) == tokens_of(left_out)
    assert listed.prefill.blocks.tolist() == [12, 13]
    assert listed.tokens.tolist() == [16, 2]


def test_an_empty_interval_needs_no_block() -> None:
    assert len(pair_blocks(BlockList([], 16), BlockList([], 16), 5, 5).tokens) == 0


@pytest.mark.parametrize(
    ("blocks", "part"),
    [
        ([4, 4], "block 4 is listed twice"),
        ([9, 9], "block 9 is listed twice"),
        ([4, -1], "no block for token 16"),
        ([4], r"hold tokens \[0, 16\)"),
        ([4, 2**31], "out of range"),
        ([4, 2**80], "not a list of ids"),
        ([4, -(2**80)], "not a list of ids"),
        ([4, 5.0], "not a list of ids"),
        ([4, "5"], "not a list of ids"),
        ([4, [5]], "not a list of ids"),
        ([[4], [5]], "not a list of ids"),
        ([4, None], "not a list of ids"),
        ([True, False], "not a list of ids"),
    ],
)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_list_that_does_not_hold_the_interval_fails_by_name(blocks, part, side) -> None:
    lists = {"prefill": BlockList([1, 2], 16), "decode": BlockList([1, 2], 16)}
    lists[side] = BlockList(blocks, 16)
    with pytest.raises(CoverageError, match=part) as caught:
        pair_blocks(lists["prefill"], lists["decode"], 0, 20)
    assert side in str(caught.value)


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (-1, -1), (5, 4), (0, 2**31), (0, 2**70)])
def test_what_is_no_interval_fails_before_anything_is_allocated(start: int, stop: int) -> None:
    with pytest.raises(CoverageError):
        pair_blocks(BlockList([1], 16), BlockList([1], 16), start, stop)


@pytest.mark.parametrize(("size", "first"), [(0, 0), (-16, 0), (16, -16), (2**40, 0)])
def test_a_grid_that_cannot_be_fails(size: int, first: int) -> None:
    said = f"prefill blocks of {size} tokens from token {first} on"
    with pytest.raises(CoverageError, match=said):
        pair_blocks(BlockList([1], size, first), BlockList([1], 16), 0, 4)


@given(st.lists(st.integers(1, 10**6), max_size=20), st.integers(1, 40))
def test_expansion_goes_by_the_engines_own_ratio(logical: list[int], ratio: int) -> None:
    expected = [block * ratio + i for block in logical for i in range(ratio)]
    assert expand_blocks(logical, ratio).tolist() == expected


@given(st.lists(st.integers(-1, 10**6), max_size=20), st.integers(1, 40), st.integers(0, 900))
def test_as_many_kernel_blocks_as_are_needed(logical: list[int], ratio: int, most: int) -> None:
    whole = expand_blocks(logical, ratio)
    cut = expand_blocks(logical, ratio, most)
    assert min(most, len(whole)) <= len(cut) < most + ratio + (not most)
    assert cut.tolist() == whole[: len(cut)].tolist()


def test_the_ratios_of_a_hybrid_pair_by_token() -> None:
    """34 kernel blocks a logical block on prefill, 66 on decode, of 16 tokens each."""
    prefill = BlockList(expand_blocks([5, 9], 34), 16)
    decode = BlockList(expand_blocks([7], 66), 16)
    pairs = pair_blocks(prefill, decode, 0, 66 * 16)
    expected = [5 * 34 + i for i in range(34)] + [9 * 34 + i for i in range(32)]
    assert pairs.prefill.blocks.tolist() == expected
    assert pairs.decode.blocks.tolist() == [7 * 66 + i for i in range(66)]


def test_the_null_block_and_absent_ones_stay_absent() -> None:
    assert expand_blocks([0, 3, -1], 2).tolist() == [-1, -1, 6, 7, -1, -1]
    with pytest.raises(CoverageError, match="no block for token 0"):
        pair_blocks(BlockList(expand_blocks([0], 1), 16), BlockList([1], 16), 0, 3)


@pytest.mark.parametrize(
    ("logical", "ratio"), [([2**30], 2), ([1], 0), ([1], 2**40), ([2**90], 1), (["x"], 1)]
)
def test_ids_that_do_not_fit_are_not_expanded(logical, ratio) -> None:
    with pytest.raises(CoverageError):
        expand_blocks(logical, ratio)


def test_blocks_on_either_side_of_the_interval_are_not_needed() -> None:
    held = [-1, 5, 6, -1, 5]
    pairs = pair_blocks(BlockList(held, 16), BlockList(held, 16), 16, 48)
    assert pairs.prefill.blocks.tolist() == pairs.decode.blocks.tolist() == [5, 6]


@pytest.mark.parametrize(("start", "named"), [(3, 4), (5, 5)])
def test_the_first_token_that_is_wanted_and_not_held_is_named(start: int, named: int) -> None:
    held, holes = BlockList([1, 2, 3], 4), BlockList([1, -1, -1], 4)
    with pytest.raises(CoverageError, match=f"prefill holds no block for token {named}$"):
        pair_blocks(holes, held, start, 12)


def test_a_list_without_end_is_no_list_of_ids() -> None:
    with pytest.raises(CoverageError, match="not a list of ids") as caught:
        pair_blocks(BlockList(range(2**70), 16), BlockList([1], 16), 0, 1)
    assert caught.value.reason is Reason.COVERAGE_INCOMPLETE


def test_the_longest_interval_that_can_be_is_paired() -> None:
    most = 2**31 - 1
    pairs = pair_blocks(BlockList([3], most), BlockList([5], most), 0, most)
    assert (pairs.prefill.blocks.tolist(), pairs.decode.blocks.tolist()) == ([3], [5])
    assert pairs.tokens.tolist() == [most]


def test_the_largest_ids_whose_kernel_blocks_have_32_bits_are_expanded() -> None:
    assert expand_blocks([2**30 - 2], 2).tolist() == [2**31 - 4, 2**31 - 3]
    with pytest.raises(CoverageError, match=f"logical block {2**30} is out of range"):
        expand_blocks([1, 2**30], 2)


def test_what_is_wrong_in_a_list_is_named_wherever_it_stands() -> None:
    """Also in a list that begins behind the first token of a prompt."""
    held = BlockList(range(12), 4, 8)
    with pytest.raises(CoverageError, match=r"prefill holds no block for token 16$"):
        pair_blocks(BlockList([7, 8, -1, 9], 4, 8), held, 8, 24)
    with pytest.raises(CoverageError, match="decode block 7 is listed twice"):
        pair_blocks(held, BlockList([2, 7, 3, 7], 4, 8), 8, 24)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint32, np.uint64])
def test_ids_may_be_whole_numbers_of_any_width(kind: type) -> None:
    assert expand_blocks(np.array([3, 0], kind), 2).tolist() == [6, 7, -1, -1]
