"""What the connector counts, in vLLM's connector-stats form and as Prometheus metrics.

Both roles fill a :class:`StatsCollector`. vLLM takes a snapshot in each step and sums the snapshots
of all workers and the scheduler role. It hands the sum to the API server as a plain dict. The base
units are bytes and seconds.
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

PHASES: Final = ("handshake", "post", "transfer", "fence", "total")
MAX_SAMPLES: Final = 4096  # for each phase and interval; more samples are dropped
_COUNTS: Final = ("failures", "decodes_without_transfer", "faults")
_BUCKETS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


def _empty() -> dict[str, Any]:
    return {
        "received_bytes": 0,
        "seconds": {phase: [] for phase in PHASES},
        "failures": {},
        "decodes_without_transfer": {},
        "faults": {},
        "leases_expired": 0,
        "leases_held": None,
    }


@dataclass
class ConnectorStats(KVConnectorStats):
    """One interval's counts.

    ``data``: ``received_bytes``; ``seconds`` by phase, a list of samples; ``failures`` and
    ``decodes_without_transfer`` by reason; ``faults`` by method (exceptions caught in engine
    steps); ``leases_expired``; ``leases_held`` (None where nothing changed).
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
        if theirs["leases_held"] is not None:
            self.data["leases_held"] = theirs["leases_held"]
        for phase, samples in theirs["seconds"].items():
            mine = self.data["seconds"].setdefault(phase, [])
            mine.extend(samples[: max(0, MAX_SAMPLES - len(mine))])
        for name in _COUNTS:
            for label, count in theirs[name].items():
                self.data[name][label] = self.data[name].get(label, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Summary for vLLM's periodic log line."""
        total = self.data["seconds"]["total"]
        return {
            "received MB": round(self.data["received_bytes"] / 1e6, 3),
            "receives": len(total),
            "mean seconds": round(sum(total) / len(total), 4) if total else 0.0,
            "failures": sum(self.data["failures"].values()),
            "decodes without transfer": sum(self.data["decodes_without_transfer"].values()),
            "leases expired": self.data["leases_expired"],
            "faults": sum(self.data["faults"].values()),
        }


class StatsCollector:
    """Counts of one role until vLLM asks for them. Used from one thread."""

    def __init__(self) -> None:
        self._stats = ConnectorStats()
        self._leases_held = 0

    def receives(
        self, nbytes: int, phase_seconds: Mapping[str, Sequence[float]], failures: Mapping[str, int]
    ) -> None:
        """Add receives that ended on this rank: bytes, seconds by phase, failures by reason."""
        self._stats.data["received_bytes"] += nbytes
        for phase, values in phase_seconds.items():
            samples = self._stats.data["seconds"].setdefault(phase, [])
            samples.extend(values[: max(0, MAX_SAMPLES - len(samples))])
        for reason, count in failures.items():
            self._count("failures", str(reason), count)

    def decoded_without_transfer(self, reason: str) -> None:
        """Count a request that decode computed from its own prefill."""
        self._count("decodes_without_transfer", reason)

    def fault(self, method: str) -> None:
        """Count an exception that the guard caught."""
        self._count("faults", method)

    def lease_expired(self) -> None:
        """Count a lease that nobody released in time."""
        self._stats.data["leases_expired"] += 1

    def leases_held(self, count: int) -> None:
        """Record how many leases keep blocks from reuse."""
        if count != self._leases_held:
            self._leases_held = count
            self._stats.data["leases_held"] = count

    def take(self) -> ConnectorStats | None:
        """Counts since the last call; None if nothing happened."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, ConnectorStats()
        return taken

    def _count(self, name: str, label: str, count: int = 1) -> None:
        counts = self._stats.data[name]
        counts[label] = counts.get(label, 0) + count


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
        self._without = self._counter(
            "pdcluster_kv_decodes_without_transfer",
            "Requests whose prompt a decode engine computed itself, by reason.",
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
        self._held = self._gauge_cls(
            name="pdcluster_kv_leases_held",
            documentation="Finished requests whose KV blocks are kept for a decode engine.",
            multiprocess_mode="mostrecent",
            labelnames=self._labelnames,
        )
        self._seconds = self._histogram_cls(
            name="pdcluster_kv_receive_seconds",
            documentation="Duration of a KV receive on one rank, by phase.",
            buckets=list(_BUCKETS),
            labelnames=[*self._labelnames, "phase"],
        )

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._counter_cls(
            name=name, documentation=text, labelnames=[*self._labelnames, *labels]
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        engine = self.per_engine_labelvalues[engine_idx]
        data = transfer_stats_data
        self._received.labels(*engine).inc(data["received_bytes"])
        self._expired.labels(*engine).inc(data["leases_expired"])
        for counter, name in (
            (self._failures, "failures"),
            (self._without, "decodes_without_transfer"),
            (self._faults, "faults"),
        ):
            for label, count in data[name].items():
                counter.labels(*engine, label).inc(count)
        held: Gauge = self._held.labels(*engine)
        if data["leases_held"] is not None:
            held.set(data["leases_held"])
        for phase, samples in data["seconds"].items():
            histogram: Histogram = self._seconds.labels(*engine, phase)
            for value in samples:
                histogram.observe(value)
