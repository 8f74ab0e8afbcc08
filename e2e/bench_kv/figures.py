"""The arithmetic of the benchmark: turns, medians, ratios of pairs, and their spread."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
RESAMPLED = 1000


def turn(names: Sequence[Item], number: int) -> list[Item]:
    """Return the arms in the order of a round: each is first in one round of as many."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of the values that were measured side by side."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def shares(rounds: int, turns: int) -> list[int]:
    """Return how many of the rounds each turn has; none has nothing to do."""
    turns = min(rounds, turns)
    return [rounds // turns + (number < rounds % turns) for number in range(turns)]


def interval(
    ours: Sequence[float], others: Sequence[float], turns: Sequence[int] = ()
) -> list[float]:
    """Return the 95 % interval of :func:`ratio`, by a bootstrap with a fixed seed.

    The rounds of a turn have the same engines, so they are more alike than those of two turns. With
    ``turns``, the number of rounds in each, whole turns are resampled.
    """
    pairs = [a / b for a, b in zip(ours, others, strict=True)]
    rest = iter(pairs)
    parts = [list(itertools.islice(rest, count)) for count in turns or [1] * len(pairs)]
    dice = random.Random(1)
    found = sorted(
        statistics.median(itertools.chain(*dice.choices(parts, k=len(parts))))
        for _ in range(RESAMPLED)
    )
    edge = RESAMPLED // 40
    return [round(found[edge], 3), round(found[-edge - 1], 3)]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which the share lies, by the nearest rank."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def compared(taken: Mapping[str, Sequence[float]], turns: Sequence[int] = ()) -> dict[str, Any]:
    """Return the medians of each arm in milliseconds, and ours as a ratio to each other one."""
    others = [name for name in taken if name != "ours"]
    return {
        "milliseconds": {name: round(1e3 * statistics.median(of), 3) for name, of in taken.items()},
        "of": {name: round(ratio(taken["ours"], taken[name]), 3) for name in others},
        "interval": {name: interval(taken["ours"], taken[name], turns) for name in others},
        "rounds": len(taken["ours"]),
    }


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each column in milliseconds."""
    return {name: round(1e3 * statistics.median(row[name] for row in rows), 3) for name in rows[0]}


def middles(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each arm."""
    return {name: round(statistics.median(of), 1) for name, of in taken.items()}
