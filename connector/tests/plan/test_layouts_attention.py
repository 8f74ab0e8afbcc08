"""Every byte of models with one group: heads, ranks, stages, blocks, ratios, orders, dtypes."""

from __future__ import annotations

import pytest
from layout_cases import (
    FULL,
    MLA,
    PAGES,
    RATIOS,
    SIZES,
    SLICEABLE,
    WINDOW,
    Case,
    Choices,
    build,
    chunks,
    each,
    findings,
    run,
)

MENU = ((FULL,), (MLA,), (WINDOW,), (FULL,))
CHUNKS, CASES = 3, 450
SOAKED = 10


@pytest.mark.parametrize("chunk", chunks(CHUNKS, SOAKED))
def test_random_pairs(chunk: int) -> None:
    each(MENU, f"attention {chunk}", CASES, run)


def test_the_rules_accept_what_the_plan_carries_out() -> None:
    each(MENU, "rules", 500, lambda case: _none(findings(case)))


def _none(found: object) -> None:
    assert found == ()


def test_the_cases_reach_every_kind_of_pair() -> None:
    made = [
        build(Choices(f"attention {chunk} {number}").pick, MENU)
        for chunk in range(CHUNKS)
        for number in range(CASES)
    ]

    def seen(of) -> set[tuple[object, object]]:
        return {(of(case, case.prefill), of(case, case.decode)) for case in made}

    def grid(of):
        return seen(lambda case, side: of(side.grids[0]))

    assert {(p, d) for p in (1, 2, 4, 8) for d in (1, 2, 4, 8)} <= seen(lambda _, s: s.tensor)
    assert {(2, 3), (3, 2)} <= seen(lambda _, s: s.tensor), "sizes that don't divide each other"
    assert {(p, d) for p in (1, 2, 3) for d in (1, 2, 3)} <= seen(lambda _, s: s.pipeline)
    assert {(p, d) for p in (1, 2) for d in (1, 2)} <= seen(lambda _, s: s.data)
    assert set(SIZES) <= grid(lambda g: g.kernel)
    assert set(RATIOS) <= grid(lambda g: g.ratio)
    orders = set(SLICEABLE) - {PAGES}
    assert {(p, d) for p in orders for d in orders} <= grid(lambda g: g.order)
    wanted = {(c.model.dtype, c.model.groups[0].opaque, c.model.groups[0].kind) for c in made}
    assert {(d, o, k) for d in ("float32", "fp8_e5m2", "fp8_e4m3") for o in (True, False)
            for k in (FULL, MLA, WINDOW)} <= wanted  # fmt: skip
    assert {1, 2} <= {len(case.model.groups[0].arrays) for case in made}
    assert _replicated(made)
    assert any(case.start and case.shown[0] for case in made)
    assert any(case.start == case.stop for case in made)
    assert any(0 < case.start < case.stop < case.tokens for case in made)
    assert any(0 in case.prefill_blocks[0] and 0 in case.decode_blocks[0] for case in made)


def _replicated(made: list[Case]) -> bool:
    """Whether KV heads are held by several ranks on both sides, in different numbers."""
    return any(
        case.prefill.tensor > case.decode.tensor > case.model.groups[0].arrays[0].heads
        for case in made
    )
