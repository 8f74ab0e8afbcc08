"""For how long an engine computes: the share of time that says how much more it could do.

vLLM plans a step when the one before has ended, and an empty one after the last. So the time from a
step with tokens to the next plan is time in which the engine computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # vLLM takes five seconds to import; the tests of the time do not need it
    from pdcluster_connector.vllm.metrics import StatsCollector

TELL_SECONDS: Final = 1.0  # an engine makes up to hundreds of steps a second
LONGEST_STEP: Final = 60.0  # more is a machine that slept


@dataclass(eq=False)
class BusyTime:
    """Not thread-safe: lives on the scheduler's thread."""

    stats: StatsCollector
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._since: float | None = None
        self._seconds = 0.0

    def step(self, tokens: int) -> None:
        """Take note that vLLM has planned a step that computes so many tokens."""
        now = self.clock()
        if self._since is not None:
            self._seconds += min(now - self._since, LONGEST_STEP)
        self._since = now if tokens else None
        if self._seconds and (self._since is None or self._seconds >= TELL_SECONDS):
            self.stats.count("busy_seconds", "", self._seconds)
            self._seconds = 0.0
