"""Engines that start together, on a real kube-scheduler: nothing is played but the nodes.

No kubelet runs, so a pod that has its node is all that there is to see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from operator_runs import (
    CHILDREN,
    Operator,
    at_rest,
    cluster,
    condition,
    create,
    delete,
    edit,
    get,
    until,
)
from real_api import RealApi, add_crds, running_api

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
POD_GROUPS = "/apis/scheduling.k8s.io/v1beta1/namespaces/{}/podgroups"
MERGE = "application/merge-patch+json"
GANG = {"gang": "Enabled"}


@pytest.fixture(scope="module")
def real() -> Iterator[RealApi]:
    """A control plane with PodGroups and with a scheduler."""
    with running_api(gangs=True) as api:
        add_crds(api)
        yield api


@pytest.fixture
def node(real: RealApi, namespace: str) -> Iterator[str]:
    """A node whose GPUs nobody else asks for. It has none yet."""
    path = f"/api/v1/nodes/{namespace}"
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": namespace}}
    assert real.call("POST", "/api/v1/nodes", body)[0] == 201
    # Nobody takes away the taint that the API server gives a new node.
    assert real.call("PATCH", path, {"spec": {"taints": None}}, MERGE)[0] == 200
    has_gpus(real, namespace, 0, 0)
    yield namespace
    assert real.call("DELETE", path)[0] == 200


def gpu(node: str, role: str) -> str:
    return f"example.com/{node}-{role}-gpu"


def has_gpus(real: RealApi, node: str, prefill: int, decode: int) -> None:
    """Let the node have so many GPUs."""
    amounts = {"cpu": "64", "memory": "1Ti", "pods": "100"}
    amounts |= {gpu(node, "prefill"): str(prefill), gpu(node, "decode"): str(decode)}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
    path = f"/api/v1/nodes/{node}/status"
    assert real.call("PATCH", path, {"status": status}, MERGE)[0] == 200


def wanted(node: str, name: str, prefill: int = 1, nodes: int = 1, **spec: Any) -> dict[str, Any]:
    """A PDCluster each of whose pods asks for one GPU of its role's kind."""

    def role(replicas: int, role: str) -> dict[str, Any]:
        limits = {"cpu": "1", "memory": "1Gi", gpu(node, role): "1"}
        return {
            "replicas": replicas,
            "parallelism": {"tensor": nodes, "nodes": nodes},
            "resources": {"requests": limits, "limits": limits},
        }

    spec.setdefault("scheduling", GANG)
    roles = {"prefill": role(prefill, "prefill"), "decode": role(1, "decode")}
    return cluster(name, router={"replicas": 0}, **roles, **spec)


def pods(real: RealApi, namespace: str, name: str = "") -> list[dict[str, Any]]:
    query = f"?labelSelector=pdcluster.dev/cluster{f'={name}' if name else ''}"
    return real.call("GET", CHILDREN["Pod"].format(namespace) + query)[1]["items"]


def placed(real: RealApi, namespace: str, name: str = "") -> list[str]:
    """`role` of each pod that has a node."""
    return sorted(
        pod["metadata"]["labels"]["pdcluster.dev/role"]
        for pod in pods(real, namespace, name)
        if pod["spec"].get("nodeName")
    )


def said(real: RealApi, namespace: str, name: str) -> str:
    roles = (condition(real, namespace, kind, name) for kind in ("PrefillReady", "DecodeReady"))
    return "\n".join(one.get("message", "") for one in roles)


def told(real: RealApi, operator: Operator, namespace: str) -> object:
    scheduled = {
        pod["metadata"]["name"]: (pod["spec"].get("nodeName"), pod["status"].get("conditions"))
        for pod in pods(real, namespace)
    }
    groups = real.call("GET", POD_GROUPS.format(namespace))[1].get("items")
    return scheduled, groups, get(real, namespace).get("status"), operator.said()


def waits(real: RealApi, operator: Operator, namespace: str, name: str) -> None:
    """Until the status has the scheduler's words about the gang."""
    until(
        lambda: (
            "pods of PodGroup" in (now := said(real, namespace, name)) and "minCount (2) " in now
        ),
        120,
        lambda: told(real, operator, namespace),
    )


def test_prefill_leaves_its_gpus_to_others_while_decode_fits_nowhere(
    real: RealApi, operator: Operator, namespace: str, node: str
) -> None:
    has_gpus(real, node, prefill=1, decode=0)
    operator.start()
    create(real, namespace, wanted(node, "waits"))
    waits(real, operator, namespace, "waits")
    assert len(pods(real, namespace, "waits")) == 2
    assert placed(real, namespace) == []
    assert condition(real, namespace, "PrefillReady", "waits")["reason"] == "Unschedulable"
    at_rest(real, operator)

    alone = wanted(node, "alone", scheduling={})
    alone["spec"]["decode"]["replicas"] = 0
    create(real, namespace, alone)
    until(
        lambda: placed(real, namespace, "alone") == ["prefill"],
        120,
        lambda: told(real, operator, namespace),
    )
    has_gpus(real, node, prefill=2, decode=1)
    until(
        lambda: placed(real, namespace, "waits") == ["decode", "prefill"],
        120,
        lambda: told(real, operator, namespace),
    )


def test_without_a_gang_prefill_holds_its_gpu_for_nothing(
    real: RealApi, operator: Operator, namespace: str, node: str
) -> None:
    has_gpus(real, node, prefill=1, decode=0)
    operator.start()
    create(real, namespace, wanted(node, "holds", scheduling={}))
    until(
        lambda: placed(real, namespace) == ["prefill"],
        120,
        lambda: told(real, operator, namespace),
    )


def test_of_two_clusters_with_room_for_one_each_gets_all_or_nothing(
    real: RealApi, operator: Operator, namespace: str, node: str
) -> None:
    """Each has three prefill engines, which alone could take all the room that there is."""
    has_gpus(real, node, prefill=1, decode=1)
    operator.start()
    names = ["first", "second"]
    for name in names:
        create(real, namespace, wanted(node, name, prefill=3))
    both = ["decode", "prefill"]
    until(lambda: placed(real, namespace) == both, 120, lambda: told(real, operator, namespace))
    [runs] = [name for name in names if placed(real, namespace, name) == both]
    [waiting] = [name for name in names if name != runs]
    waits(real, operator, namespace, waiting)
    assert placed(real, namespace, waiting) == []
    until(
        lambda: len(pods(real, namespace, runs)) == 4,
        120,
        lambda: told(real, operator, namespace),
    )
    assert len(pods(real, namespace, waiting)) == 2, "the others wait for the first pair"

    delete(real, namespace, runs)
    until(lambda: all_end(real, namespace, runs), 120, lambda: told(real, operator, namespace))
    until(
        lambda: placed(real, namespace, waiting) == both,
        180,
        lambda: told(real, operator, namespace),
    )
    groups = real.call("GET", POD_GROUPS.format(namespace))[1]["items"]
    assert len(groups) == 1, "the group of the cluster that was deleted is gone"


def all_end(real: RealApi, namespace: str, name: str) -> bool:
    """Do the kubelet's work for pods that are being deleted; whether none is left."""
    left = pods(real, namespace, name)
    for pod in left:
        if "deletionTimestamp" in pod["metadata"]:
            path = f"{CHILDREN['Pod'].format(namespace)}/{pod['metadata']['name']}"
            real.call("DELETE", path, {"gracePeriodSeconds": 0})
    return not left


def test_a_surge_to_another_pairing_key_waits_as_a_whole_and_the_old_engines_stay(
    real: RealApi, operator: Operator, namespace: str, node: str
) -> None:
    has_gpus(real, node, prefill=2, decode=1)
    operator.start()
    create(real, namespace, wanted(node, "rolls", rollout={"type": "Surge"}))
    both = ["decode", "prefill"]
    until(lambda: placed(real, namespace) == both, 120, lambda: told(real, operator, namespace))
    before = {pod["metadata"]["uid"] for pod in pods(real, namespace)}
    edit(real, namespace, {"engine": {"blockSize": 32}}, "rolls")
    until(lambda: len(pods(real, namespace)) == 4, 120, lambda: told(real, operator, namespace))
    at_rest(real, operator)
    assert placed(real, namespace) == both, "the GPU for prefill stays free"
    has_gpus(real, node, prefill=2, decode=2)
    until(
        lambda: placed(real, namespace) == ["decode", "decode", "prefill", "prefill"],
        120,
        lambda: told(real, operator, namespace),
    )
    assert before <= {pod["metadata"]["uid"] for pod in pods(real, namespace)}


def test_an_engine_of_several_pods_gets_all_its_nodes_or_none(
    real: RealApi, operator: Operator, namespace: str, node: str
) -> None:
    has_gpus(real, node, prefill=3, decode=2)
    operator.start()
    create(real, namespace, wanted(node, "large", prefill=2, nodes=2))
    pair = ["decode", "decode", "prefill", "prefill"]
    until(lambda: placed(real, namespace) == pair, 120, lambda: told(real, operator, namespace))
    until(lambda: len(pods(real, namespace)) == 6, 120, lambda: told(real, operator, namespace))
    waits(real, operator, namespace, "large")
    assert placed(real, namespace) == pair, "the third GPU alone is of no use"
    has_gpus(real, node, prefill=4, decode=2)
    until(
        lambda: placed(real, namespace) == [*pair, "prefill", "prefill"],
        120,
        lambda: told(real, operator, namespace),
    )
