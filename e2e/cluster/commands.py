"""Runs other programs. If a program fails, the error quotes its output."""

from __future__ import annotations

import subprocess
from pathlib import Path

from cluster.report import ClusterError


def run(*command: str | Path, stdin: str | None = None, cwd: Path | None = None) -> str:
    """Standard output of a command.

    Raises:
        ClusterError: the program is missing, or ended with an exit code other than 0.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, input=stdin, cwd=cwd, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise ClusterError(f"{words[0]} is needed and was not found on PATH") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ClusterError(f"{' '.join(words[:6])} ended with exit code {done.returncode}: {said}")
    return done.stdout


def output(*command: str | Path) -> str:
    """Standard output of a command; empty if the command fails."""
    try:
        return run(*command)
    except ClusterError:
        return ""
