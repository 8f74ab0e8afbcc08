"""Tests that parse Python may be interrupted by a garbage collection that logs an error."""

from __future__ import annotations

import ast
import gc
import traceback
from pathlib import Path


class Failing:
    """Garbage whose end is an error, such as a task whose exception nobody retrieved."""

    ended = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Failing.ended += 1
        try:
            _ = 1 / 0 + 2 * 3
        except ZeroDivisionError:
            traceback.format_exc()


def test_an_error_that_is_logged_while_python_is_parsed_disturbs_nothing() -> None:
    text = Path(__file__).read_text()
    before = gc.get_threshold()
    gc.set_threshold(20)
    try:
        for _ in range(20):
            Failing()
            ast.parse(text)
    finally:
        gc.set_threshold(*before)
    assert Failing.ended
