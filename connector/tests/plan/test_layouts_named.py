"""Pairs that a naive planner gets wrong, by name; and the oracle, held against wrong plans."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from layout_cases import FULL, MAMBA, MLA, WINDOW, Case, Choices, build, each, findings, named, run
from modelled_engine import Array, Grid, Group, Layout, Model, Modelled
from wrong_plans import SPOILERS

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape, GroupShape
from pdcluster_connector.plan import PlanError
from pdcluster_connector.plan.block_pairs import groups_of, state_slot
from pdcluster_connector.plan.peer_plan import plan_peer

MENU = ((FULL,), (FULL, WINDOW), (FULL, MAMBA), (MLA,), (FULL, WINDOW, MAMBA))


def test_a_prefix_hit_across_block_sizes_with_replicated_heads() -> None:
    """Tokens 64-332, in units of 16: 17 of them, 2 layers, 2 heads of 4 bytes."""
    assert run(named(window=None, mamba=False)) == 17 * 16 * 2 * 2 * 4


def test_the_same_beside_a_window_of_128() -> None:
    """The window is 205-332 and one token more, from token 192 on in units of 16."""
    assert run(named(window=128, mamba=False)) == (17 + 9) * 16 * 2 * 2 * 4


def test_the_same_beside_mamba_states() -> None:
    """A state is moved whole, head by head; the group that both ranks need, twice."""
    states = 2 * (4 * 6 + 2 * 3 + 4 * 32)
    assert run(named(window=None, mamba=True)) == 17 * 16 * 2 * 2 * 4 + states


def test_packed_blocks_of_32_and_128_are_refused_and_nothing_is_planned() -> None:
    group = Group(FULL, ("full.0",), (Array("", 2, 4),), opaque=True)
    sides = [
        Layout(1, (0,), (Grid(size),), (0,), 10, (1 + index) << 40)
        for index, size in enumerate((32, 128))
    ]
    case = Case(Model((group,)), *sides, 200, 0, 200, ((1, 2, 3, 4, 5, 6, 7),), ((1, 2),), (0,))
    (found,) = findings(case)
    assert found.reason is Reason.BLOCK_INTERIOR_OPAQUE
    with pytest.raises(PlanError, match="BlockInteriorOpaque"):
        run(case)


def test_kernel_blocks_of_34_and_66_in_a_logical_block() -> None:
    """Each side's ids are expanded with its own ratio: P 544 = 34 x 16, D 1056 = 66 x 16."""
    case = named(window=None, mamba=True)
    prefill = replace(case.prefill, grids=(Grid(544, 34), case.prefill.grids[1]))
    decode = replace(case.decode, grids=(Grid(1056, 66), case.decode.grids[1]))
    case = replace(
        case,
        prefill=prefill,
        decode=decode,
        tokens=1500,
        start=0,
        stop=1500,
        prefill_blocks=((9, 2, 5), (7,)),
        decode_blocks=((3, 1), (4,)),
    )
    states = 2 * (4 * 6 + 2 * 3 + 4 * 32)
    assert run(case) == 1504 * 2 * 2 * 4 + states
    alike = replace(case.decode, grids=prefill.grids)
    case = replace(case, decode=alike, decode_blocks=((3, 1, 8), (4,)))
    assert run(case) == 1504 * 2 * 2 * 4 + states


def test_mla_is_read_from_one_rank_by_each() -> None:
    group = Group(MLA, ("mla.0", "mla.1"), (Array("", 1, 6),))
    sides = [
        Layout(tensor, (0, 0), (Grid(16),), (0,), 8, (1 + index) << 40)
        for index, tensor in enumerate((4, 2))
    ]
    case = Case(Model((group,)), *sides, 50, 0, 50, ((1, 2, 3, 4),), ((5, 6, 7, 2),), (0,))
    prefill, decode = Modelled(case.model, sides[0], 0), Modelled(case.model, sides[1], 1)
    read = [[s.rank for s in plan_peer(shard, prefill.shards).sources] for shard in decode.shards]
    assert read == [[(0, 0)], [(0, 1)]]
    assert run(case) == 2 * 64 * 2 * 6


def test_a_window_whose_extra_token_decode_let_go_of_begins_behind_it() -> None:
    """Also where the prefix hit ends just there."""
    case = named(window=5, mamba=False)
    one = [replace(side, grids=(side.grids[0], Grid(1))) for side in (case.prefill, case.decode)]
    for start in (64, 320):
        held = tuple(0 if token < 329 else token for token in range(333))
        pair = replace(
            case,
            prefill=replace(one[0], blocks=400),
            decode=replace(one[1], blocks=400),
            start=start,
            prefill_blocks=(case.prefill_blocks[0], tuple(range(40, 373))),
            decode_blocks=(case.decode_blocks[0], held),
        )
        run(pair)
    run(replace(pair, start=0, stop=5, tokens=5, decode_blocks=((9,), (0, 1, 2, 3, 4))))


@pytest.mark.parametrize("stop", [5, 20])
def test_a_window_s_extra_token_is_read_where_both_hold_it(stop: int) -> None:
    """vLLM may compute the last token again. The window then begins one token earlier.

    With a prompt of 5 tokens, the extra token is the first one of all.
    """
    case = named(window=5, mamba=False)
    one = [replace(side, grids=(side.grids[0], Grid(1))) for side in (case.prefill, case.decode)]
    held = replace(
        case,
        prefill=replace(one[0], blocks=400),
        decode=replace(one[1], blocks=400),
        start=0,
        stop=stop,
        tokens=stop,
        prefill_blocks=((1, 2), tuple(range(40, 40 + stop))),
        decode_blocks=((9,), tuple(range(1, 1 + stop))),
    )
    let_go = replace(held, decode_blocks=((9,), (*[0] * (stop - 4), 1, 2, 3, 4)))
    of_a_token = 2 * 2 * 4  # layers, heads, bytes
    assert run(held) - run(let_go) == of_a_token


# Helpers.


@pytest.mark.parametrize(
    ("blocks", "scratch", "slot"),
    [
        ([7], 0, 7),
        ([7, 8, 9], 2, 7),
        ([0, 0, 5, 6], 0, 6),
        ([0, 0, 5, 6, 8], 1, 6),
        ([7], 3, 7),
    ],
)
def test_the_running_state_s_slot(blocks: list[int], scratch: int, slot: int) -> None:
    assert state_slot(blocks, scratch) == slot


@pytest.mark.parametrize("blocks", [[], [0], [4, 0], [-1]])
def test_a_list_without_a_running_state(blocks: list[int]) -> None:
    with pytest.raises(PlanError, match="hold no state"):
        state_slot(blocks)


def test_an_engine_that_names_no_groups_has_one() -> None:
    case = named(window=None, mamba=False)
    shape = Modelled(case.model, case.prefill, 0).shape()
    assert groups_of(shape) == shape.groups
    assert groups_of(msgspec.structs.replace(shape, groups=None)) == shape.groups
    several = EngineShape(block_size=64, kernel_blocks_per_block=4)
    assert groups_of(several) == (GroupShape(FULL, 64, 4),)


# The oracle itself.


@pytest.mark.parametrize("spoil", SPOILERS.values())
@pytest.mark.parametrize("mamba", [False, True])
def test_the_oracle_notices_a_wrong_plan(spoil, mamba: bool) -> None:
    case = named(window=None if mamba else 128, mamba=mamba)
    run(case)
    with pytest.raises(AssertionError):
        run(case, spoil)


def test_a_failing_case_is_shrunk_to_a_small_one() -> None:
    def test(case: Case) -> None:
        assert case.decode.tensor < 2
        assert case.tokens < 10

    with pytest.raises(AssertionError, match=r"shrunk: .*tokens=(1|10),"):
        each(MENU, "shrinking", 200, test)


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(st.integers(0, 400), max_size=80))
def test_any_choices_make_a_case_that_holds(choices: list[int]) -> None:
    run(build(Choices(given=choices).pick, MENU))
