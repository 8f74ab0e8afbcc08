from __future__ import annotations

import ast
from pathlib import Path

import pytest
from dev.layouts_page import FAMILIES, GRIDS, ROWS, Row, families, page, row_of, state_of

from pdcluster_connector.compat.check import RULES

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "connector" / "tests"


def test_the_page_in_docs_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "layouts.md").read_text() == page(), "run make generate"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_names_a_rule_or_tests_that_exist(row: Row) -> None:
    if row.rule:
        assert row.rule in {rule.id for rule in RULES}
        assert (row.oracle, row.engines, row.processes) == (None, (), ())
        return
    if row.oracle:
        module, varied = row.oracle
        assert varied in check_of_cases(TESTS / "plan" / f"{module}.py"), "it does not vary that"
    if row.engines:
        module, *cases = row.engines
        folder = ROOT / "e2e" / "tests" if module.startswith("test_local") else TESTS / "vllm"
        assert cases
        assert set(cases) <= cases_of(folder / f"{module}.py")
    text = (TESTS / "grids" / f"{GRIDS}.py").read_text()
    assert all(f"def {name}() -> Iterator[Way]:" in text for name in row.processes)


def check_of_cases(path: Path) -> str:
    """The kinds of models that an oracle builds, and its test that it reaches every case."""
    text = path.read_text()
    [menu] = [line for line in text.splitlines() if line.startswith("MENU = ")]
    return menu + text.partition("def test_the_cases_reach_every_kind_of_pair")[2]


def cases_of(path: Path) -> set[str]:
    """Each ``Case`` of a module of engine tests, as the page writes it: model, prefill→decode."""

    def size(node: ast.expr) -> str:
        return ast.unparse(node).strip("()").replace(", ", "x")

    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(ast.Name("Case"), [ast.Constant(model), *sizes], named):
                prefill, decode = [*sizes, *(keyword.value for keyword in named)][:2]
                found.add(f"{model} {size(prefill)}→{size(decode)}")
    return found


def test_each_family_is_told_by_rows_of_the_table() -> None:
    told = "\n".join(families())
    for family, names in FAMILIES.items():
        assert names
        for name in names:
            assert f"| {family} | {row_of(name).name} | {state_of(row_of(name))[0]} |" in told


def test_a_state_follows_from_what_is_refused_and_tested() -> None:
    oracle = ("oracle_module", "s.tensor")
    works = Row("x", oracle, ("engine_module", "granite 1→2"))
    tests = "engines: `engine_module` (granite 1→2); oracle: `oracle_module`"
    assert state_of(works) == ("works", tests)
    assert state_of(Row("x", oracle))[0] == "unproven"
    moved = Row("x", oracle, processes=("sizes",))
    assert state_of(moved) == ("moved", f"processes: `{GRIDS}` (sizes); oracle: `oracle_module`")
    assert state_of(Row("x", rule="KVDtypeMismatch")) == ("refused", "`KVDtypeMismatch`")
    assert state_of(Row("x")) == ("unproven", "no oracle varies it")
