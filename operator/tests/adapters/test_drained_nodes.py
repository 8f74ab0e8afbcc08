"""A node is drained: real disruption budgets and evictions, and what routers know meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from operator_runs import (
    CHILDREN,
    Operator,
    at_rest,
    cluster,
    condition,
    create,
    get,
    until,
)
from played_nodes import PlayedNodes
from real_api import RealApi

from pdcluster_operator.api.object_names import ROLE_LABEL, engine_of

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(900)]
TWO = {"replicas": 2}
REFUSED = 429


@contextmanager
def two_of_each(
    real: RealApi, operator: Operator, namespace: str, routers: int = 2
) -> Iterator[PlayedNodes]:
    """Two engines of each role, and routers, on one node, at rest."""
    operator.start()
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"{namespace}-node"}}
    assert real.call("POST", "/api/v1/nodes", node)[0] == 201
    with PlayedNodes(real, namespace, node["metadata"]["name"]) as nodes:
        create(real, namespace, cluster(prefill=TWO, decode=TWO, router={"replicas": routers}))
        wait_ready(real, operator, namespace)
        at_rest(real, operator)
        yield nodes


def wait_ready(real: RealApi, operator: Operator, namespace: str) -> None:
    def ready() -> bool:
        return condition(real, namespace, "Ready").get("status") == "True"

    until(ready, 120, lambda: told(real, operator, namespace))


def told(real: RealApi, operator: Operator, namespace: str) -> object:
    return get(real, namespace), pods(real, namespace), operator.said()


def test_every_pod_is_evicted_and_routers_always_know_engines_that_are_there(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    with two_of_each(real, operator, namespace) as nodes:
        before = pods(real, namespace)
        assert len(before) == 6
        left = {name: pod["metadata"]["uid"] for name, pod in before.items()}

        def drained() -> bool:
            for name, uid in dict(left).items():
                answer = evict(real, namespace, name, uid)
                if answer != REFUSED:
                    assert answer in (201, 404, 409), answer  # 409: it is another pod already
                    del left[name]
            assert_served(real, namespace, nodes)
            return not left

        until(drained, 300, lambda: told(real, operator, namespace))

        def others() -> bool:
            assert_served(real, namespace, nodes)
            now = pods(real, namespace)
            old = {pod["metadata"]["uid"] for pod in before.values()}
            here = [pod for pod in now.values() if pod["metadata"]["uid"] not in old]
            return len(now) == len(here) == 6 and len(nodes.routed()) == 4

        until(others, 300, lambda: told(real, operator, namespace))
        wait_ready(real, operator, namespace)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_last_engine_of_a_role_is_not_evicted_while_the_other_one_cannot_come_back(
    real: RealApi, operator: Operator, namespace: str, role: str
) -> None:
    """Nothing of the first engine is left but its StatefulSet, which may make no pod.

    There are no routers: the same quota would keep them from forgetting the engine.
    """
    with two_of_each(real, operator, namespace, routers=0):
        before = {name: pod for name, pod in pods(real, namespace).items() if role in name}
        first, second = sorted(before)
        uid = {name: pod["metadata"]["uid"] for name, pod in before.items()}
        quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
        full = {"metadata": {"name": "full"}, "spec": {"hard": {"pods": "1"}}}
        assert real.call("POST", quotas, full)[0] == 201
        # No controller counts here. The test says what is used.
        used = {"status": {**full["spec"], "used": {"pods": "4"}}}
        merge = "application/merge-patch+json"
        assert real.call("PATCH", f"{quotas}/full/status", used, merge)[0] == 200

        def explain() -> object:
            return told(real, operator, namespace)

        until(lambda: evict(real, namespace, first, uid[first]) == 201, 120, explain)
        # The budget is judged from what its controller saw last.
        until(lambda: expected(real, namespace, role) == 1, 120, explain)
        assert first not in pods(real, namespace)
        assert evict(real, namespace, second, uid[second]) == REFUSED, explain()


def expected(real: RealApi, namespace: str, role: str) -> int:
    """Return how many pods the controller of disruption budgets counts for a role."""
    found = real.call("GET", CHILDREN["PodDisruptionBudget"].format(namespace))[1]["items"]
    [budget] = [
        one for one in found if one["spec"]["selector"]["matchLabels"].get(ROLE_LABEL) == role
    ]
    return int(budget["status"]["expectedPods"])


def pods(real: RealApi, namespace: str) -> dict[str, dict[str, Any]]:
    query = "?labelSelector=pdcluster.dev/cluster"
    items = real.call("GET", CHILDREN["Pod"].format(namespace) + query)[1]["items"]
    return {item["metadata"]["name"]: item for item in items}


def evict(real: RealApi, namespace: str, name: str, uid: str) -> int:
    """Do to a pod what `kubectl drain` does; return the status of the answer."""
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": {"preconditions": {"uid": uid}},
    }
    path = f"{CHILDREN['Pod'].format(namespace)}/{name}/eviction"
    return int(real.call("POST", path, body)[0])


def assert_served(real: RealApi, namespace: str, nodes: PlayedNodes) -> None:
    """Routers know an engine of each role, and all that they know have a pod that runs."""
    there = running(real, namespace)
    routed = nodes.routed()
    there |= running(real, namespace)  # one that came in between
    assert routed <= set(there), (routed, there)
    assert {there[address] for address in routed} == {"prefill", "decode"}


def running(real: RealApi, namespace: str) -> dict[str, str]:
    """Return the roles of engines whose pods run, or drain, by address."""
    engines = (
        engine_of(pod) for pod in pods(real, namespace).values() if pod["status"].get("podIP")
    )
    return {engine.api_url: engine.role.value for engine in engines if engine is not None}
