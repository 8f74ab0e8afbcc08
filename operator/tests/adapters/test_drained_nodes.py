"""A node is drained: the real disruption budgets and evictions, and what routers know meanwhile."""

from __future__ import annotations

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

from pdcluster_operator.api.labels import engine_of

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(900)]
TWO = {"replicas": 2}
REFUSED = 429


def test_every_pod_is_evicted_and_routers_always_know_engines_that_are_there(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    operator.start()
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"{namespace}-node"}}
    assert real.call("POST", "/api/v1/nodes", node)[0] == 201
    with PlayedNodes(real, namespace, node["metadata"]["name"]) as nodes:
        create(real, namespace, cluster(prefill=TWO, decode=TWO, router=TWO))

        def explain() -> object:
            return get(real, namespace), pods(real, namespace), operator.said()

        def ready() -> bool:
            return condition(real, namespace, "Ready").get("status") == "True"

        until(ready, 120, explain)
        at_rest(real, operator)
        before = pods(real, namespace)
        assert len(before) == 6
        left = {name: pod["metadata"]["uid"] for name, pod in before.items()}
        refusals = 0

        def drained() -> bool:
            nonlocal refusals
            for name, uid in dict(left).items():
                answer = evict(real, namespace, name, uid)
                refusals += answer == REFUSED
                if answer != REFUSED:
                    assert answer in (201, 404, 409), answer  # 409: it is another pod already
                    del left[name]
            assert_served(real, namespace, nodes)
            return not left

        until(drained, 300, explain)
        assert refusals > 0, "the budgets let all go at once"

        def others() -> bool:
            assert_served(real, namespace, nodes)
            now = pods(real, namespace)
            old = {pod["metadata"]["uid"] for pod in before.values()}
            here = [pod for pod in now.values() if pod["metadata"]["uid"] not in old]
            return len(now) == len(here) == 6 and len(nodes.routed()) == 4 and ready()

        until(others, 300, explain)


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
