"""Every byte of hybrids: attention beside Mamba states, with ratios of 34 and 66 and others."""

from __future__ import annotations

import pytest
from layout_cases import FULL, MAMBA, WINDOW, Case, Choices, build, chunks, each, findings, run

from pdcluster_connector.compat.reasons import Reason

MENU = ((FULL, MAMBA), (MAMBA, FULL), (MAMBA,), (FULL, WINDOW, MAMBA))
CHUNKS, CASES = 1, 450
SOAKED = 6


@pytest.mark.parametrize("chunk", chunks(CHUNKS, SOAKED))
def test_random_pairs(chunk: int) -> None:
    each(MENU, f"hybrid {chunk}", CASES, run)


def _rule_of_hybrids(case: Case) -> None:
    """Grids that differ are refused exactly where prefixes may be cached."""
    attention = [group is not MAMBA for group in (g.kind for g in case.model.groups)]
    grids = zip(case.prefill.grids, case.decode.grids, attention, strict=True)
    differ = any((p.block_size, p.ratio) != (d.block_size, d.ratio) for p, d, a in grids if a)
    caching = case.prefill.prefix_caching or case.decode.prefix_caching
    expected = [Reason.PREFIX_CACHING_HETEROGENEOUS_BLOCKS] if differ and caching else []
    assert [finding.reason for finding in findings(case)] == expected


def test_the_rules_accept_what_the_plan_carries_out_but_for_prefixes() -> None:
    each(MENU, "rules", 500, _rule_of_hybrids)


def test_the_cases_reach_every_kind_of_pair() -> None:
    made = [
        build(Choices(f"hybrid {chunk} {number}").pick, MENU)
        for chunk in range(CHUNKS)
        for number in range(CASES)
    ]
    tensors = {(case.prefill.tensor, case.decode.tensor) for case in made}
    assert {(p, d) for p in (1, 2, 4) for d in (1, 2, 4)} <= tensors
    grids = [(c.prefill.grids[0], c.decode.grids[0]) for c in made]
    assert {(3, 5), (5, 3), (2, 1)} <= {(p.ratio, d.ratio) for p, d in grids}
    assert any(p.ratio != d.ratio and p.kernel == d.kernel for p, d in grids)
    assert any(p.order == d.order == "pages" for p, d in grids)
    assert any(case.start for case in made)
