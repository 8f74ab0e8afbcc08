from __future__ import annotations

from pathlib import Path

import pytest

from pdcluster_connector.compat.carried import Layout
from pdcluster_connector.compat.layouts_page import GRIDS, ROWS, Row, page, state_of
from pdcluster_connector.compat.rules import ALL_RULES

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "connector" / "tests"


def test_the_page_in_docs_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "layouts.md").read_text() == page(), "run make generate"


def test_every_layout_that_can_be_switched_on_has_a_row() -> None:
    assert {layout for row in ROWS for layout in row.needs} == set(Layout)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_names_a_rule_or_tests_that_exist(row: Row) -> None:
    assert bool(row.rule) != bool(row.oracle)
    if row.rule:
        assert row.rule in {rule.id for rule in ALL_RULES}
        return
    assert (TESTS / "plan" / f"{row.oracle}.py").exists()
    module, *cases = row.engines or ("",)
    if module and state_of(row)[0] == "works":
        folder = ROOT / "e2e" / "tests" if module.startswith("test_local") else TESTS / "vllm"
        text = (folder / f"{module}.py").read_text()
        assert cases
        assert all(f'Case("{case}"' in text for case in cases)
    text = (TESTS / "grids" / f"{GRIDS}.py").read_text()
    assert all(f"def {name}() -> Iterator[Way]:" in text for name in row.processes)


def test_a_state_follows_from_what_is_carried_and_tested() -> None:
    row = Row("x", (Layout.DATA_NODES,), "oracle_module", ("engine_module", "granite"))
    everything = frozenset(Layout)
    state, why = state_of(row, frozenset())
    assert (state, why) == ("refused", "`LayoutUnsupported/data-nodes`")
    state, why = state_of(row, everything)
    assert (state, why) == ("works", "engines: `engine_module` (granite); oracle: `oracle_module`")
    assert state_of(Row("x", (), "oracle_module"), everything)[0] == "unproven"
    moved = Row("x", (), "oracle_module", processes=("sizes",))
    assert state_of(moved, everything) == (
        "moved",
        f"processes: `{GRIDS}` (sizes); oracle: `oracle_module`",
    )
    assert state_of(Row("x", rule="KVDtypeMismatch"), everything) == (
        "refused",
        "`KVDtypeMismatch`",
    )
