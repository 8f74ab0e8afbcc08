"""A reader that has seen enough, as ``head`` has, makes no good manifest a refused one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tiny-cpu.yaml"


@pytest.mark.parametrize("command", ["lint", "plan"])
def test_a_pipe_that_nobody_reads_ends_with_0(command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pdcluster_operator", command, str(EXAMPLE)],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
