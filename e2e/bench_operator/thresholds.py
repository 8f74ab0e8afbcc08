"""The gate: what was measured, and how far a run may be from it.

Each bound is the mean of the runs in docs/benchmarks.md, and a margin. Where there is a goal, both
together are the goal. With 5,000 PDClusters there was one run, and there are no goals. Ratios and
counts change little on a slow machine. On a very busy one, the operator writes and reads more: with
a load average of 80 on two cores, 10.3 reads and 0.34 of raw were seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Found = Mapping[str, Any]


class Expected(NamedTuple):
    """A number of the runs in docs/benchmarks.md, and by how much it may be missed."""

    mean: float
    margin: float


class Bound(NamedTuple):
    """One number that is held against a bound.

    Attributes:
        what: where the number stands, or the writes of which it is the number.
        expected: by the number of PDClusters. Another number of them takes the next smaller one.
        more_is_better: whether the bound is the least that is allowed, and not the most.
    """

    what: str
    expected: Mapping[int, Expected]
    more_is_better: bool = False

    def read(self, found: Found) -> float:
        """Return the number."""
        value: Any = found
        for name in self.what.split("."):
            value = value[name]
        return written(value) if isinstance(value, Mapping) else value

    def of(self, pdclusters: int) -> float:
        """Return the bound for so many PDClusters."""
        size = max((one for one in self.expected if one <= pdclusters), default=min(self.expected))
        mean, margin = self.expected[size]
        return mean - margin if self.more_is_better else mean + margin

    def misses(self, value: float, pdclusters: int) -> bool:
        """Whether a value is on the wrong side of the bound."""
        bound = self.of(pdclusters)
        return value < bound if self.more_is_better else value > bound


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


NONE = {100: Expected(0, 0)}

BOUNDS = (
    Bound(
        "share_of_raw_objects",
        {100: Expected(0.85, 0.2), 1000: Expected(0.84, 0.2), 5000: Expected(0.53, 0.2)},
        more_is_better=True,
    ),
    Bound(
        "reads_of_one",
        # One of them is of the ReplicaSet of its router, which says whose the router's pods are.
        {100: Expected(1.1, 0.5), 5000: Expected(4.5, 1.5)},
    ),
    Bound(
        "writes_of_one",
        {100: Expected(16.0, 1.0), 1000: Expected(16.1, 1.5), 5000: Expected(18.0, 2.0)},
    ),
    Bound(
        "rest.core",
        {100: Expected(0.007, 0.013), 1000: Expected(0.061, 0.039), 5000: Expected(0.24, 0.15)},
    ),
    Bound("rest.writes", NONE),
    Bound("restart.writes", {**NONE, 5000: Expected(3, 10)}),
    Bound(
        "reaction_seconds.p99",
        {100: Expected(0.36, 0.64), 1000: Expected(0.5, 0.5), 5000: Expected(3.2, 2.0)},
    ),
    Bound(
        "plan_at_rest.milliseconds_1p1d.min",
        {100: Expected(0.06, 0.44)},
    ),
    Bound(
        "plan_at_rest.milliseconds_64p64d.min",
        {100: Expected(0.07, 0.93)},
    ),
    Bound(
        "rss_peak_megabytes",
        {100: Expected(124, 36), 1000: Expected(266, 34), 5000: Expected(693, 100)},
    ),
    Bound(
        "restart.rss_peak_megabytes",
        {100: Expected(118, 42), 1000: Expected(292, 108), 5000: Expected(772, 120)},
    ),
)


def missed(found: Found) -> list[str]:
    """Return each bound that was missed, in words."""
    lines = []
    for bound in BOUNDS:
        value = bound.read(found)
        if bound.misses(value, found["pdclusters"]):
            which = "least" if bound.more_is_better else "most"
            allowed = bound.of(found["pdclusters"])
            lines.append(f"{bound.what} is {value:g}; the {which} that is allowed is {allowed:g}")
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
