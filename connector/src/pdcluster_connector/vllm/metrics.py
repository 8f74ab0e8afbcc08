"""What the connector counts: in vLLM's connector-stats form, and as Prometheus metrics.

Both roles fill a :class:`StatsCollector`. vLLM takes a snapshot in each step and sums the snapshots
of all workers and the scheduler side. It hands the sum to the API server as a plain dict, and
:class:`PrometheusMetrics` shows it there. The base units are bytes and seconds. ``METRICS`` lists
every metric once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1 import metrics

from pdcluster_connector.protocol.engine_id import short_name
from pdcluster_connector.protocol.prompt_outcomes import Outcome, is_fault

PREFIX: Final = "pdcluster_kv_"
MAX_LINKS: Final = 64  # prefill engines that one rank names; the others are OTHER_ENGINES
OTHER_ENGINES: Final = "other"
MAX_SAMPLES: Final = 4096  # of a histogram's child in an interval; more samples are dropped
_BUCKETS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class _Metric(NamedTuple):
    """A metric of the API server.

    A child's key holds the values of the metric's own labels, joined by ``|``. ``keys`` are those
    of children that are always there. A metric without labels has one child, whose key is empty.
    """

    kind: type
    text: str
    labels: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


METRICS: Final = {  # by name, without PREFIX and the suffix of a counter
    "busy_seconds": _Metric(
        Counter, "Seconds in which the engine computed: from a step with tokens to the next step."
    ),
    "received_bytes": _Metric(Counter, "KV bytes received from prefill engines, all ranks."),
    "link_bytes": _Metric(
        Counter, "KV bytes received from each prefill engine, all ranks.", ("prefill",)
    ),
    "link_transfer_seconds": _Metric(
        Counter,
        "Seconds that transfers from each prefill engine took, summed over receives and ranks.",
        ("prefill",),
    ),
    "failures": _Metric(Counter, "KV receives that failed, by reason, each rank.", ("reason",)),
    "prompts": _Metric(  # protocol.prompt_outcomes.PROMPTS_METRIC
        Counter,
        "Prompts of a decode engine, by what became of their transfer and why.",
        ("outcome", "reason"),
    ),
    "local_prompt_tokens": _Metric(
        Counter,
        "Prompt tokens that decode computed although prefill should have, by reason.",
        ("reason",),
    ),
    "leases_expired": _Metric(Counter, "Leases on KV that no decode engine released in time."),
    "step_faults": _Metric(
        Counter,
        "Exceptions caught in connector methods that an engine step calls.",
        ("method",),
    ),
    "leases_held": _Metric(
        Gauge, "Finished requests whose KV blocks are kept for a decode engine."
    ),
    "local_prompts_waiting": _Metric(
        Gauge, "Prompts that wait until decode computes them, because other requests generate."
    ),
    "receive_seconds": _Metric(
        Histogram,
        "Duration of a KV receive on one rank, by phase.",
        ("phase",),
        ("handshake", "post", "transfer", "fence", "total"),
    ),
    "handover_seconds": _Metric(
        Histogram,
        "Seconds from the ticket that prefill handed out until a decode engine claimed its lease.",
    ),
    "local_prompt_wait_seconds": _Metric(
        Histogram,
        "Seconds that a prompt waited until decode computed it. Prompts that did not wait are"
        " not counted.",
    ),
}


def _zero(kind: type) -> Any:
    """Return the value of a child: a sum, the last value if it changed, or samples."""
    return [] if kind is Histogram else None if kind is Gauge else 0


def _empty() -> dict[str, Any]:
    return {
        name: {key: _zero(metric.kind) for key in (metric.keys if metric.labels else ("",))}
        for name, metric in METRICS.items()
    }


@dataclass
class ConnectorStats(metrics.KVConnectorStats):
    """One interval's counts. ``data`` has the value of each child, by metric and key."""

    data: dict[str, Any] = field(default_factory=_empty)

    def reset(self) -> None:
        """Forget everything."""
        self.data = _empty()

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return self.data == _empty()

    def add(self, name: str, key: str, value: Any) -> None:
        """Add to a counter, set a gauge (None leaves it as it is), or add samples."""
        kind, children = METRICS[name].kind, self.data[name]
        known = children.setdefault(key, _zero(kind))
        if kind is Counter:
            children[key] = known + value
        elif kind is Histogram:
            known.extend(value[: max(0, MAX_SAMPLES - len(known))])
        elif value is not None:
            children[key] = value

    def aggregate(self, other: metrics.KVConnectorStats) -> Self:
        """Add another interval's or rank's counts to this one."""
        for name, children in other.data.items():
            for key, value in children.items():
                self.add(name, key, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Summary for vLLM's periodic log line."""
        total = self.data["receive_seconds"]["total"]
        return {
            "received MB": round(self.data["received_bytes"][""] / 1e6, 3),
            "receives": len(total),
            "mean seconds": round(sum(total) / len(total), 4) if total else 0.0,
            "failures": sum(self.data["failures"].values()),
            "prompts computed here": sum(
                count for key, count in self.data["prompts"].items() if is_fault(*key.split("|"))
            ),
            "leases expired": self.data["leases_expired"][""],
            "faults": sum(self.data["step_faults"].values()),
        }


class StatsCollector:
    """Counts of one role until vLLM asks for them. Used from one thread."""

    def __init__(self) -> None:
        self._stats = ConnectorStats()
        self._gauges: dict[str, int] = {}
        self._links: set[str] = set()

    def count(self, name: str, key: str = "", amount: float | Sequence[float] = 1) -> None:
        """Add to a counter, or samples to a histogram."""
        self._stats.add(name, key, amount)

    def gauge(self, name: str, value: int) -> None:
        """Set a gauge. A value that it has already is not sent again."""
        if value != self._gauges.get(name, 0):
            self._gauges[name] = value
            self._stats.add(name, "", value)

    def prompt(self, outcome: Outcome, reason: str, tokens: int) -> None:
        """Count a request's prompt. ``tokens`` of it were computed here, or are about to be."""
        reason = "" if outcome == Outcome.TRANSFERRED else str(reason)
        self.count("prompts", f"{outcome}|{reason}")
        if tokens and is_fault(outcome, reason):
            self.count("local_prompt_tokens", reason, tokens)

    def link(self, engine_id: str, nbytes: int, seconds: float) -> None:
        """Count what came from a prefill engine, and how long the transfers took."""
        name = short_name(engine_id)
        if name in self._links or len(self._links) < MAX_LINKS:
            self._links.add(name)
        else:
            name = OTHER_ENGINES
        self.count("link_bytes", name, nbytes)
        self.count("link_transfer_seconds", name, seconds)

    def take(self) -> ConnectorStats | None:
        """Counts since the last call; None if nothing happened."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, ConnectorStats()
        return taken


class PrometheusMetrics(metrics.KVConnectorPromMetrics):
    """``pdcluster_kv_*`` metrics of the API server, with one child for each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        options: dict[type, dict[str, Any]] = {
            Counter: {},
            Gauge: {"multiprocess_mode": "mostrecent"},
            Histogram: {"buckets": list(_BUCKETS)},
        }
        self._families = {
            name: metric_types[metric.kind](
                name=PREFIX + name,
                documentation=metric.text,
                labelnames=[*labelnames, *metric.labels],
                **options[metric.kind],
            )
            for name, metric in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, children in transfer_stats_data.items():
            metric = METRICS[name]
            for key, value in children.items():
                labels = key.split("|", len(metric.labels) - 1) if metric.labels else ()
                child = self._families[name].labels(*engine, *labels)
                if metric.kind is Counter:
                    child.inc(value)
                elif metric.kind is Histogram:
                    for seconds in value:
                        child.observe(seconds)
                elif value is not None:
                    child.set(value)
