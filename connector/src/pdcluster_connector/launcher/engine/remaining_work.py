"""The work that an engine still has, and that a stop would break: running requests, and leases.

``drain.py`` waits until nothing of it is left.
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
