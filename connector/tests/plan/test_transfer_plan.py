"""What a plan looks like, and that bad regions and bad block ids never become an address."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from cache_orders import laid_out
from flat_rows import descriptors
from hypothesis import given, strategies as st
from msgspec.structs import replace

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.plan import PlanError
from pdcluster_connector.plan.block_pairs import BlockList, Pairs, pair_blocks
from pdcluster_connector.plan.geometry import Region, Shard
from pdcluster_connector.plan.peer_plan import PeerPlan, plan_peer
from pdcluster_connector.plan.request_descriptors import descriptor_indices

BASE = 1 << 40
LIMIT = 2**31

T = TypeVar("T")


def packed(
    *,
    layers=2,
    heads=4,
    start=0,
    tokens=16,
    blocks=32,
    content=8,
    base=BASE,
    rank=(0, 0),
    opaque=True,
) -> Shard:
    """A shard in vLLM's CPU layout: per layer [block, head, tokens * content]."""
    unit = tokens * content
    regions = tuple(
        Region(
            layer=f"layer{layer}",
            base=base + layer * blocks * heads * unit,
            num_blocks=blocks,
            block_stride=heads * unit,
            block_tokens=tokens,
            head_start=start,
            head_stop=start + heads,
            head_stride=unit,
            token_stride=None if opaque else content,
            token_bytes=content,
        )
        for layer in range(layers)
    )
    return Shard(rank, regions)


def packed_together(layers=4, heads=2, base=BASE) -> Shard:
    """The same with blocks outermost: [block, layer, head, tokens * content]."""
    unit = 128
    regions = tuple(
        Region(
            f"layer{i}", base + i * heads * unit, 8, layers * heads * unit, 16, 0, heads, unit,
            None, 8,
        )
        for i in range(layers)
    )  # fmt: skip
    return Shard((0, 0), regions)


def changed(shard: Shard, **fields) -> Shard:
    return replace(shard, regions=tuple(replace(region, **fields) for region in shard.regions))


def test_equal_shards_need_one_row_a_layer_and_one_descriptor_a_block() -> None:
    plan = plan_peer(packed(base=BASE * 2), [packed(content=8)])
    (source,) = plan.sources
    assert source.rank == (0, 0)
    assert source.prefill_rows.tolist() == [
        [BASE, 512, 0, 512, 32],
        [BASE + 32 * 512, 512, 0, 512, 32],
    ]
    assert (source.decode_rows[:, 0] - source.prefill_rows[:, 0] == BASE).all()
    (part,) = descriptor_indices(
        plan, pair_blocks(BlockList([9, 4], 16), BlockList([1, 2], 16), 0, 30)
    )
    assert part.prefill_indices.tolist() == [4, 9, 36, 41], "sorted by prefill block"
    assert part.decode_indices.tolist() == [2, 1, 34, 33]
    assert part.nbytes == 4 * 512


def test_a_layout_with_blocks_outermost_moves_all_layers_of_a_block_at_once() -> None:
    plan = plan_peer(packed_together(base=BASE * 2), [packed_together()])
    assert plan.sources[0].prefill_rows.tolist() == [[BASE, 1024, 0, 1024, 8]]


def test_blocks_outermost_on_one_side_only_are_not_joined() -> None:
    apart = packed(layers=4, heads=2, blocks=8)
    plan = plan_peer(packed_together(base=BASE * 2), [apart])
    assert plan.sources[0].prefill_rows[:, 1].tolist() == [256] * 4


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_a_block_of_one_head_is_one_descriptor_in_either_order(order: str) -> None:
    """With one head, the strides of heads and of tokens may be the same."""
    shards = [Shard((0, 0), laid_out(order, base, 1, 8, 1, 16, 32)[0]) for base in (BASE * 2, BASE)]
    (source,) = plan_peer(shards[0], shards[1:]).sources
    assert source.prefill_rows.tolist() == [[BASE, 512, 0, 512, 8]]
    assert source.decode_rows.tolist() == [[BASE * 2, 512, 0, 512, 8]]


def test_each_side_s_rows_are_on_its_own_device() -> None:
    decode, prefill = changed(packed(base=BASE * 2), device=3), changed(packed(), device=5)
    (source,) = plan_peer(decode, [prefill]).sources
    assert set(source.decode_rows[:, 2].tolist()) == {3}
    assert set(source.prefill_rows[:, 2].tolist()) == {5}


def test_half_of_the_heads_come_from_the_right_place() -> None:
    plan = plan_peer(packed(heads=2, start=2, base=BASE * 2), [packed(heads=4)])
    assert plan.sources[0].prefill_rows[0].tolist() == [BASE + 2 * 128, 256, 0, 512, 32]
    assert plan.sources[0].decode_rows[0].tolist() == [BASE * 2, 256, 0, 256, 32]


def test_dense_blocks_of_another_size_are_one_row_of_units() -> None:
    one_head = {"heads": 1, "opaque": False, "layers": 1}
    plan = plan_peer(packed(tokens=64, base=BASE * 2, **one_head), [packed(**one_head)])
    assert plan.sources[0].decode_rows.tolist() == [[BASE * 2, 128, 0, 128, 128]]
    pairs = pair_blocks(BlockList([5, 6, 7], 16), BlockList([2], 64), 0, 48)
    (part,) = descriptor_indices(plan, pairs)
    assert part.prefill_indices.tolist() == [5, 6, 7]
    assert part.decode_indices.tolist() == [8, 9, 10], "neighbours, so that NIXL merges them"


def test_the_bytes_of_a_request_are_those_of_all_its_layers() -> None:
    """Also of layers with other sizes, which are indexed apart."""

    def mixed(base: int) -> Shard:
        small, large = packed(layers=1, base=base), packed(layers=2, content=24, base=base * 2)
        return replace(small, regions=(small.regions[0], large.regions[1]))

    (part,) = descriptor_indices(
        plan_peer(mixed(BASE), [mixed(BASE * 4)]), pairs_of([1, 2], [3, 4])
    )
    assert part.nbytes == 2 * 16 * 4 * (8 + 24)


def test_groups_are_indexed_apart() -> None:
    """Whatever numbers the two engines give them."""
    decode, prefill = in_groups(packed(base=BASE * 2), 2, 0), in_groups(packed(), 0, 1)
    plan = plan_peer(decode, [prefill])
    assert plan.units == {(0, 2): 16, (1, 0): 16}
    pairs = pair_blocks(BlockList([3], 16), BlockList([4], 16), 0, 16)
    indices = [
        descriptor_indices(plan, pairs, key)[0].prefill_indices.tolist() for key in ((0, 2), (1, 0))
    ]
    assert indices == [[3], [35]]
    assert descriptor_indices(plan, pairs, (0, 0)) == []


def in_groups(shard: Shard, *groups: int) -> Shard:
    regions = zip(shard.regions, groups, strict=True)
    return replace(shard, regions=tuple(replace(r, group=group) for r, group in regions))


def test_an_interval_begins_where_every_class_of_the_groups_has_a_unit() -> None:
    [source] = plan_peer(packed(base=BASE * 2), [packed()]).sources
    [known] = source.classes
    classes = tuple(
        dataclasses.replace(known, key=dataclasses.replace(known.key, unit=unit))
        for unit in (2, 3, 1)
    )
    plan = PeerPlan((dataclasses.replace(source, classes=classes),))
    assert plan.units == {known.key.groups: 6}


def test_an_empty_request_moves_nothing() -> None:
    plan = plan_peer(packed(base=BASE * 2), [packed()])
    (part,) = descriptor_indices(plan, pair_blocks(BlockList([], 16), BlockList([], 16), 0, 0))
    assert (part.nbytes, part.prefill_indices.size, part.decode_indices.size) == (0, 0, 0)


# What must be refused while planning.


@pytest.mark.parametrize(
    "fields",
    [
        {"num_blocks": 0},
        {"num_blocks": -1},
        {"num_blocks": LIMIT},
        {"block_tokens": 0},
        {"token_bytes": 0},
        {"token_bytes": -8},
        {"head_start": -1, "head_stop": 3},
        {"block_stride": 511},
        {"block_stride": -512},
        {"head_stride": 127},
        {"head_stride": 0},
        {"head_stride": -128},
        {"base": -4096},
        {"base": 2**63 - 512},
        {"base": 2**200},
        {"block_stride": 2**60},
    ],
)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_region_that_cannot_be_is_refused_by_name(fields: dict, side: str) -> None:
    sides = {"prefill": packed(), "decode": packed(base=BASE * 2)}
    sides[side] = changed(sides[side], **fields)
    if "block_tokens" in fields or "token_bytes" in fields:
        sides = {name: changed(shard, **fields) for name, shard in sides.items()}
        side = "decode"  # both are wrong alike; decode is looked at first
    with pytest.raises(PlanError) as caught:
        plan_peer(sides["decode"], [sides["prefill"]])
    assert caught.value.reason is Reason.LAYOUT_UNSUPPORTED
    assert side in caught.value.message


def test_a_region_without_heads_is_refused() -> None:
    empty = changed(packed(), head_start=2, head_stop=2)
    with pytest.raises(PlanError):
        plan_peer(empty, [packed()])


@pytest.mark.parametrize(
    ("token_stride", "head_stride", "fits"),
    [
        (8, 128, True),
        (32, 8, True),
        (8, 120, False),
        (24, 8, False),
        (40, 8, True),
        (-8, 128, False),
    ],
)
def test_heads_and_tokens_may_interleave_but_not_overlap(token_stride, head_stride, fits) -> None:
    strides = {"token_stride": token_stride, "head_stride": head_stride, "block_stride": 1024}
    prefill = changed(packed(), **strides)
    if fits:
        assert plan_peer(packed(base=BASE * 2, opaque=False), [prefill]).sources
    else:
        with pytest.raises(PlanError, match="overlap"):
            plan_peer(packed(base=BASE * 2, opaque=False), [prefill])


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ({"tokens": 32}, {"tokens": 128}, Reason.BLOCK_INTERIOR_OPAQUE),
        ({"tokens": 128}, {"tokens": 32}, Reason.BLOCK_INTERIOR_OPAQUE),
        ({"opaque": False}, {}, Reason.BLOCK_INTERIOR_OPAQUE),
        ({}, {"opaque": False}, Reason.BLOCK_INTERIOR_OPAQUE),
        ({"content": 4}, {}, Reason.LAYER_MISMATCH),
        ({"heads": 2}, {}, Reason.SHARD_MISSING),
        ({"layers": 1}, {}, Reason.LAYER_MISMATCH),
    ],
)
def test_shards_that_do_not_correspond_are_refused(prefill, decode, reason) -> None:
    with pytest.raises(PlanError) as caught:
        plan_peer(packed(base=BASE * 2, **decode), [packed(**prefill)])
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        (
            {"content": 4},
            {},
            "layer layer0 has 4 bytes a token and head on prefill and 8 on decode",
        ),
        (
            {"tokens": 32},
            {"tokens": 128},
            (
                "layer layer0: a block cannot be cut by token, and block sizes differ "
                "(prefill 32, decode 128 tokens)"
            ),
        ),
    ],
)
def test_what_differs_is_told_of_the_right_side(prefill, decode, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_peer(packed(base=BASE * 2, **decode), [packed(**prefill)])
    assert caught.value.message == message


@pytest.mark.parametrize("ours", list(Memory))
@pytest.mark.parametrize("theirs", list(Memory))
def test_each_side_of_a_plan_says_its_own_memory(ours: Memory, theirs: Memory) -> None:
    plan = plan_peer(
        changed(packed(base=BASE * 2), memory=ours), [changed(packed(), memory=theirs)]
    )
    (source,) = plan.sources
    assert (source.decode_memory, source.prefill_memory) == (ours, theirs)


def test_mixed_memory_in_one_shard_is_refused_and_either_alone_is_not() -> None:
    prefill = changed(packed(), memory=Memory.VRAM)
    assert plan_peer(packed(base=BASE * 2), [prefill]).sources[0].prefill_memory is Memory.VRAM
    mixed = replace(prefill, regions=(prefill.regions[0], packed().regions[1]))
    with pytest.raises(PlanError) as caught:
        plan_peer(packed(base=BASE * 2), [mixed])
    assert caught.value.reason is Reason.MEMORY_TYPE_UNSUPPORTED
    assert caught.value.message == "prefill keeps one shard's KV in DRAM and VRAM"
    ours = changed(packed(base=BASE * 2), memory=Memory.VRAM)
    mixed = replace(ours, regions=(ours.regions[0], packed(base=BASE * 2).regions[1]))
    with pytest.raises(PlanError, match="decode keeps one shard's KV in DRAM and VRAM"):
        plan_peer(mixed, [packed()])


def test_more_descriptors_than_can_be_indexed_are_refused() -> None:
    huge = [packed(layers=5, heads=1, blocks=2**29, base=base) for base in (BASE, BASE * 8)]
    small = packed(layers=5, heads=1, blocks=8, base=BASE * 16)
    for decode, prefill in (huge, (huge[0], small), (small, huge[1])):
        with pytest.raises(PlanError, match=f"{5 * 2**29} descriptors are more"):
            plan_peer(decode, [prefill])
    most = [packed(layers=1, heads=1, blocks=LIMIT - 1, base=base) for base in (BASE, BASE * 8)]
    assert plan_peer(most[0], most[1:]).sources, "as many as 32 bits can count"


# What must be refused for one request.


def pairs_of(prefill_blocks, decode_blocks, stop=20, tokens=16) -> Pairs:
    return pair_blocks(BlockList(prefill_blocks, tokens), BlockList(decode_blocks, tokens), 0, stop)


def with_side(pairs: Pairs, side: str, **fields: Any) -> Pairs:
    """``pairs`` with other fields on one side."""
    return dataclasses.replace(pairs, **{side: getattr(pairs, side)._replace(**fields)})


@pytest.mark.parametrize("block", [32, 33, 2**31 - 1])
def test_a_block_outside_of_the_cache_fails_that_request(block: int) -> None:
    plan = plan_peer(packed(base=BASE * 2), [packed()])
    assert descriptor_indices(plan, pairs_of([31, 30], [31, 30]))
    with pytest.raises(PlanError) as caught:
        descriptor_indices(plan, pairs_of([1, block], [1, 2]))
    assert caught.value.reason is Reason.TICKET_INVALID
    assert str(block) in caught.value.message
    with pytest.raises(PlanError) as caught:
        descriptor_indices(plan, pairs_of([1, 2], [1, block]))
    assert caught.value.reason is Reason.COVERAGE_INCOMPLETE


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(("blocks", "named"), [([3, -1], -1), ([3, 40], 40), ([-2, 40], -2)])
def test_the_block_that_is_outside_is_named(side: str, blocks: list[int], named: int) -> None:
    plan = plan_peer(packed(base=BASE * 2), [packed()])
    pairs = with_side(pairs_of([1, 2], [1, 2]), side, blocks=np.array(blocks, np.int32))
    with pytest.raises(PlanError) as caught:
        descriptor_indices(plan, pairs)
    assert caught.value.message == f"{side} block {named} is outside of the cache's 32 blocks"


def test_each_side_has_its_own_bound() -> None:
    plan = plan_peer(packed(base=BASE * 2, blocks=8), [packed(blocks=32)])
    assert descriptor_indices(plan, pairs_of([31, 30], [7, 6]))
    with pytest.raises(PlanError, match="decode block 8"):
        descriptor_indices(plan, pairs_of([31, 30], [7, 8]))


@pytest.mark.parametrize("tokens", [8, 32])
def test_pairs_of_another_block_size_are_refused(tokens: int) -> None:
    plan = plan_peer(packed(base=BASE * 2), [packed()])
    said = f"prefill blocks were paired as {tokens} tokens and have 16"
    with pytest.raises(PlanError, match=said):
        descriptor_indices(plan, pairs_of([1, 2, 3], [1, 2, 3], tokens=tokens))
    pairs = with_side(pairs_of([1, 2, 3], [1, 2, 3]), "decode", block_tokens=tokens)
    with pytest.raises(PlanError, match=f"decode blocks were paired as {tokens} tokens and have"):
        descriptor_indices(plan, pairs)


@pytest.mark.parametrize(
    ("side", "field", "value"),
    [
        ("prefill", "blocks", -1),
        ("decode", "blocks", -1),
        ("prefill", "offsets", -16),
        ("decode", "offsets", 16),
        ("", "tokens", 17),
        ("", "tokens", 0),
        ("", "tokens", -16),
    ],
)
def test_pairs_made_by_hand_are_not_trusted_either(side: str, field: str, value: int) -> None:
    plan = plan_peer(packed(base=BASE * 2), [packed()])
    sound, array = pairs_of([1], [1], stop=16), {field: np.array([value], np.int32)}
    pairs = with_side(sound, side, **array) if side else dataclasses.replace(sound, **array)
    with pytest.raises(PlanError):
        descriptor_indices(plan, pairs)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_side_whose_tokens_leave_their_block_is_named(side: str) -> None:
    plan = plan_peer(packed(base=BASE * 2), [packed()])
    pairs = with_side(pairs_of([1], [1], stop=16), side, offsets=np.array([8], np.int32))
    with pytest.raises(PlanError) as caught:
        descriptor_indices(plan, pairs)
    assert caught.value.message == f"{side} tokens reach out of their block of 16"
    pairs = dataclasses.replace(pairs, tokens=np.array([8], np.int32))
    with pytest.raises(PlanError, match=f"inside of a {side} block's unit of 16 tokens"):
        descriptor_indices(plan, pairs)


def test_a_start_inside_of_a_packed_block_is_refused() -> None:
    plan = plan_peer(packed(base=BASE * 2), [packed()])
    with pytest.raises(PlanError, match="only be moved whole"):
        descriptor_indices(plan, pair_blocks(BlockList([1], 16), BlockList([1], 16), 4, 16))


@given(
    st.lists(st.integers(-2, 40), min_size=1, max_size=6),
    st.lists(st.integers(-2, 40), min_size=1, max_size=6),
    st.integers(0, 100),
    st.integers(0, 100),
)
def test_whatever_the_blocks_no_descriptor_leaves_its_region(ours, theirs, start, stop) -> None:
    prefill, decode = packed(blocks=20), packed(blocks=30, base=BASE * 2)
    plan = plan_peer(decode, [prefill])
    try:
        pairs = pair_blocks(BlockList(ours, 16), BlockList(theirs, 16), start, stop)
        slices = descriptor_indices(plan, pairs)
    except PlanError:
        return
    for part in slices:
        source = plan.sources[part.source]
        for rows, indices, shard in (
            (source.prefill_rows, part.prefill_indices, prefill),
            (source.decode_rows, part.decode_indices, decode),
        ):
            for address, length, _ in descriptors(rows)[indices].tolist():
                assert any(
                    region.base <= address
                    and address + length <= region.base + region.num_blocks * region.block_stride
                    for region in shard.regions
                )


def calls_of(work: Callable[[], T]) -> tuple[int, T]:
    """Count the calls of Python's functions and of C's, numpy's among them."""
    count = 0

    def count_one(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # hypothesis has it call a function
    sys.setprofile(count_one)
    try:
        made = work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count, made


def calls_to_plan(*, layers: int, held: int, asked: int) -> tuple[int, int]:
    """How many calls it takes to plan a peer, TP 2 -> 1, and one request of ``asked`` blocks."""
    sizes = {"layers": layers, "blocks": held, "content": 256}
    prefill = [packed(heads=4, start=4 * i, rank=(0, i), base=BASE + i * BASE, **sizes)
               for i in range(2)]  # fmt: skip
    decode = packed(heads=8, base=BASE * 4, **sizes)
    built, plan = calls_of(lambda: plan_peer(decode, prefill))
    for source in plan.sources:
        assert len(source.prefill_rows) == len(source.decode_rows) == layers
    blocks = np.random.default_rng(0).permutation(held)[:asked].astype(np.int32)
    ours = BlockList(blocks, 16)
    planned, slices = calls_of(
        lambda: descriptor_indices(plan, pair_blocks(ours, ours, 0, 16 * asked - 2))
    )
    assert [part.prefill_indices.size for part in slices] == [layers * asked] * 2
    return built, planned


def test_planning_takes_as_many_calls_for_many_blocks_as_for_few() -> None:
    """No call is for one block of a request, or for one layer of it: they stand in a few arrays."""
    calls_to_plan(layers=1, held=16, asked=16)  # numpy imports a part of itself at its first use
    built, planned = calls_to_plan(layers=32, held=20_000, asked=512)
    assert (built, planned) == calls_to_plan(layers=32, held=700, asked=16)
    built_for_eight, planned_for_eight = calls_to_plan(layers=8, held=20_000, asked=512)
    assert planned == planned_for_eight
    assert built <= 4 * built_for_eight, "each layer costs the same"
