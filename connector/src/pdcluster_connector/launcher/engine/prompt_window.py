"""How many of its latest prompts a decode engine computed by itself. Pure.

The engine counts all prompts since its start, each data-parallel rank by itself. The window keeps
these sums for a few minutes and reports what was added meanwhile. Which prompts are faults is said
in protocol.prompt_outcomes. Time comes in as an argument, in seconds of any monotonic clock.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from pdcluster_connector.launcher.engine.engine_api import samples
from pdcluster_connector.protocol.launcher_documents import PromptsReport
from pdcluster_connector.protocol.prompt_outcomes import (
    LEAST_JUDGED,
    LEAST_TRANSFERRED_PERCENT,
    PROMPTS_METRIC,
    LocalReason,
    Outcome,
    is_fault,
    was_due,
)

WINDOW_SECONDS: Final = 300.0
SILENCE_SECONDS: Final = 60.0  # after this long without counts, nothing is known

Kind = tuple[str, str]  # (outcome, reason)
_SKIPPED: Final[Kind] = (Outcome.LOCAL, LocalReason.LOCAL_BY_ROUTER)


def count_prompts(metrics: str) -> Counter[Kind]:
    """Sum up an engine's ``/metrics`` (Prometheus text) over its ranks."""
    counts: Counter[Kind] = Counter()
    for _, labels, number in samples(metrics, PROMPTS_METRIC):
        counts[labels.get("outcome", ""), labels.get("reason", "")] += round(number)
    return counts


class _Sums(NamedTuple):
    moment: float
    counts: Counter[Kind]


class PromptWindow:
    """The prompts of the last ``seconds``. Used from one thread."""

    def __init__(self, seconds: float = WINDOW_SECONDS) -> None:
        self._seconds = seconds
        self._sums: deque[_Sums] = deque()
        self._cause = ""

    def add(self, sums: Mapping[Kind, int], now: float) -> None:
        """Take the engine's counts since its start."""
        latest = Counter(sums)
        if self._sums and any(latest[kind] < n for kind, n in self._sums[-1].counts.items()):
            self._sums.clear()  # it counts from anew
        if not self._sums:
            self._sums.append(_Sums(now, Counter()))
        self._sums.append(_Sums(now, latest))
        # The oldest sums are those of the window's beginning, or the last before it.
        while len(self._sums) > 2 and self._sums[1].moment <= now - self._seconds:
            self._sums.popleft()

    def report(self, now: float) -> PromptsReport | None:
        """Return the prompts of the window, or None if nothing is known."""
        if not self._sums or now - self._sums[-1].moment > SILENCE_SECONDS:
            return None
        added = self._sums[-1].counts - self._sums[0].counts
        due = sum(number for kind, number in added.items() if was_due(*kind))
        faults: Counter[str] = Counter()
        for (outcome, reason), number in added.items():
            if is_fault(outcome, reason):
                faults[reason] += number
        skipped = added[_SKIPPED]
        enough = due + skipped >= LEAST_JUDGED
        if enough and 100 * due < LEAST_TRANSFERRED_PERCENT * (due + skipped):
            due += skipped
            faults[LocalReason.LOCAL_BY_ROUTER] = skipped
        return PromptsReport(due, faults.total(), self._main_cause(faults), self._seconds)

    def _main_cause(self, faults: Counter[str]) -> str:
        """Keep the cause until another is twice as frequent, so that two do not alternate."""
        most = max(faults.values(), default=0)
        if not most or 2 * faults[self._cause] <= most:
            self._cause = min((r for r, number in faults.items() if number == most), default="")
        return self._cause
