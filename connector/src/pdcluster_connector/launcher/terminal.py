"""The launcher's own lines in an output that belongs to the engine."""

from __future__ import annotations

import contextlib
import sys


def say(message: str) -> None:
    """One line on stderr, marked as the launcher's; a terminal that is gone is no error."""
    with contextlib.suppress(OSError, ValueError):
        print(f"pdcluster: {message}", file=sys.stderr, flush=True)
