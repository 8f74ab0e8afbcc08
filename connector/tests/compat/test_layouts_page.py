from __future__ import annotations

from pathlib import Path

import pytest
from dev.layouts_page import GRIDS, ROWS, Row, page, state_of

from pdcluster_connector.compat.rules import RULES

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "connector" / "tests"


def test_the_page_in_docs_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "layouts.md").read_text() == page(), "run make generate"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_names_a_rule_or_tests_that_exist(row: Row) -> None:
    assert bool(row.rule) != bool(row.oracle)
    if row.rule:
        assert row.rule in {rule.id for rule in RULES}
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


def test_a_state_follows_from_what_is_refused_and_tested() -> None:
    works = Row("x", "oracle_module", ("engine_module", "granite"))
    tests = "engines: `engine_module` (granite); oracle: `oracle_module`"
    assert state_of(works) == ("works", tests)
    assert state_of(Row("x", "oracle_module"))[0] == "unproven"
    moved = Row("x", "oracle_module", processes=("sizes",))
    assert state_of(moved) == ("moved", f"processes: `{GRIDS}` (sizes); oracle: `oracle_module`")
    assert state_of(Row("x", rule="KVDtypeMismatch")) == ("refused", "`KVDtypeMismatch`")
