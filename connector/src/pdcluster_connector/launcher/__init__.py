"""Runs an engine as PID 1 of its container, and holds what else pods run beside vLLM."""

import contextlib
import sys


def say(message: str) -> None:
    """Print one line on stderr, marked as the launcher's. A closed terminal is not an error."""
    with contextlib.suppress(OSError, ValueError):
        print(f"pdcluster: {message}", file=sys.stderr, flush=True)
