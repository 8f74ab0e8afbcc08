"""docs/track-record.md: each fault names a test that exists, and the command that runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNS = {
    "cluster": "make cluster-e2e",
    **dict.fromkeys(("nixl", "engine", "vllm", "process"), "make test"),
}
"""What runs tests with these marks; `make fast` runs those without any."""
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "track-record.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| fault |")
]


def test_the_page_has_rows_of_both_halves() -> None:
    assert len(ROWS) >= 20
    assert {row[3].partition("/")[0] for row in ROWS} == {"`operator", "`connector"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[3].split("`")[3])
def test_a_fault_names_its_test_and_the_command_that_runs_it(row: list[str]) -> None:
    assert all(row)
    test, command = row[3:]
    path, name = re.findall(r"`(\S+)`", test)
    source = (ROOT / path).read_text()
    (own,) = re.findall(rf"((?:^[@ )].*\n)*)^(?:async )?def {name}\(", source, re.MULTILINE)
    module = re.findall(r"^pytestmark = [^\n]*", source, re.MULTILINE)
    marks = set(re.findall(r"mark\.(\w+)", "".join((own, *module))))
    assert "soak" not in marks
    runs = {RUNS[mark] for mark in marks & RUNS.keys()} or {"make fast"}
    assert runs == {command.strip("`")}
