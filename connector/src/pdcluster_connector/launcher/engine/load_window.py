"""What an engine did in the last minute, from its metrics. Pure.

Counters are those of vLLM and of the connector, since the engine's start. The window keeps some of
their values, and reports what was added meanwhile. Time comes in as an argument, in seconds of any
monotonic clock.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pdcluster_connector.launcher.engine.engine_api import samples
from pdcluster_connector.protocol.load_report import WARM_SECONDS, WINDOW_SECONDS, LoadReport
from pdcluster_connector.protocol.prompt_outcomes import PROMPTS_METRIC, Outcome

SILENCE_SECONDS: Final = 60.0  # after this long without counts, nothing is known

_RECEIVE: Final = "pdcluster_kv_receive_seconds"
_WAITING: Final = "vllm:num_requests_waiting_by_reason"
_KV: Final = "vllm:kv_cache_usage_perc"
# The field of a report that a metric adds to. A histogram has a sum and a count.
COUNTERS: Final = {
    "pdcluster_kv_busy_seconds_total": "busy_seconds",
    "vllm:time_to_first_token_seconds_sum": "first_token_seconds",
    "vllm:time_to_first_token_seconds_count": "requests",
    "vllm:inter_token_latency_seconds_sum": "gap_seconds",
    "vllm:inter_token_latency_seconds_count": "gaps",
    "pdcluster_kv_received_bytes_total": "received_bytes",
    PROMPTS_METRIC: "receives",
    f"{_RECEIVE}_sum": "rank_seconds",
    f"{_RECEIVE}_count": "rank_receives",
}
TOKENS: Final = {"prefill": "vllm:prompt_tokens_total", "decode": "vllm:generation_tokens_total"}
GAUGES: Final = {"vllm:num_requests_running": "running", _WAITING: "waiting", _KV: "kv"}
# Of a metric with several kinds of children, the kind that counts.
_ONLY: Final = {
    PROMPTS_METRIC: ("outcome", Outcome.TRANSFERRED.value),
    f"{_RECEIVE}_sum": ("phase", "total"),
    f"{_RECEIVE}_count": ("phase", "total"),
    _WAITING: ("reason", "capacity"),
}


class _Look(NamedTuple):
    moment: float
    sums: Mapping[str, float]
    gauges: Mapping[str, float]


@dataclass(eq=False)
class LoadWindow:
    """The last minute of an engine. Used from one thread.

    Args:
        role: prefill or decode.
        data_ranks: how many data-parallel ranks the engine has.
    """

    role: str
    data_ranks: int = 1
    _looks: deque[_Look] = field(default_factory=deque)
    _began: float | None = None  # when the engine was first seen to serve

    def add(self, metrics: str, now: float) -> None:
        """Take the engine's ``/metrics``, in Prometheus' text format."""
        counters = COUNTERS | {TOKENS[self.role]: "tokens"}
        sums, gauges = dict.fromkeys(counters.values(), 0.0), dict.fromkeys(GAUGES.values(), 0.0)
        for name, labels, value in samples(metrics, *counters, *GAUGES):
            label, kind = _ONLY.get(name, ("", ""))
            if not label or labels.get(label) == kind:
                place, key = (sums, counters) if name in counters else (gauges, GAUGES)
                place[key[name]] += max(0.0, value)
        gauges["kv"] = min(1.0, gauges["kv"] / self.data_ranks)
        before = self._looks[-1].sums if self._looks else {}
        if self._began is None or any(sums[name] < value for name, value in before.items()):
            self._looks.clear()  # it counts from anew
            self._began = now
        if now - self._began <= WARM_SECONDS:
            self._looks.clear()
        self._looks.append(_Look(now, sums, gauges))
        while len(self._looks) > 2 and self._looks[1].moment <= now - WINDOW_SECONDS:
            self._looks.popleft()

    def report(self, now: float) -> LoadReport | None:
        """Return what the engine did, or None if it was not measured for long enough."""
        if not self._looks or now - self._looks[-1].moment > SILENCE_SECONDS:
            return None
        first, *rest = self._looks
        seconds = self._looks[-1].moment - first.moment
        if seconds < WINDOW_SECONDS / 2 or seconds > 10 * WINDOW_SECONDS:
            return None
        added = {name: value - first.sums[name] for name, value in rest[-1].sums.items()}
        means = {name: sum(one.gauges[name] for one in rest) / len(rest) for name in first.gauges}
        rank_seconds, receives = added.pop("rank_seconds"), added.pop("rank_receives")
        each = rank_seconds / receives if receives else 0.0
        added["busy_seconds"] /= self.data_ranks
        added["receive_seconds"] = each * added["receives"]
        return LoadReport(seconds=seconds, **added, **means)
