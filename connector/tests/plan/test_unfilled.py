"""Which parts of a request's blocks no token fills, against a count of token by token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import GroupShape, LayerKind
from pdcluster_connector.plan import PlanError
from pdcluster_connector.plan.block_pairs import EngineBlocks, GroupBlocks, unfilled
from pdcluster_connector.plan.peer_plan import PeerPlan
from pdcluster_connector.plan.request_descriptors import plan_request

# A plan in which the first groups of both sides hold the same layers.
PAIRED = PeerPlan(
    (SimpleNamespace(classes=[SimpleNamespace(key=SimpleNamespace(groups=(0, 0), unit=1))]),)
)
KINDS = (LayerKind.FULL_ATTENTION, LayerKind.SLIDING_WINDOW, LayerKind.MLA)


@st.composite
def groups(draw: st.DrawFn) -> tuple[GroupShape, GroupBlocks]:
    kernel, ratio = draw(st.sampled_from([1, 3, 16])), draw(st.integers(1, 4))
    ids = draw(st.lists(st.integers(-1, 40), max_size=5))
    first = draw(st.integers(0, 3)) * kernel * ratio
    kind = draw(st.sampled_from(KINDS))
    return GroupShape(kind, kernel * ratio, ratio), GroupBlocks(ids, first)


@given(st.lists(groups(), max_size=3), st.integers(0, 300))
def test_every_token_that_is_not_filled_is_named_once(
    made: list[tuple[GroupShape, GroupBlocks]], stop: int
) -> None:
    held = EngineBlocks([group for group, _ in made], [blocks for _, blocks in made])
    expected = []
    for number, (group, blocks) in enumerate(made):
        for index, block in enumerate(blocks.blocks):
            begin = blocks.first_token + index * group.block_size
            for offset in range(group.block_size):
                if block > 0 and begin + offset >= stop:
                    kernel, inner = divmod(offset, group.kernel_tokens)
                    place = block * group.kernel_blocks_per_block + kernel
                    expected.append((number, place, inner))
    found = []
    for part in unfilled(held, stop):
        tokens = held.groups[part.group].kernel_tokens
        for block in range(part.block, part.end):
            begin = part.first if block == part.block else 0
            found += [(part.group, block, inner) for inner in range(begin, tokens)]
    assert sorted(found) == sorted(expected)


def test_states_are_never_unfilled() -> None:
    groups = (GroupShape(LayerKind.MAMBA, 16),)
    assert list(unfilled(EngineBlocks(groups, [GroupBlocks((4,))]), 0)) == []


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_side_that_lists_too_many_states_is_named(side: str) -> None:
    group = (GroupShape(LayerKind.MAMBA, 16),)
    one, two = (EngineBlocks(group, [GroupBlocks(ids)]) for ids in ((4,), (4, 5)))
    sides = {"prefill": one, "decode": one, side: two}
    plan = PeerPlan(())
    assert plan.units == {}
    # A plan without layers needs nothing; the units say which groups are paired.
    assert plan_request(plan, **sides, start=0, stop=5, tokens=5) == []
    with pytest.raises(PlanError) as caught:
        plan_request(PAIRED, **sides, start=0, stop=5, tokens=5)
    assert caught.value.message == f"{side} lists 2 states, not the running one alone"


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_side_whose_lists_are_not_those_of_its_groups_is_named(side: str) -> None:
    group = (GroupShape(LayerKind.FULL_ATTENTION, 16),)
    good = EngineBlocks(group, [GroupBlocks((4,))])
    bad = EngineBlocks(group, [GroupBlocks((4,)), GroupBlocks((5,))])
    sides = {"prefill": good, "decode": good, side: bad}
    with pytest.raises(PlanError) as caught:
        plan_request(PeerPlan(()), **sides, start=0, stop=5, tokens=5)
    said = f"{side} lists the blocks of 2 KV cache groups and has 1"
    assert caught.value.message == said
    at_fault = {"prefill": Reason.TICKET_INVALID, "decode": Reason.COVERAGE_INCOMPLETE}
    assert caught.value.reason is at_fault[side], "only prefill's lists come with a ticket"
