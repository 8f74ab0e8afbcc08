"""Every command when nobody can take its output: one sentence, and an exit code of docs/cli.md.

Real processes, because Python itself writes once more when a process ends.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from played_server import kubeconfig
from served_pair import serving
from test_bad_input import EXAMPLE, VALUES, every

MORE = {
    "init": (
        "--model", "llama-3.1-8b", "--gpus", "8", "--gpu-type", "H100-80GB", "--fabric", "rdma",
    ),
    "doctor": ("--machine",),
    "ui": ("tiny",),
}  # fmt: skip
GIVEN = VALUES | {"FILE...": EXAMPLE, "{bash|zsh|fish}": "bash"}
BEFORE = {
    ("rollout", "pause"), ("rollout", "resume"), ("rollout", "undo"), ("rollout", "restart"),
    ("logs",), ("bench",),
}  # fmt: skip
"""They end before they print: the API server of this test takes no change and has no logs."""
FULL = (
    "error: standard output cannot be written: No space left on device; free space there, or send "
    "the output elsewhere\n"
)


def printing() -> list[tuple[str, ...]]:
    """A command line for each command of the table that prints here, and some more."""
    found: list[tuple[str, ...]] = [("--help",), ("--version",), ("plan", EXAMPLE, "-o", "yaml")]
    for words, command in every():
        if words not in BEFORE:
            required = [one for one in command.params if one.param_type_name == "argument"]
            names = [one.make_metavar(click.Context(command)) for one in required if one.required]
            found.append((*words, *map(GIVEN.__getitem__, names), *MORE.get(words[0], ())))
    return found


@pytest.fixture
def full() -> Iterator[int]:
    """A disk without space."""
    yield (number := os.open("/dev/full", os.O_WRONLY))
    os.close(number)


async def test_a_full_disk_is_one_sentence(full: int, tmp_path: Path) -> None:
    async def ended(words: tuple[str, ...]) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pdcluster_operator", *words,
            env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=full,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await process.communicate()
        return process.returncode, said.decode()

    lines = printing()
    assert len(lines) > 12
    async with serving() as pair:
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig(tmp_path, pair.url, "default"))}
        for first in range(0, len(lines), 2):
            pieces = lines[first : first + 2]
            for words, end in zip(pieces, await asyncio.gather(*map(ended, pieces)), strict=True):
                assert end == (6, FULL), words


@pytest.mark.parametrize(
    ("words", "closes", "code", "said"),
    [
        ("--version", ">&-", 2, "error: standard output is closed: send it to a file or /dev/null"),
        ("lint -", "<&-", 1, ""),
        ("lint none -o json", "2>&-", 1, ""),
        ("lint -o", "2>/dev/full", 2, ""),
        ("--version", ">/dev/full 2>&1", 6, ""),
    ],
)
def test_a_stream_that_is_closed_or_full(words: str, closes: str, code: int, said: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"exec {sys.executable} -m pdcluster_operator {words} {closes}"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.strip()) == (code, said)
