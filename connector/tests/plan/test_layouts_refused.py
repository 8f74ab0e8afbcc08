"""What cannot be planned is refused by name before a byte is copied."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from layout_cases import FULL, MAMBA, MLA, WINDOW, Case, each, named
from modelled_engine import Modelled
from msgspec.structs import replace

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.plan import PlanError
from pdcluster_connector.plan.block_pairs import EngineBlocks, GroupBlocks
from pdcluster_connector.plan.geometry import Region, Shard
from pdcluster_connector.plan.peer_plan import plan_peer
from pdcluster_connector.plan.request_descriptors import plan_request

MENU = ((FULL,), (FULL, WINDOW), (FULL, MAMBA), (MLA,), (FULL, WINDOW, MAMBA))

# Faults: change what prefill publishes, or one side's blocks.
Shards = list[Shard]


def a_layer_less(shards: Shards) -> Shards:
    name = shards[-1].regions[-1].layer
    return [
        replace(shard, regions=tuple(r for r in shard.regions if r.layer != name))
        for shard in shards
    ]


def a_rank_twice(shards: Shards) -> Shards:
    return [*shards, shards[0]]


def each_region(change: Callable[[Region], Region]) -> Callable[[Shards], Shards]:
    def fault(shards: Shards) -> Shards:
        return [replace(s, regions=tuple(map(change, s.regions))) for s in shards]

    return fault


def other_bytes(region: Region) -> Region:
    wider = region.token_bytes * 2
    return replace(
        region,
        token_bytes=wider,
        token_stride=None if region.token_stride is None else region.token_stride * 2,
        head_stride=region.head_stride * 2,
        block_stride=region.block_stride * 2,
    )


def other_inside(region: Region) -> Region:
    """Packed where it was ordered by token, or the other way round."""
    stride = region.token_bytes if region.token_stride is None else None
    return replace(
        region,
        token_stride=stride,
        head_stride=region.block_tokens * region.token_bytes,
        block_stride=region.block_tokens * region.token_bytes * 8,
    )


SHARD_FAULTS = [
    (a_layer_less, {Reason.LAYER_MISMATCH}),
    (a_rank_twice, {Reason.ENGINE_ID_INCONSISTENT}),
    (each_region(other_bytes), {Reason.LAYER_MISMATCH}),
    (each_region(other_inside), {Reason.BLOCK_INTERIOR_OPAQUE}),
    (each_region(lambda r: replace(r, head_stride=0, block_stride=0)), {Reason.LAYOUT_UNSUPPORTED}),
    (each_region(lambda r: replace(r, base=2**63)), {Reason.LAYOUT_UNSUPPORTED}),
]


@pytest.mark.parametrize(("fault", "reasons"), SHARD_FAULTS)
def test_shards_that_do_not_fit_are_refused(fault, reasons: set[Reason]) -> None:
    def test(case: Case) -> None:
        prefill = Modelled(case.model, case.prefill, 0)
        decode = Modelled(case.model, case.decode, 1)
        found = set()
        for shard in decode.shards:
            try:
                plan_peer(shard, fault(prefill.shards))
            except PlanError as error:
                found.add(error.reason)
        assert found == reasons

    each(MENU, f"shards {fault}", 60, test)


def test_a_head_that_no_shard_holds_is_named() -> None:
    """Without ranks 0 and 1 of four, nobody has head 0 of two."""
    case = named(window=None, mamba=False)
    prefill = Modelled(case.model, case.prefill, 0).shards
    decode = Modelled(case.model, case.decode, 1).shards
    with pytest.raises(PlanError, match="ShardMissing: no prefill shard holds KV head 0 of layer"):
        plan_peer(decode[0], prefill[2:])
    assert plan_peer(decode[1], prefill[2:]).sources[0].rank == (0, 3)


def blocks_of(held: EngineBlocks, change: Callable[[tuple[int, ...]], object]) -> EngineBlocks:
    lists = [GroupBlocks(change(tuple(b.blocks)), b.first_token) for b in held.blocks]
    return EngineBlocks(held.groups, lists)


BLOCK_FAULTS = {
    "absent": lambda blocks: (0,) * len(blocks),
    "outside": lambda blocks: tuple(10**6 + i for i in range(len(blocks))),
    "negative": lambda blocks: (-7,) * len(blocks),
    "none": lambda _: (),
    "words": lambda blocks: ("a",) * len(blocks),
    "huge": lambda blocks: (2**40,) * len(blocks),
}


@pytest.mark.parametrize("fault", BLOCK_FAULTS)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_blocks_that_do_not_hold_the_tokens_are_refused(fault: str, side: str) -> None:
    def test(case: Case) -> None:
        if case.start == case.stop:
            return
        prefill = Modelled(case.model, case.prefill, 0)
        decode = Modelled(case.model, case.decode, 1)
        held = {
            "prefill": prefill.blocks(case.prefill_blocks),
            "decode": decode.blocks(case.decode_blocks),
        }
        held[side] = blocks_of(held[side], BLOCK_FAULTS[fault])
        for shard in decode.shards:
            if shard.regions:
                plan = plan_peer(shard, prefill.shards)
                with pytest.raises(PlanError) as caught:
                    plan_request(plan, **held, start=case.start, stop=case.stop, tokens=case.tokens)
                assert caught.value.reason in {Reason.COVERAGE_INCOMPLETE, Reason.TICKET_INVALID}

    each(MENU, f"blocks {fault} {side}", 40, test)


def planned(case: Case, **change):
    prefill, decode = Modelled(case.model, case.prefill, 0), Modelled(case.model, case.decode, 1)
    arguments = {
        "prefill": prefill.blocks(case.prefill_blocks),
        "decode": decode.blocks(case.decode_blocks),
        "start": case.start,
        "stop": case.stop,
        "tokens": case.tokens,
    }
    return plan_request(plan_peer(decode.shards[0], prefill.shards), **arguments | change)


def test_a_state_after_other_tokens_is_refused() -> None:
    case = named(window=None, mamba=True)
    with pytest.raises(PlanError, match="after 300 tokens is needed, the ticket's is after 333"):
        planned(case, stop=300)


@pytest.mark.parametrize("mamba", [False, True])
def test_decode_that_has_every_token_needs_nothing(mamba: bool) -> None:
    """Not even a state, or lists for the groups: no block of them is looked at."""
    case = named(window=None, mamba=mamba)
    nothing = EngineBlocks((), [GroupBlocks((7,))])
    for stop in (0, 300, case.tokens):
        assert planned(case, start=stop, stop=stop, prefill=nothing) == []


def test_a_ticket_that_covers_too_little_is_refused() -> None:
    with pytest.raises(PlanError, match=r"\[64, 333\) are wanted, the ticket covers 332"):
        planned(named(window=None, mamba=False), tokens=332)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_lists_for_other_groups_than_the_engine_has_are_refused(side: str) -> None:
    case = named(window=128, mamba=False)
    engine = Modelled(case.model, getattr(case, side), 0)
    held = engine.blocks(getattr(case, f"{side}_blocks"))
    with pytest.raises(PlanError, match=f"{side} lists the blocks of 1 KV cache groups and has 2"):
        planned(case, **{side: EngineBlocks(held.groups, held.blocks[:1])})
    with pytest.raises(PlanError, match="group 1 of 1"):
        planned(case, **{side: EngineBlocks(held.groups[:1], held.blocks[:1])})


def test_ids_behind_the_last_token_cost_nothing() -> None:
    """A ticket of 200 bytes may list a million blocks, and each has kernel blocks by the dozen."""
    case = named(window=None, mamba=False)
    plain = planned(case)
    prefill = Modelled(case.model, case.prefill, 0).blocks(case.prefill_blocks)
    listed = [*prefill.blocks[0].blocks, *[-1] * 2**20]
    padded = GroupBlocks(np.array(listed, np.int32), prefill.blocks[0].first_token)
    groups = tuple(replace(g, kernel_blocks_per_block=g.block_size) for g in prefill.groups)
    assert planned(case, prefill=EngineBlocks(prefill.groups, [padded]))[0].nbytes == (
        plain[0].nbytes
    )
    tracemalloc.start()
    with pytest.raises(PlanError):  # kernel blocks of one token are not what its regions have
        planned(case, prefill=EngineBlocks(groups, [padded]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 * 2**20


@pytest.mark.parametrize("ratio", [2**20, 2**26, 2**28])
def test_a_block_of_very_many_kernel_blocks_costs_what_is_needed_of_it(ratio: int) -> None:
    """A peer's metadata may say so, and nothing in it contradicts that."""
    case = named(window=None, mamba=False)
    prefill = Modelled(case.model, case.prefill, 0).blocks(case.prefill_blocks)
    tokens = prefill.groups[0].kernel_tokens
    group = replace(prefill.groups[0], block_size=tokens * ratio, kernel_blocks_per_block=ratio)
    held = EngineBlocks((group,), [GroupBlocks((1,), prefill.blocks[0].first_token)])
    tracemalloc.start()
    with pytest.raises(PlanError, match=r"prefill block \d+ is outside"):
        planned(case, prefill=held)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_blocks_whose_parts_take_very_many_rows_are_refused_before_rows_are_made(side: str) -> None:
    def shard(base: int, tokens: int, padding: int) -> Shard:
        return Shard((0, 0), (Region(
            layer="l", base=base, num_blocks=2, block_stride=tokens * 8 + padding,
            block_tokens=tokens, head_start=0, head_stop=1, head_stride=tokens * 8,
            token_stride=8, token_bytes=8,
        ),))  # fmt: skip

    small, large = shard(1 << 40, 16, 0), shard(1 << 41, 2**30, 64)
    pair = {"prefill": (small, [large]), "decode": (large, [small])}[side]
    tracemalloc.start()
    with pytest.raises(PlanError, match=f"{side}'s KV takes 67,108,864 rows") as caught:
        plan_peer(*pair)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.reason is Reason.LAYOUT_UNSUPPORTED
    assert peak < 2**20
    assert plan_peer(shard(1 << 41, 2**20, 64), [small]).sources[0].decode_rows.shape == (2**16, 5)
