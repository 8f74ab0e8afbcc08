"""Each alert of the chart, as helm renders it: promtool lets it fire, and not on what is near."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_helm import one

from monitoring_files import ALERTS, alerts
from prometheus_server import promtool

pytestmark = pytest.mark.helm

Series = dict[str, str]
"""Values of a minute each, in promtool's notation, by their metric."""
OURS = 'namespace="ns",pdcluster_dev_cluster="c"'


def condition(kind: str, status: str, reason: str) -> str:
    named = 'cluster_namespace="ns",cluster="c"'
    return f'pdcluster_condition{{{named},condition="{kind}",status="{status}",reason="{reason}"}}'


def prompts(outcome: str, reason: str = "") -> str:
    return f'pdcluster_kv_prompts_total{{{OURS},outcome="{outcome}",reason="{reason}"}}'


def of_role(metric: str, role: str) -> str:
    return f'{metric}{{{OURS},pdcluster_dev_role="{role}"}}'


def reconciles(outcome: str) -> str:
    return f'pdcluster_reconciles_total{{outcome="{outcome}"}}'


def calls(code: str, resource: str = "pods") -> str:
    return f'pdcluster_api_calls_total{{code="{code}",resource="{resource}"}}'


WAITING, RUNNING = "vllm:num_requests_waiting", "vllm:num_requests_running"
USED = "vllm:kv_cache_usage_perc"
AVAILABLE, UNAVAILABLE = (
    condition("Available", "True", "Serving"),
    condition("Available", "False", "NoVerifiedPair"),
)
FAULTS = f'pdcluster_kv_step_faults_total{{{OURS},pdcluster_dev_engine="e",method="m"}}'
STANDING = {
    of_role(WAITING, "decode"): "3x30",
    of_role("pdcluster_kv_leases_held", "prefill"): "2x30",
    of_role(RUNNING, "decode"): "1x30",
    of_role(USED, "decode"): "0.8x30",
}
RECEIVED = of_role("pdcluster_kv_received_bytes_total", "decode")


@dataclass(frozen=True)
class Case:
    """What an alert is about, and the nearest that it is not about.

    Attributes:
        fires: series on which it fires at the minute ``at``, but not yet a minute after ``begins``.
        quiet: series on which it never fires, by what they are.
    """

    fires: Series
    at: int
    quiet: dict[str, Series]
    begins: int = 0


CASES = {
    "PDClusterUnavailable": Case(
        {AVAILABLE: "1x5 stale", UNAVAILABLE: "_x6 1x30"},
        10,
        {
            "it never served": {UNAVAILABLE: "1x30"},
            "nobody wants engines": {
                AVAILABLE: "1x5 stale",
                condition("Available", "False", "ScaledToZero"): "_x6 1x30",
            },
            "nobody knows": {
                AVAILABLE: "1x5 stale",
                condition("Available", "Unknown", "LauncherUnreachable"): "_x6 1x30",
            },
        },
        begins=6,
    ),
    "PDClusterNotReady": Case(
        {
            condition("Ready", "False", "Starting"): "1x10 stale",
            condition("Ready", "False", "LoadingWeights"): "_x11 1x10 stale",
            condition("Ready", "Unknown", "LauncherUnreachable"): "_x22 1x60",
        },
        32,
        {
            "held on purpose": {condition("Ready", "False", "Paused"): "1x60"},
            "Ready between": {
                condition("Ready", "False", "Starting"): "1x20 stale",
                condition("Ready", "True", "Ready"): "_x21 1x2 stale",
                condition("Ready", "False", "EngineFailed"): "_x24 1x20",
            },
        },
    ),
    "PDClusterChangeStuck": Case(
        {condition("Progressing", "False", "InsufficientCapacity"): "1x30"},
        6,
        {
            "done": {condition("Progressing", "False", "Complete"): "1x30"},
            "under way": {condition("Progressing", "True", "Replacing"): "1x30"},
        },
    ),
    "PDClusterLocalPrefill": Case(
        {condition("TransportHealthy", "False", "LocalPrefill"): "1x30"},
        11,
        {"healthy": {condition("TransportHealthy", "True", "NoThreshold"): "1x30"}},
    ),
    "PDClusterSlowLinks": Case(
        {condition("TransportHealthy", "False", "ProbableTCPFallback"): "1x30"},
        11,
        {"another reason": {condition("TransportHealthy", "False", "LocalPrefill"): "1x30"}},
    ),
    "PDClusterRequestsFail": Case(
        {prompts("failed", "TransferStalled"): "0+2x30", prompts("transferred"): "0+100x30"},
        10,
        {
            "one in a hundred": {
                prompts("failed", "TransferStalled"): "0+1x30",
                prompts("transferred"): "0+100x30",
            },
            "few requests": {
                prompts("failed", "TransferStalled"): "0x9 1x20",
                prompts("transferred"): "0+2x30",
            },
        },
    ),
    "PDClusterTransfersFail": Case(
        {prompts("recomputed", "LeaseExpired"): "0+2x30", prompts("transferred"): "0+100x30"},
        20,
        {
            "one in a hundred": {
                prompts("recomputed", "LeaseExpired"): "0+1x30",
                prompts("transferred"): "0+100x30",
            },
            "decode's own cache had it": {
                prompts("local", "PrefixHit"): "0+2x30",
                prompts("transferred"): "0+100x30",
            },
        },
    ),
    "PDClusterTransfersStandStill": Case(
        {**STANDING, RECEIVED: "1000x30"},
        10,
        {
            "KV moves": {**STANDING, RECEIVED: "0+1000x30"},
            "decode is full": {**STANDING, RECEIVED: "1000x30", of_role(USED, "decode"): "0.95x30"},
            "nothing waits": {
                **STANDING,
                of_role(WAITING, "decode"): "3 3 0 3 3 3 0 3 3 3 3 0 3 3 3",
                RECEIVED: "1000x30",
            },
        },
        begins=1,
    ),
    "PDClusterLeasesExpire": Case(
        {
            of_role("pdcluster_kv_leases_expired_total", "prefill"): "0+3x40",
            prompts("transferred"): "0+100x40",
        },
        25,
        {
            "clients that leave": {
                of_role("pdcluster_kv_leases_expired_total", "prefill"): "0+2x40",
                prompts("transferred"): "0+100x40",
            }
        },
    ),
    "PDClusterPrefillTooSmall": Case(
        {of_role(WAITING, "prefill"): "9x30", of_role(RUNNING, "prefill"): "4x30"},
        20,
        {
            "as many run": {
                of_role(WAITING, "prefill"): "4x30",
                of_role(RUNNING, "prefill"): "4x30",
            },
            "decode": {of_role(WAITING, "decode"): "9x30", of_role(RUNNING, "decode"): "4x30"},
        },
    ),
    "PDClusterDecodeTooSmall": Case(
        {of_role(WAITING, "decode"): "9x30", of_role(RUNNING, "decode"): "4x30"},
        20,
        {"as many run": {of_role(WAITING, "decode"): "4x30", of_role(RUNNING, "decode"): "4x30"}},
    ),
    "PDClusterConnectorFault": Case(
        {FAULTS: "_x5 1x30"},
        14,
        {"an old one": {FAULTS: "5x30"}},
        begins=3,
    ),
    "PDClusterEngineSilent": Case(
        {of_role("up", "decode"): "0x30"},
        16,
        {"it answers": {of_role("up", "decode"): "1x30"}, "of others": {'up{job="x"}': "0x30"}},
    ),
    "PDClusterOperatorDown": Case(
        {calls("200", "leases"): "0+1x30"},
        6,
        {"it runs": {calls("200", "pdclusters"): "1x30"}},
    ),
    "PDClusterOperatorBehind": Case(
        {"pdcluster_queue_depth": "2x30"},
        11,
        {"now and then": {"pdcluster_queue_depth": "2 2 2 2 0 2 2 2 2 0 2 2 2 2 0 2 2 2 2 0"}},
    ),
    "PDClusterReconcilesFail": Case(
        {reconciles("failed"): "0+2x30", reconciles("done"): "0+8x30"},
        15,
        {"one in ten": {reconciles("failed"): "0+1x30", reconciles("done"): "0+9x30"}},
    ),
    "PDClusterApiServerFails": Case(
        {calls("0"): "0+1x30", calls("503"): "0+1x30", calls("200"): "0+8x30"},
        10,
        {"refusals": {calls("409"): "0+5x30", calls("200"): "0+8x30"}},
    ),
    "PDClusterNamespaceUnlisted": Case(
        {'pdcluster_unlisted_namespace{cluster_namespace="a"}': "1x30"},
        11,
        {"listed": {'pdcluster_unlisted_namespace{cluster_namespace="a"}': "1x5 stale"}},
    ),
    "PDClusterWebhookCertificateExpires": Case(
        {"pdcluster_webhook_certificate_expiry_seconds": "604000x90"},
        61,
        {
            "a week and an hour": {"pdcluster_webhook_certificate_expiry_seconds": "620000x90"},
            "the webhook's own process": {"pdcluster_webhook_certificate_expiry_seconds": "0x90"},
        },
    ),
}
LAST = 30


def check(folder: Path, rules: str, *groups: dict[str, Any]) -> None:
    (folder / "alerts.yaml").write_text(rules)
    tests = folder / "tests.yaml"
    tests.write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "tests": groups}))
    promtool("test", "rules", tests)


def group(series: Series, name: str, **firing: bool) -> dict[str, Any]:
    """One group of promtool: whether an alert fires at some minutes, such as ``10m=True``."""
    return {
        "interval": "1m",
        "input_series": [{"series": key, "values": value} for key, value in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                "eval_time": minute,
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
            for minute, fires in firing.items()
        ],
    }


@pytest.fixture(scope="module")
def rendered(helm) -> str:
    objects = helm.objects("--set", "monitoring.rules.enabled=true")
    return yaml.safe_dump(one(objects, "PrometheusRule")["spec"])


def test_promtool_finds_no_fault_in_the_files(tmp_path):
    promtool("check", "rules", ALERTS)
    # Debian's Prometheus is built without its client of Kubernetes.
    text = ALERTS.with_name("scrape.yaml").read_text()
    (tmp_path / "scrape.yaml").write_text(
        text.replace("kubernetes_sd_configs:\n      - role: pod", "static_configs: []")
    )
    promtool("check", "config", tmp_path / "scrape.yaml")


def test_each_alert_has_a_case():
    assert list(CASES) == [rule["alert"] for rule in alerts()]


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_on_its_fault_and_not_on_what_is_near(rendered, tmp_path, name):
    case = CASES[name]
    wrong = group(case.fires, name, **{f"{case.begins + 1}m": False, f"{case.at}m": True})
    near = [
        group(series, name, **{f"{minute}m": False for minute in (case.at, LAST + case.at)})
        for series in case.quiet.values()
    ]
    check(tmp_path, rendered, wrong, *near)


def test_engines_whose_kv_is_full_of_requests_that_wait_for_kv_stand_still(rendered, tmp_path):
    series = {of_role(USED, "decode"): "0.95x30", of_role(RUNNING, "decode"): "0x30"}
    full = {**STANDING, RECEIVED: "1000x30", **series}
    check(tmp_path, rendered, group(full, "PDClusterTransfersStandStill", **{"10m": True}))


SAID = {
    "PDClusterUnavailable": (
        {"severity": "critical", "cluster_namespace": "ns", "cluster": "c"},
        "PDCluster ns/c serves no clients any more.",
        (
            "Available is False, with the reason NoVerifiedPair. "
            "Next: kubectl describe pdcluster c -n ns"
        ),
        "docs/troubleshooting.md#noverifiedpair",
    ),
    "PDClusterRequestsFail": (
        {
            "severity": "critical",
            "namespace": "ns",
            "pdcluster_dev_cluster": "c",
            "reason": "TransferStalled",
        },
        "1.961% of the requests to PDCluster ns/c fail with TransferStalled.",
        (
            "Their KV did not come from prefill, and spec.transfer.loadFailurePolicy is Fail: "
            "clients get 503. Next: kubectl logs "
            "-l pdcluster.dev/cluster=c,pdcluster.dev/role=decode -n ns --tail=200"
        ),
        "docs/troubleshooting.md#transferstalled",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_an_alert_names_the_reason_and_leads_to_its_line(rendered, tmp_path, name):
    labels, summary, description, runbook = SAID[name]
    case = CASES[name]
    said = {"summary": summary, "description": description, "runbook_url": runbook}
    tested = group(case.fires, name)
    tested["alert_rule_test"] = [
        {
            "eval_time": f"{case.at}m",
            "alertname": name,
            "exp_alerts": [{"exp_labels": labels, "exp_annotations": said}],
        }
    ]
    check(tmp_path, rendered, tested)
