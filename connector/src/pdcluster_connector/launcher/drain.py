"""Whether an engine still has work that a stop would break: running requests, or leases.

``wait_until_idle`` in :mod:`.engine_polls` asks here again and again while an engine drains.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pdcluster_connector.compat.counted import counted

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (?P<value>\S+)")
_REQUESTS: Final = frozenset({"vllm:num_requests_running", "vllm:num_requests_waiting"})
_FINISHED: Final = "vllm:request_success_total"
_LEASES: Final = "pdcluster_kv_leases_held"
SETTLE_SECONDS: Final = 3.0
"""For so long at least an engine serves on when it is told to end.

Routers leave it out as soon as the operator tells them, a moment after the pod is deleted.
"""
QUIET_SECONDS: Final = 2.0
"""For so long no request may have finished: then no router sends any more."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work that an engine still has.

    Attributes:
        requests: running or waiting, on all data-parallel ranks.
        leases: finished prefills whose KV blocks a decode engine may still read.
        finished: requests that have finished since the engine started.
    """

    requests: int
    leases: int
    finished: int = 0

    @property
    def done(self) -> bool:
        """Whether the engine can stop without anybody noticing."""
        return self.requests == 0 and self.leases == 0

    def __str__(self) -> str:
        if self.done:
            return "drained: no request and no lease is left"
        return (
            f"waiting for {counted(self.requests, 'request')} and {counted(self.leases, 'lease')}"
        )


def work(metrics: str) -> Work:
    """Sum up an engine's ``/metrics`` (Prometheus text); a metric that is missing counts as 0."""
    requests = leases = finished = 0.0
    names = {*_REQUESTS, _LEASES, _FINISHED}
    for line in metrics.splitlines():
        match = _SAMPLE.match(line)
        if match is None or match["name"] not in names:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if match["name"] == _LEASES:
            leases += value
        elif match["name"] == _FINISHED:
            finished += value
        else:
            requests += value
    return Work(round(requests), round(leases), round(finished))


class Calm:
    """Tells when an engine that drains has nothing left to do, and will get nothing more.

    A moment without work is not enough: the next request may be on its way.

    Args:
        now: when the drain began, in seconds of any clock.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._since = now
        self._finished: int | None = None

    def seen(self, work: Work | None, now: float) -> bool:
        """Take in the work of this moment, None if it is not known; return whether all is calm."""
        if work is None or not work.done or work.finished != self._finished:
            self._since = now
        if work is not None:
            self._finished = work.finished
        return now - self._since >= QUIET_SECONDS and now - self._began >= SETTLE_SECONDS
