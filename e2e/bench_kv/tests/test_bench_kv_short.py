"""A short run: real engines of both connectors, and the rows that cost little."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.engine


def test_both_connectors_move_the_right_bytes_and_each_row_has_both_numbers() -> None:
    """The benchmark itself refuses wrong bytes and what was not received."""
    folders = ("connector/src", "e2e", "connector/tests/transfer")
    environment = os.environ | {"PYTHONPATH": ":".join(str(ROOT / one) for one in folders)}
    done = subprocess.run(
        [sys.executable, "-m", "bench_kv", "--parts", "moves", "--small"],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 9
    for _, ours, stock, *_ in rows:
        assert float(ours) >= 0
        assert float(stock) >= 0
    assert any("16 MiB, 2048 descriptors" in row[0] for row in rows)
