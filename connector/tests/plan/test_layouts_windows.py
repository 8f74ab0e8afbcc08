"""Every byte of models with several attention groups, each with blocks and a window of its own."""

from __future__ import annotations

import pytest
from layout_cases import FULL, MLA, WINDOW, Choices, build, chunks, each, run

MENU = ((FULL, WINDOW), (WINDOW, FULL), (MLA, FULL), (FULL, WINDOW, WINDOW))
CHUNKS, CASES = 1, 450
SOAKED = 6


@pytest.mark.parametrize("chunk", chunks(CHUNKS, SOAKED))
def test_random_pairs(chunk: int) -> None:
    each(MENU, f"windows {chunk}", CASES, run)


def test_the_cases_reach_every_kind_of_pair() -> None:
    made = [
        build(Choices(f"windows {chunk} {number}").pick, MENU)
        for chunk in range(CHUNKS)
        for number in range(CASES)
    ]
    sizes = {(case.prefill.grids[0].block_size, case.prefill.grids[1].block_size) for case in made}
    assert any(first != second for first, second in sizes), "groups with different blocks"
    assert any(case.prefill.numbers != case.decode.numbers for case in made)
    assert any(0 in blocks for case in made for blocks in case.decode_blocks)
    assert any(
        len({array.heads for group in case.model.groups for array in group.arrays}) > 1
        for case in made
        if MLA not in {group.kind for group in case.model.groups}
    )
    assert any(case.prefill.pipeline != case.decode.pipeline for case in made)
    assert {len(case.model.groups) for case in made} == {2, 3}
