"""What the connector counts: in vLLM's connector-stats form, and as Prometheus metrics.

Both roles fill a :class:`StatsCollector`. vLLM takes a snapshot in each step and sums the snapshots
of all workers and the scheduler side. It hands the sum to the API server as a plain dict, and
:class:`PrometheusMetrics` shows it there. The base units are bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from pdcluster_connector.protocol.prompt_outcomes import PROMPTS_METRIC, Outcome, is_fault, label_of

PHASES: Final = ("handshake", "post", "transfer", "fence", "total")
MAX_SAMPLES: Final = 4096  # for each phase and interval; more samples are dropped
_COUNTS: Final = ("failures", "local_prompt_tokens", "faults")
_GAUGES: Final = ("leases_held", "local_prompts_waiting")


def _empty() -> dict[str, Any]:
    return {
        "received_bytes": 0,
        "seconds": {phase: [] for phase in PHASES},
        "failures": {},
        "prompts": {},
        "local_prompt_tokens": {},
        "faults": {},
        "leases_expired": 0,
        "leases_held": None,
        "local_prompts_waiting": None,
        "local_prompt_waits": [],
    }


@dataclass
class ConnectorStats(KVConnectorStats):
    """One interval's counts.

    ``data``: ``received_bytes``; ``seconds`` by phase, a list of samples; ``failures`` by
    reason; ``prompts`` by outcome and reason (protocol.prompt_outcomes); ``local_prompt_tokens`` by
    reason; ``faults`` by method (exceptions caught in engine
    steps); ``leases_expired``; ``leases_held`` and ``local_prompts_waiting`` (None where nothing
    changed); ``local_prompt_waits``, a list of seconds.
    """

    data: dict[str, Any] = field(default_factory=_empty)

    def reset(self) -> None:
        """Forget everything."""
        self.data = _empty()

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return self.data == _empty()

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Add another interval's or rank's counts to this one."""
        theirs = other.data
        self.data["received_bytes"] += theirs["received_bytes"]
        self.data["leases_expired"] += theirs["leases_expired"]
        for gauge in _GAUGES:
            if theirs[gauge] is not None:
                self.data[gauge] = theirs[gauge]
        _extend(self.data["local_prompt_waits"], theirs["local_prompt_waits"])
        for phase, samples in theirs["seconds"].items():
            _extend(self.data["seconds"].setdefault(phase, []), samples)
        for name in _COUNTS:
            for label, count in theirs[name].items():
                self.data[name][label] = self.data[name].get(label, 0) + count
        for outcome, counts in theirs["prompts"].items():
            sums = self.data["prompts"].setdefault(outcome, {})
            for reason, count in counts.items():
                sums[reason] = sums.get(reason, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Summary for vLLM's periodic log line."""
        total = self.data["seconds"]["total"]
        return {
            "received MB": round(self.data["received_bytes"] / 1e6, 3),
            "receives": len(total),
            "mean seconds": round(sum(total) / len(total), 4) if total else 0.0,
            "failures": sum(self.data["failures"].values()),
            "prompts computed here": sum(
                count
                for outcome, counts in self.data["prompts"].items()
                for reason, count in counts.items()
                if is_fault(outcome, reason)
            ),
            "leases expired": self.data["leases_expired"],
            "faults": sum(self.data["faults"].values()),
        }


class StatsCollector:
    """Counts of one role until vLLM asks for them. Used from one thread."""

    def __init__(self) -> None:
        self._stats = ConnectorStats()
        self._gauges = dict.fromkeys(_GAUGES, 0)

    def receives(
        self, nbytes: int, phase_seconds: Mapping[str, Sequence[float]], failures: Mapping[str, int]
    ) -> None:
        """Add receives that ended on this rank: bytes, seconds by phase, failures by reason."""
        self._stats.data["received_bytes"] += nbytes
        for phase, values in phase_seconds.items():
            _extend(self._stats.data["seconds"].setdefault(phase, []), values)
        for reason, count in failures.items():
            self._count("failures", str(reason), count)

    def prompt(self, outcome: Outcome, reason: str, tokens: int) -> None:
        """Count a request's prompt. ``tokens`` of it were computed here, or are about to be."""
        reason = label_of(outcome, reason)
        counts = self._stats.data["prompts"].setdefault(outcome.value, {})
        counts[reason] = counts.get(reason, 0) + 1
        if tokens and is_fault(outcome, reason):
            self._count("local_prompt_tokens", reason, tokens)

    def fault(self, method: str) -> None:
        """Count an exception that the guard caught."""
        self._count("faults", method)

    def lease_expired(self) -> None:
        """Count a lease that nobody released in time."""
        self._stats.data["leases_expired"] += 1

    def leases_held(self, count: int) -> None:
        """Record how many leases keep blocks from reuse."""
        self._set("leases_held", count)

    def local_prompts_waiting(self, count: int) -> None:
        """Record how many prompts wait for this engine to compute them."""
        self._set("local_prompts_waiting", count)

    def local_prompt_waited(self, seconds: float) -> None:
        """Add a prompt that this engine let wait so long."""
        _extend(self._stats.data["local_prompt_waits"], [seconds])

    def take(self) -> ConnectorStats | None:
        """Counts since the last call; None if nothing happened."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, ConnectorStats()
        return taken

    def _set(self, gauge: str, count: int) -> None:
        if count != self._gauges[gauge]:
            self._gauges[gauge] = self._stats.data[gauge] = count

    def _count(self, name: str, label: str, count: int = 1) -> None:
        counts = self._stats.data[name]
        counts[label] = counts.get(label, 0) + count


def _extend(samples: list[float], more: Sequence[float]) -> None:
    samples.extend(more[: max(0, MAX_SAMPLES - len(samples))])


_BUCKETS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class PrometheusMetrics(KVConnectorPromMetrics):
    """``pdcluster_kv_*`` metrics of the API server, with one child for each engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._received = self._counter(
            "pdcluster_kv_received_bytes", "KV bytes received from prefill engines, all ranks."
        )
        self._failures = self._counter(
            "pdcluster_kv_failures", "KV receives that failed, by reason, each rank.", "reason"
        )
        self._prompts = self._counter(
            PROMPTS_METRIC.removesuffix("_total"),
            "Prompts of a decode engine, by what became of their transfer and why.",
            *("outcome", "reason"),
        )
        self._local_tokens = self._counter(
            "pdcluster_kv_local_prompt_tokens",
            "Prompt tokens that decode computed although prefill should have, by reason.",
            "reason",
        )
        self._expired = self._counter(
            "pdcluster_kv_leases_expired", "Leases on KV that no decode engine released in time."
        )
        self._faults = self._counter(
            "pdcluster_kv_step_faults",
            "Exceptions caught in connector methods that an engine step calls.",
            "method",
        )
        self._held = self._gauge(
            "pdcluster_kv_leases_held",
            "Finished requests whose KV blocks are kept for a decode engine.",
        )
        self._waiting = self._gauge(
            "pdcluster_kv_local_prompts_waiting",
            "Prompts that wait until decode computes them, because other requests generate.",
        )
        self._seconds = self._histogram(
            "pdcluster_kv_receive_seconds",
            "Duration of a KV receive on one rank, by phase.",
            "phase",
        )
        self._waits = self._histogram(
            "pdcluster_kv_local_prompt_wait_seconds",
            "Seconds that a prompt waited until decode computed it. Prompts that did not wait are"
            " not counted.",
        )

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._counter_cls(
            name=name, documentation=text, labelnames=[*self._labelnames, *labels]
        )

    def _gauge(self, name: str, text: str) -> Any:
        make: Any = self._gauge_cls
        return make(
            name=name,
            documentation=text,
            multiprocess_mode="mostrecent",
            labelnames=self._labelnames,
        )

    def _histogram(self, name: str, text: str, *labels: str) -> Any:
        make: Any = self._histogram_cls
        return make(
            name=name,
            documentation=text,
            buckets=list(_BUCKETS),
            labelnames=[*self._labelnames, *labels],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        engine = self.per_engine_labelvalues[engine_idx]
        data = transfer_stats_data
        self._received.labels(*engine).inc(data["received_bytes"])
        self._expired.labels(*engine).inc(data["leases_expired"])
        for counter, name in (
            (self._failures, "failures"),
            (self._local_tokens, "local_prompt_tokens"),
            (self._faults, "faults"),
        ):
            for label, count in data[name].items():
                counter.labels(*engine, label).inc(count)
        for outcome, counts in data["prompts"].items():
            for reason, count in counts.items():
                self._prompts.labels(*engine, outcome, reason).inc(count)
        for family, name in (
            (self._held, "leases_held"),
            (self._waiting, "local_prompts_waiting"),
        ):
            gauge: Gauge = family.labels(*engine)
            if data[name] is not None:
                gauge.set(data[name])
        waits: Histogram = self._waits.labels(*engine)
        for value in data["local_prompt_waits"]:
            waits.observe(value)
        for phase, samples in data["seconds"].items():
            histogram: Histogram = self._seconds.labels(*engine, phase)
            for value in samples:
                histogram.observe(value)
