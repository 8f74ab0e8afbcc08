"""The arithmetic of the benchmark: turns, medians, ratios of pairs, and their spread."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

RESAMPLED = 1000


def turn(names: Sequence[str], number: int) -> list[str]:
    """Return the names in the order of a round: each is first in one round of as many."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of the values that were measured side by side."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def interval(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the 95 % interval of :func:`ratio`, by a bootstrap with a fixed seed."""
    pairs = [a / b for a, b in zip(ours, others, strict=True)]
    dice = random.Random(1)
    found = sorted(statistics.median(dice.choices(pairs, k=len(pairs))) for _ in range(RESAMPLED))
    edge = RESAMPLED // 40
    return [round(found[edge], 3), round(found[-edge - 1], 3)]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which the share lies, by the nearest rank."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def compared(taken: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the medians of each arm in milliseconds, and ours as a ratio to each other one."""
    others = [name for name in taken if name != "ours"]
    return {
        "milliseconds": {name: round(1e3 * statistics.median(of), 3) for name, of in taken.items()},
        "of": {name: round(ratio(taken["ours"], taken[name]), 3) for name in others},
        "interval": {name: interval(taken["ours"], taken[name]) for name in others},
        "rounds": len(taken["ours"]),
    }


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each column in milliseconds."""
    return {name: round(1e3 * statistics.median(row[name] for row in rows), 3) for name in rows[0]}
