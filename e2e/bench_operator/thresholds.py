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


QUIET = "quiet"
"""The day on which nothing went wrong: it says how many writes a change needs."""
REFUSING = "429 for a minute"
MOST_OF_NEEDED = 3.0
MOST_OF_A_CHANGE = 30.0
"""Writes of one more decode engine on the quiet day: its objects, the routers' and the status."""
LONGEST_REACTION = 2.0
MOST_REFUSED_OF_ONE = 10.0
"""Requests that were refused, for each PDCluster that was changed meanwhile."""


def written(writes: Mapping[str, int]) -> float:
    """Return how many requests are no renewals of a Lease."""
    return sum(number for resource, number in writes.items() if resource != "leases")


BOUNDS = (
    Bound("share_of_raw_objects", lambda found: found["share_of_raw_objects"], least=0.5),
    Bound("reads_of_one", lambda found: found["reads_of_one"], most=1.0),
    Bound("writes_of_one", lambda found: found["writes_of_one"], most=19.0),
    Bound("rest.core", lambda found: found["rest"]["core"], most=0.1),
    Bound("rest.writes", lambda found: written(found["rest"]["writes"]), most=0.0),
    Bound("restart.writes", lambda found: written(found["restart"]["writes"]), most=0.0),
    Bound("rss_peak_megabytes", lambda found: found["rss_peak_megabytes"], most=300.0),
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


def _longest(quiet: Found, day: Found) -> float:
    """Return how many seconds a day may take: less than the 300 s after which all is listed anew.

    The trouble itself lasts a minute at most. Many changes, and many deletions, take their time.
    """
    share = max(1.0, day["changed"] / quiet["changed"])
    return 120.0 + share * min(100.0, 3 * quiet["seconds"]) + float(day.get("deleted", 0))


def missed_on(days: Mapping[str, Found]) -> list[str]:
    """Return each bound on bad days that was missed, in words.

    A change needs the writes that it needed on the quiet day. A launcher that falls silent, and
    answers again, needs a status and an event both times.
    """
    of_one = days[QUIET]["writes"] / days[QUIET]["changed"]
    lines = []
    if of_one > MOST_OF_A_CHANGE:
        lines.append(f"{QUIET}: {of_one:g} writes for a change of one PDCluster")
    for name, day in days.items():
        refused = sum(day["refused"].values())
        if name == REFUSING and not refused:
            lines.append(f"{name}: nothing was refused, so nothing was shown")
        if refused > MOST_REFUSED_OF_ONE * day["changed"]:
            lines.append(f"{name}: {refused} requests were refused")
        longest = _longest(days[QUIET], day)
        if day["seconds"] > longest:
            lines.append(f"{name}: {day['seconds']:g} s; the most that is allowed is {longest:g} s")
        most = MOST_OF_NEEDED * (of_one * day["changed"] + 4 * day.get("silent", 0))
        if day["writes"] > most:
            lines.append(f"{name}: {day['writes']} writes; the most that is allowed is {most:g}")
        there, deleted = written(day.get("writes_there", {})), day.get("deleted", 0)
        if there > deleted:
            lines.append(f"{name}: {there:g} writes for {deleted} PDClusters that are deleted")
        slowest = day.get("reaction_seconds", {}).get("most", 0.0)
        if slowest > LONGEST_REACTION:
            lines.append(f"{name}: a change of another PDCluster took {slowest:g} s")
    return lines
