"""Counts survive vLLM's way: step snapshots, sums over ranks, a dict, Prometheus."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdcluster_connector.protocol.prompt_outcomes import Outcome
from pdcluster_connector.vllm.connector import PDClusterConnector
from pdcluster_connector.vllm.metrics import MAX_LINKS, MAX_SAMPLES, ConnectorStats, StatsCollector

pytestmark = pytest.mark.vllm


def filled() -> ConnectorStats:
    collector = StatsCollector()
    collector.count("received_bytes", amount=1000)
    collector.count("receive_seconds", "total", [0.25])
    collector.count("receive_seconds", "transfer", [0.2])
    collector.count("failures", "BackendError", 2)
    collector.prompt(Outcome.LOCAL, "NoTicket", 40)
    collector.prompt(Outcome.LOCAL, "PrefixHit", 30)
    collector.prompt(Outcome.TRANSFERRED, "", 20)
    collector.prompt(Outcome.RECOMPUTED, "LeaseExpired", 7)
    collector.count("step_faults", "start_load_kv:KeyError")
    collector.count("leases_expired")
    collector.gauge("leases_held", 3)
    collector.gauge("local_prompts_waiting", 4)
    collector.count("local_prompt_wait_seconds", "", [0.75])
    collector.count("handover_seconds", amount=[0.125])
    collector.link("ns.c.prefill.r1.0/1", 600, 0.5)
    collector.link("ns.c.prefill.r2.0/2", 400, 0.25)
    collector.link("by|hand/1", 8, 0.5)
    taken = collector.take()
    assert taken is not None
    return taken


def test_nothing_is_reported_when_nothing_happened() -> None:
    collector = StatsCollector()
    assert collector.take() is None
    collector.gauge("leases_held", 0)
    assert collector.take() is None
    collector.gauge("leases_held", 2)
    assert collector.take() is not None
    collector.gauge("leases_held", 2)
    assert collector.take() is None
    assert ConnectorStats().is_empty()
    assert not filled().is_empty()


def test_ranks_add_up_and_dicts_come_back() -> None:
    summed = filled().aggregate(filled())
    again = PDClusterConnector.build_kv_connector_stats(json.loads(json.dumps(summed.to_dict())))
    assert again is not None
    assert again.data["received_bytes"] == {"": 2000}
    assert again.data["receive_seconds"]["total"] == [0.25, 0.25]
    assert again.data["failures"] == {"BackendError": 4}
    assert again.data["leases_held"] == {"": 3}, "a gauge is not summed"
    assert again.data["local_prompts_waiting"] == {"": 4}
    assert again.data["local_prompt_wait_seconds"] == {"": [0.75, 0.75]}
    assert again.reduce()["failures"] == 4
    assert again.reduce()["prompts computed here"] == 4
    assert again.reduce()["mean seconds"] == 0.25
    again.reset()
    assert again.is_empty()


def test_samples_are_bounded() -> None:
    collector = StatsCollector()
    for _ in range(3):
        collector.count("receive_seconds", "total", [0.1] * MAX_SAMPLES)
    for _ in range(MAX_SAMPLES + 1):
        collector.count("local_prompt_wait_seconds", "", [0.1])
    taken = collector.take()
    assert taken is not None
    assert len(taken.data["receive_seconds"]["total"]) == MAX_SAMPLES
    assert len(taken.aggregate(taken).data["receive_seconds"]["total"]) == MAX_SAMPLES
    assert len(taken.data["local_prompt_wait_seconds"][""]) == MAX_SAMPLES


def test_links_are_bounded() -> None:
    """Whoever may send tickets without a signature can name as many engines as they like."""
    collector = StatsCollector()
    for number in range(MAX_LINKS + 10):
        collector.link(f"ns.c.prefill.r.{number}/1", 1, 0.5)
        collector.link("ns.c.prefill.r.0/1", 1, 0.5)
    taken = collector.take()
    assert taken is not None
    links = taken.data["link_bytes"]
    assert len(links) == MAX_LINKS + 1
    assert links["prefill/0"] == 1 + MAX_LINKS + 10
    assert links["other"] == 10
    assert taken.data["link_transfer_seconds"].keys() == links.keys()


def test_prometheus_names_and_values() -> None:
    registry = CollectorRegistry()

    def bound(metric: type) -> object:
        return lambda **kwargs: metric(registry=registry, **kwargs)

    prometheus = PDClusterConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None),
        {Gauge: bound(Gauge), Counter: bound(Counter), Histogram: bound(Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    assert prometheus is not None
    prometheus.observe(filled().to_dict(), 1)
    prometheus.observe(filled().to_dict(), 1)
    labels = {"model_name": "m", "engine": "1"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(name, {**labels, **more})

    assert value("pdcluster_kv_received_bytes_total") == 2000
    assert value("pdcluster_kv_failures_total", reason="BackendError") == 4
    prompts = "pdcluster_kv_prompts_total"
    assert value(prompts, outcome="local", reason="NoTicket") == 2
    assert value(prompts, outcome="local", reason="PrefixHit") == 2
    assert value(prompts, outcome="transferred", reason="") == 2
    assert value(prompts, outcome="recomputed", reason="LeaseExpired") == 2
    tokens = "pdcluster_kv_local_prompt_tokens_total"
    assert value(tokens, reason="NoTicket") == 80
    assert value(tokens, reason="LeaseExpired") == 14
    assert value(tokens, reason="PrefixHit") is None, "nothing that prefill should have brought"
    assert value("pdcluster_kv_leases_expired_total") == 2
    assert value("pdcluster_kv_leases_held") == 3
    assert value("pdcluster_kv_local_prompts_waiting") == 4
    assert value("pdcluster_kv_local_prompt_wait_seconds_sum") == 1.5
    assert value("pdcluster_kv_local_prompt_wait_seconds_count") == 2
    assert value("pdcluster_kv_handover_seconds_sum") == 0.25
    assert value("pdcluster_kv_link_bytes_total", prefill="prefill/0") == 2000
    assert value("pdcluster_kv_link_transfer_seconds_total", prefill="prefill/0") == 1.5
    assert value("pdcluster_kv_link_bytes_total", prefill="by|hand") == 16
    assert value("pdcluster_kv_receive_seconds_sum", phase="total") == 0.5
    assert value("pdcluster_kv_receive_seconds_count", phase="transfer") == 2
    assert value("pdcluster_kv_step_faults_total", method="start_load_kv:KeyError") == 2
    other = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("pdcluster_kv_received_bytes_total", other) is None
