"""Finds the known name that a misspelt one probably means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(text: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a text, whatever its case; None if none is."""
    folded = {name.lower(): name for name in known}
    near = difflib.get_close_matches(text.lower()[:100], folded, n=1, cutoff=0.5)
    return folded[near[0]] if near else None
