"""What the connector counts, as Prometheus metrics of the API server.

vLLM hands over what :mod:`metrics` has counted. The base units are bytes and seconds.
"""

from __future__ import annotations

from typing import Any, Final

from prometheus_client import Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from pdcluster_connector.protocol.prompt_outcomes import PROMPTS_METRIC

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
        return self._gauge_cls(
            name=name,
            documentation=text,
            multiprocess_mode="mostrecent",
            labelnames=self._labelnames,
        )

    def _histogram(self, name: str, text: str, *labels: str) -> Any:
        return self._histogram_cls(
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
