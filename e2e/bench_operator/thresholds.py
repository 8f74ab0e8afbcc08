"""The gate: bounds on ratios and counts, which a slow machine changes little.

Each bound has a margin over the runs that docs/benchmarks.md shows. A machine that is very busy
writes and reads more: with a load average of 80 on two cores, 10.3 reads and 0.34 of raw were seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Found = Mapping[str, Any]


class Bound(NamedTuple):
    """One number that is held against a bound."""

    what: str
    read: Callable[[Found], float]
    least: float = 0.0
    most: float = float("inf")


def written(writes: Mapping[str, int]) -> float:
    """Return how many requests are no renewals of a Lease."""
    return sum(number for resource, number in writes.items() if resource != "leases")


BOUNDS = (
    Bound("share_of_raw_objects", lambda found: found["share_of_raw_objects"], least=0.25),
    Bound("reads_of_one", lambda found: found["reads_of_one"], most=12.0),
    Bound("writes_of_one", lambda found: found["writes_of_one"], most=28.0),
    Bound("rest.core", lambda found: found["rest"]["core"], most=0.1),
    Bound("rest.writes", lambda found: written(found["rest"]["writes"]), most=0.0),
    Bound("restart.writes", lambda found: written(found["restart"]["writes"]), most=0.0),
    Bound("rss_peak_megabytes", lambda found: found["rss_peak_megabytes"], most=400.0),
)


def missed(found: Found) -> list[str]:
    """Return each bound that was missed, in words."""
    lines = []
    for bound in BOUNDS:
        value = bound.read(found)
        if value < bound.least:
            lines.append(f"{bound.what} is {value:g}; the least that is allowed is {bound.least:g}")
        elif value > bound.most:
            lines.append(f"{bound.what} is {value:g}; the most that is allowed is {bound.most:g}")
    return lines
