"""Waiting for the very thing that a test goes on with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(what: str, holds: Callable[[], Any], seconds: float, report: Callable[[], str]) -> float:
    """Return the seconds until ``holds``. If it takes too long, fail with everything known."""
    started = time.monotonic()
    while not holds():
        if time.monotonic() - started > seconds:
            raise AssertionError(f"no {what} within {seconds:.0f} s\n{report()}")
        time.sleep(0.1)
    return time.monotonic() - started
