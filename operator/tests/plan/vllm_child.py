"""Asks vLLM in one child process: its imports take half a minute and leave nothing in here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pdcluster_connector

ROOT = Path(__file__).parents[3]
SOURCES = [str(Path(pdcluster_connector.__file__).parents[1]), str(ROOT)]


def ask(program: str, asked: object, *words: str) -> Any:
    """Run a program that reads ``asked`` from its input and prints ANSWER before its JSON.

    Args:
        words: its arguments after the first one, which has the folders of our sources.
    """
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(SOURCES), *words],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert answers, done.stderr[-3000:]
    return json.loads(answers[0].removeprefix("ANSWER"))
