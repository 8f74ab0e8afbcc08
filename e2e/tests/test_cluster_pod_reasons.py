"""What a real kubelet and scheduler say of pods that cannot run: named in the conditions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cluster_access import Proxy
from cluster_install import Installation
from cluster_run import ClusterRun, manifest, running
from local_run import appended, condition, idle

from cluster.session import Cluster
from pdcluster_operator.api.conditions import StatusReason

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SECONDS = 240.0
# A registry that nothing answers for: the pull fails at once.
NOWHERE = "127.0.0.1:1/nowhere:1"
MISSING = {"secretKeyRef": {"name": "missing", "key": "key"}}


def role(**changes: Any) -> dict[str, Any]:
    return {"podTemplate": idle(), **changes}


@pytest.fixture(scope="module")
def unlucky(cluster: Cluster, proxy: Proxy, operator: Installation) -> Iterator[ClusterRun]:
    """One namespace with two PDClusters, each role of which has a trouble of its own."""
    image = idle()
    image["spec"]["containers"][0]["image"] = NOWHERE
    router = {"podTemplate": idle("router")}
    kubelet = manifest(
        "unlucky",
        prefill={"podTemplate": image},
        decode=role(engine={"env": [{"name": "TOKEN", "valueFrom": MISSING}]}),
        router=router,
    )
    others = manifest(
        "others",
        prefill=role(resources={"requests": {"cpu": "1000"}}),
        decode={"podTemplate": appended("--no-such-argument")},
        router=router,
    )
    with running(cluster, proxy, kubelet, "unlucky") as run:
        run.apply(others)
        yield run


def told(run: ClusterRun, kind: str, reason: StatusReason) -> str:
    """The message of a role's condition, once it has the reason."""
    status = run.wait_status(
        reason, lambda seen: condition(seen, kind)["reason"] == reason, SECONDS
    )
    said = condition(status, kind)
    print(said)
    assert said["status"] == "False"
    assert condition(status, "Ready")["status"] != "True"
    return str(said["message"])


def beside(run: ClusterRun) -> ClusterRun:
    """The second PDCluster of the namespace."""
    other = ClusterRun(run.cluster, run.proxy, "others")
    other.namespace = run.namespace
    return other


def test_an_image_that_is_nowhere(unlucky: ClusterRun) -> None:
    message = told(unlucky, "PrefillReady", StatusReason.IMAGE_UNAVAILABLE)
    assert NOWHERE in message


def test_a_secret_that_is_missing(unlucky: ClusterRun) -> None:
    message = told(unlucky, "DecodeReady", StatusReason.POD_CONFIG_ERROR)
    assert 'secret "missing" not found' in message


def test_requests_that_no_node_has(unlucky: ClusterRun) -> None:
    message = told(beside(unlucky), "PrefillReady", StatusReason.UNSCHEDULABLE)
    assert "Insufficient cpu" in message


def test_an_argument_that_vllm_does_not_know(unlucky: ClusterRun) -> None:
    message = told(beside(unlucky), "DecodeReady", StatusReason.ENGINE_FAILED)
    assert "--no-such-argument" in message
