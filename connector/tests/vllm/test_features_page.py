"""docs/features.md names only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "features.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ")
][1:]


def test_rows_have_one_of_three_states() -> None:
    assert len(ROWS) > 20
    assert {state for _, state, _ in ROWS} == {"tested", "refused", "unproven"}


def test_what_is_tested_names_its_test() -> None:
    known = {
        name
        for tests in (ROOT / "connector" / "tests", ROOT / "e2e" / "tests")
        for file in tests.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    for feature, state, how in ROWS:
        named = set(re.findall(r"`(test_\w+)`", how))
        assert named <= known, feature
        if state == "tested" and "every prefill" not in how:
            assert named, feature
