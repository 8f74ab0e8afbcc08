"""A Prometheus that scrapes a local pair, as the chart's monitors have it do in a cluster."""

from __future__ import annotations

from local_run import LocalRun

from monitoring_files import ALERTS, expressions, scaling_queries, selectors
from pdcluster_operator.api.object_names import ENGINE_METRICS_PORT, ROUTER_METRICS_PORT
from prometheus_server import Prometheus

NAMESPACE, CLUSTER = "default", "tiny"
VALUES = {"$namespace": NAMESPACE, "$cluster": CLUSTER, "$__rate_interval": "1m"}

NO_SERVER = "local mode has no API server"
NO_WEBHOOK = "local mode has no webhook"
WITHOUT_SAMPLES = {
    "pdcluster_api_calls_total": NO_SERVER,
    "pdcluster_api_seconds_bucket": NO_SERVER,
    "pdcluster_unlisted_namespace": NO_SERVER,
    "pdcluster_webhook_certificate_expiry_seconds > 0": NO_WEBHOOK,
    "pdcluster_webhook_refusals_total": NO_WEBHOOK,
    "pdcluster_webhook_reviews_total": NO_WEBHOOK,
    "pdcluster_kv_failures_total": "no receive failed",
    'outcome="failed"': "the policy is to compute such prompts again",
    'outcome="recomputed"': "no transfer failed",
    "pdcluster_kv_step_faults_total": "the connector had no fault",
    'reason="ProbableTCPFallback"': "no bandwidth is asked for",
    "pdcluster_advised_engines": "no advice is asked for",
    'condition="Available",status="False"': "it serves",
    'condition="Progressing",status="False",reason!~"Complete|Paused"': "no change is stuck",
}
"""Queries and selectors with these parts have no samples here, and why."""


def prometheus(run: LocalRun) -> Prometheus:
    """Return a Prometheus with the labels that a PodMonitor gives, and with the alerts."""
    ours = {"namespace": NAMESPACE, "pdcluster_dev_cluster": CLUSTER}
    targets = {
        f"{run.address(role)}:{ENGINE_METRICS_PORT}": {
            **ours,
            "pdcluster_dev_role": role,
            "pdcluster_dev_engine": f"{CLUSTER}-{role}-0",
        }
        for role in ("prefill", "decode")
    }
    targets[f"{run.address('router')}:{ROUTER_METRICS_PORT}"] = ours
    targets[f"127.0.0.1:{run.serve_metrics()}"] = {"namespace": "pdcluster-system"}
    folder = run.folder / "prometheus"
    folder.mkdir()
    return Prometheus(folder, targets, [ALERTS])


def asked() -> dict[str, str]:
    """Return what has to have samples, by where it stands.

    Those are the queries of panels and of KEDA's triggers, and what alerts read: few alerts fire on
    a pair that is well.
    """
    found = {}
    for where, expression in expressions().items():
        text = expression
        for variable, value in VALUES.items():
            text = text.replace(variable, value)
        read = [text] if "/" in where else selectors(text)
        found |= {f"{where} {number}": one for number, one in enumerate(read)}
    for where, text in scaling_queries().items():
        found[where] = text.replace('"llm"', f'"{NAMESPACE}"').replace('"llama"', f'"{CLUSTER}"')
    return {
        where: text
        for where, text in found.items()
        if not any(part in text for part in WITHOUT_SAMPLES)
    }
