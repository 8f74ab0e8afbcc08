"""Engines that wait in a queue of a real Kueue. Only the nodes are played."""

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
    events,
    until,
)
from played_nodes import PlayedNodes
from real_api import RealApi, add_crds, running_api
from running_kueue import API, make_queue, running_kueue, workloads
from watched_rollout import done, found, serves

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(900)]
MERGE = "application/merge-patch+json"
ONE = {"cpu": "1", "memory": "1Gi"}
PAIR = {"cpu": "2", "memory": "2Gi"}
"""What the queue of a test may use: one prefill and one decode engine."""


@pytest.fixture(scope="module")
def real() -> Iterator[RealApi]:
    """A control plane with Kueue."""
    with running_api() as api:
        add_crds(api)
        with running_kueue(api):
            yield api


@pytest.fixture
def queue(real: RealApi, namespace: str) -> Iterator[str]:
    """A queue that has room for one pair, and a node on which all admitted pods run."""
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"{namespace}-node"}}
    assert real.call("POST", "/api/v1/nodes", node)[0] == 201
    make_queue(real, namespace, namespace, PAIR)
    with PlayedNodes(real, namespace, node["metadata"]["name"]):
        yield namespace


def wanted(queue: str, name: str = "tiny", **spec: Any) -> dict[str, Any]:
    role = {"resources": {"requests": ONE, "limits": ONE}}
    spec.setdefault("prefill", role)
    spec.setdefault("decode", role)
    return cluster(name, scheduling={"queueName": queue}, **spec)


def told(real: RealApi, operator: Operator, namespace: str) -> object:
    conditions = [one.get("status", {}).get("conditions") for one in workloads(real, namespace)]
    kueue = (real.folder / "kueue.log").read_text()[-3000:]
    clusters = real.call("GET", f"/apis/pdcluster.dev/v1alpha1/namespaces/{namespace}/pdclusters")
    return clusters[1], conditions, found(real, namespace, "Pod"), operator.said(), kueue


def ready(real: RealApi, operator: Operator, namespace: str, name: str = "tiny") -> None:
    until(
        lambda: condition(real, namespace, "Ready", name).get("status") == "True",
        120,
        lambda: told(real, operator, namespace),
    )


def serving(real: RealApi, operator: Operator, queue: str) -> set[str]:
    """Start the operator, and a PDCluster that fills the queue; returns its engines."""
    operator.start()
    create(real, queue, wanted(queue))
    ready(real, operator, queue)
    return engines(real, queue)


def waits(real: RealApi, operator: Operator, namespace: str, kind: str, name: str = "tiny") -> str:
    """Wait until a condition says that pods are in the queue; return its message."""

    def said() -> str:
        one = condition(real, namespace, kind, name)
        return str(one["message"]) if "until Kueue admits it" in one["message"] else ""

    return str(until(said, 60, lambda: told(real, operator, namespace)))


def test_the_second_waits_with_the_reason_and_starts_when_the_first_is_deleted(
    real: RealApi, operator: Operator, queue: str
) -> None:
    operator.start()
    create(real, queue, wanted(queue, "first"))
    ready(real, operator, queue, "first")
    create(real, queue, wanted(queue, "second"))
    said = waits(real, operator, queue, "Ready", "second")
    at_rest(real, operator)
    assert condition(real, queue, "Ready", "second")["reason"] == "SchedulingGated"
    assert f"LocalQueue {queue};" in said
    names = [one["metadata"]["name"] for one in workloads(real, queue)]
    assert any(f"workloads.kueue.x-k8s.io {name} says why" in said for name in names), names
    for kind in ("PrefillReady", "DecodeReady"):
        assert condition(real, queue, kind, "second")["reason"] == "SchedulingGated"
    assert condition(real, queue, "Ready", "first")["status"] == "True"
    delete(real, queue, "first")
    ready(real, operator, queue, "second")
    until(lambda: len(workloads(real, queue)) == 2, 60, lambda: told(real, operator, queue))
    assert "Rewritten" not in {one["reason"] for one in events(real, queue)}


def test_a_surge_in_a_full_queue_names_what_makes_room_and_the_old_engines_serve(
    real: RealApi, operator: Operator, queue: str
) -> None:
    before = serving(real, operator, queue)
    assert edit(real, queue, {"engine": {"blockSize": 32}})[0] == 200
    said = waits(real, operator, queue, "Progressing")
    at_rest(real, operator)
    assert "set rollout.type to Replace" in said
    assert "or to Recreate" in said
    assert engines(real, queue) > before
    assert condition(real, queue, "Available")["status"] == "True"
    assert serves(real, queue)
    # The message names a way on: the old engines go first.
    assert edit(real, queue, {"rollout": {"type": "Recreate"}})[0] == 200
    until(lambda: done(real, queue), 180, lambda: told(real, operator, queue))
    assert len(engines(real, queue)) == 2
    assert not engines(real, queue) & before
    until(lambda: len(workloads(real, queue)) == 2, 60, lambda: told(real, operator, queue))


def test_a_surge_goes_on_when_the_queue_has_room(
    real: RealApi, operator: Operator, queue: str
) -> None:
    before = serving(real, operator, queue)
    assert edit(real, queue, {"engine": {"blockSize": 32}})[0] == 200
    waits(real, operator, queue, "Progressing")
    path = f"{API}/clusterqueues/{queue}"
    groups = real.call("GET", path)[1]["spec"]["resourceGroups"]
    for resource in groups[0]["flavors"][0]["resources"]:
        resource["nominalQuota"] = {"cpu": "4", "memory": "4Gi"}[resource["name"]]
    assert real.call("PATCH", path, {"spec": {"resourceGroups": groups}}, MERGE)[0] == 200
    until(lambda: serves(real, queue) and done(real, queue), 180,
          lambda: told(real, operator, queue))  # fmt: skip
    assert len(engines(real, queue)) == 2
    assert not engines(real, queue) & before


def test_a_pod_that_is_deleted_comes_back_in_a_full_queue(
    real: RealApi, operator: Operator, queue: str
) -> None:
    before = serving(real, operator, queue)
    for role in ("prefill", "decode"):
        [pod] = [one for one in found(real, queue, "Pod") if f"-{role}-" in one["metadata"]["name"]]
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        assert real.call("DELETE", f"{CHILDREN['Pod'].format(queue)}/{name}")[0] == 200

        def back(name: str = name, uid: str = uid) -> bool:
            pods = {one["metadata"]["name"]: one for one in found(real, queue, "Pod")}
            return pods[name]["metadata"]["uid"] != uid and done(real, queue)

        until(back, 120, lambda: told(real, operator, queue))
    at_rest(real, operator)
    assert done(real, queue)
    assert engines(real, queue) == before


def test_engines_that_kueue_evicts_wait_and_come_back(
    real: RealApi, operator: Operator, queue: str
) -> None:
    before = serving(real, operator, queue)
    path = f"{API}/clusterqueues/{queue}"
    # The queue evicts what it admitted, and admits nothing, also no new Workload of a pod.
    assert real.call("PATCH", path, {"spec": {"stopPolicy": "HoldAndDrain"}}, MERGE)[0] == 200
    for kind in ("PrefillReady", "DecodeReady"):
        waits(real, operator, queue, kind)
    assert real.call("PATCH", path, {"spec": {"stopPolicy": "None"}}, MERGE)[0] == 200
    ready(real, operator, queue)
    assert engines(real, queue) == before


def engines(real: RealApi, namespace: str) -> set[str]:
    return {one["metadata"]["uid"] for one in found(real, namespace, "StatefulSet")}
