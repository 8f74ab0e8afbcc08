"""Blocks that hold their own scales: bytes in an order that nobody describes, moved whole.

The oracle's engine scatters the bytes of all heads and tokens of a rank's block, the same way on
both sides, as a backend does that keeps values, then scales, or K, then V. A plan that cut such a
block anywhere would bring other bytes.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from layout_cases import FULL, MLA, WINDOW, Case, findings, paired, run
from modelled_engine import Array, Grid, Group

from pdcluster_connector.compat.check import refused

FACTS = "attention backend=FLASHINFER,version of vLLM=0.32.0"
MENU = (FULL, MLA, WINDOW)
ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A latent on any two numbers of ranks, or heads that both sides split alike."""
    kind = draw(st.sampled_from(MENU))
    heads = 1 if kind is MLA else draw(st.sampled_from((1, 2, 4)))
    size = draw(st.sampled_from((1, 2, 4)))
    alone = heads == 1  # every rank then holds the one head
    tensors = (size, draw(st.sampled_from((1, 2, 4))) if alone else size)
    window = draw(st.sampled_from((5, 21))) if kind is WINDOW else None
    layers = tuple(f"whole.{number}" for number in range(draw(st.integers(1, 3))))
    groups = [Group(kind, layers, (Array("", heads, 6),), window, whole=FACTS)]
    block, ratio = draw(st.sampled_from(((4, 1), (16, 1), (16, 4))))
    # Blocks or layers outermost: the bytes inside of a block are the same.
    order = draw(st.sampled_from(ORDERS))
    other = draw(st.sampled_from([one for one in ORDERS if one[2:] == order[2:]]))
    grids = [(Grid(block, ratio, order), Grid(block, ratio, other))]
    if draw(st.booleans()):  # the indexer of a model with latents, or layers left unquantised
        groups.append(Group(FULL, ("plain.0",), (Array("", heads, 8),), dtype="float32"))
        grids.append((Grid(block), Grid(block)))
    tokens = draw(st.integers(1, 63))
    start = draw(st.integers(0, tokens // block)) * block
    return paired(groups, grids, tensors, tokens=tokens, start=start, dtype="nvfp4")


@given(cases())
def test_every_byte_of_whole_blocks_arrives(case: Case) -> None:
    assert findings(case) == ()
    run(case)


@given(cases().filter(lambda case: case.model.groups[0].arrays[0].heads > 1))
@settings(max_examples=settings().max_examples // 4)
def test_another_number_of_heads_in_a_rank_is_refused(case: Case) -> None:
    """And without the rule, the oracle would find wrong bytes: it is what the rule is for."""
    group, grid = case.model.groups[:1], [(case.prefill.grids[0], case.decode.grids[0])]
    other = paired(group, grid, (1, 2), tokens=case.tokens, dtype="nvfp4")
    found = refused(findings(other))
    assert found is not None
    assert (found.rule, found.field) == ("BlockInteriorOpaque/whole", "tensor")
    with pytest.raises(AssertionError):
        run(other)


def test_the_cases_reach_every_kind_of_pair() -> None:
    seen: set[tuple[object, ...]] = set()

    @given(cases())
    @settings(max_examples=300, derandomize=True, database=None)
    def look(case: Case) -> None:
        group, sizes = case.model.groups[0], (case.prefill.tensor, case.decode.tensor)
        ratio = case.prefill.grids[0].ratio
        seen.add(("kind", group.kind, group.arrays[0].heads > 1, len(set(sizes)) == 1))
        seen.add(("order", case.prefill.grids[0].order, ratio))
        seen.add(("hit", case.start > 0, len(case.model.groups)))

    look()
    for kind in MENU:
        assert ("kind", kind, False, False) in seen, "one head on other numbers of ranks"
        assert kind is MLA or ("kind", kind, True, True) in seen, "heads that are split alike"
    assert {("order", order, ratio) for order in ORDERS for ratio in (1, 4)} <= seen
    assert {("hit", hit, groups) for hit in (True, False) for groups in (1, 2)} <= seen
