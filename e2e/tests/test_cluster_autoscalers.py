"""Kubernetes' autoscaler follows the load of real engines, of both roles, and no request fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_account import Account
from cluster_access import Proxy
from cluster_install import Installation
from cluster_run import ClusterRun, manifest, running
from local_run import condition
from pod_metrics import pod_metrics, unregister
from rollout_changes import (
    ROLL_SECONDS,
    at_rest,
    no_outage,
    told,
    wait_for_answers,
)
from rollout_record import Record

from cluster.session import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(5000)]

TARGET, LOW, HIGH = 500, 100, 900
"""Millicores of a pod: what the autoscaler aims at, and what the test says that pods use."""
KINDS = {"decode": "PDCluster", "prefill": "PrefillScaler"}


def autoscaler(name: str, role: str) -> dict[str, Any]:
    """Between one and two engines of a role, without the minutes that it waits by default."""
    cpu = {"name": "cpu", "target": {"type": "AverageValue", "averageValue": f"{TARGET}m"}}
    target = {"apiVersion": "pdcluster.dev/v1alpha1", "kind": KINDS[role], "name": name}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": role},
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": 1,
            "maxReplicas": 2,
            "metrics": [{"type": "Resource", "resource": cpu}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }


@pytest.fixture(scope="module")
def scaled(cluster: Cluster, proxy: Proxy, operator: Installation) -> Iterator[ClusterRun]:
    if not cluster.ours:
        pytest.skip("that cluster has metrics of its own")
    small = {"resources": {"requests": {"memory": "2Gi"}}}  # four engines have to fit
    document = manifest(
        "scaled",
        engine={"maxModelLen": 4096},
        transfer={"internalNames": "Shown"},
        prefill=small,
        decode=small,
    )
    scaler = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PrefillScaler",
        "metadata": {"name": "scaled"},
        "spec": {"replicas": 1},
    }
    unregister(ClusterRun(cluster, proxy, "scaled"))  # what a run that was killed left
    with running(cluster, proxy, None, "scaled") as run:
        run.apply(scaler)
        run.apply(document)
        run.wait_ready(ROLL_SECONDS)
        yield run


def reads_metrics(run: ClusterRun, role: str) -> bool:
    path = f"/apis/autoscaling/v2/namespaces/{run.namespace}/horizontalpodautoscalers/{role}"
    status = (run.proxy.get(path) or {}).get("status") or {}
    return bool(condition(status, "ScalingActive")["reason"] == "ValidMetricFound")


def has(run: ClusterRun, engines: int) -> bool:
    """Whether each role has so many engines, which are all ready, and nothing is left to do."""
    status = run.status()
    words = f"{engines}/{engines}"
    return status.get("prefill") == status.get("decode") == words and at_rest(run)


def test_autoscalers_of_both_roles_follow_the_load_and_no_request_fails(
    scaled: ClusterRun, tmp_path: Path
) -> None:
    with pod_metrics(scaled, tmp_path / "tls", dict.fromkeys(KINDS, TARGET)) as metrics:
        for role in KINDS:
            scaled.apply(autoscaler(scaled.name, role))
            scaled.wait(f"metrics of {role}", lambda role=role: reads_metrics(scaled, role), 300)
        scaled.wait("one of each role", lambda: has(scaled, 1), ROLL_SECONDS)
        with Account(scaled, 300_000) as account, Record(scaled, account) as seen:
            wait_for_answers(scaled, account)
            for load, engines in ((HIGH, 2), (LOW, 1)):
                seen.mark(f"each pod uses {load}m")
                metrics.millicores = dict.fromkeys(KINDS, load)
                scaled.wait(
                    f"{engines} of each role", lambda n=engines: has(scaled, n), ROLL_SECONDS
                )
            seen.mark("at rest")
            wait_for_answers(scaled, account)
        told(scaled, "autoscalers, 1 to 2 engines of both roles and back", account, seen, tmp_path)
    no_outage(account, seen)
    assert scaled.get()["spec"]["prefill"].get("replicas", 1) == 1, "the scaler has the number"
