"""What pages tell a contributor to open exists: the walks of docs/design.md, CONTRIBUTING.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from module_names import declared

from design_walk import HOMES, NAMED, asked_about, rows, text

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("walk", HOMES)
def test_a_walk_names_what_exists(walk: str) -> None:
    found = NAMED.findall(text(walk))
    assert len(found) > 10
    for file, name in found:
        path = HOMES[walk] / file
        assert path.exists(), file
        assert not name or name in declared(path), f"{file} has no {name}"


def test_each_call_of_each_row_is_shown_to_happen_by_some_test() -> None:
    asked, found = asked_about(), {}
    for walk in HOMES:
        tables = re.findall(r"^\| (?!what happens|action)", text(walk), re.MULTILINE)
        assert len(rows(walk)) == len(tables) > 8, "a row cannot be read, or has another's number"
        found |= {(walk, row): {name for _, name in named} for row, named in rows(walk).items()}
    for row, names in found.items():
        assert names, f"row {row} names no call"
        assert names <= asked.get(row, set()), f"no test asks whether all of row {row} happens"
    assert asked.keys() <= found.keys(), "a test asks about a row that is not there"


def test_the_checklists_name_files_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    steps = page.partition("## Common changes, step by step")[2].partition("\n## ")[0]
    steps += (ROOT / "docs/new-layout.md").read_text()
    homes = {"C": "connector/src/pdcluster_connector", "O": "operator/src/pdcluster_operator"}
    found = re.findall(r"`([\w.-]+/[\w./-]*)`", steps)
    assert len(found) > 50
    for file in found:
        first, _, rest = file.partition("/")
        assert (ROOT / homes.get(first, first) / rest).exists(), file
