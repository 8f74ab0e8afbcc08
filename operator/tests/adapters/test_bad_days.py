"""Days on which a part of Kubernetes is lost or wrong: a node, a node's clock, or etcd."""

from __future__ import annotations

import time

import pytest
from operator_runs import CHILDREN, at_rest, cluster, condition, create, edit, get, owned, until
from played_nodes import PlayedNodes
from watched_rollout import done, found

pytestmark = pytest.mark.cluster


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_an_engine_on_a_node_that_is_gone_is_replaced_under_a_new_index(real, operator, namespace):
    """The pod is bound to a node without a kubelet, so nobody ever confirms that it ended."""
    operator.start()
    with PlayedNodes(real, namespace) as nodes:
        pod = on_a_node_of_its_own(real, operator, namespace)
        path = f"{CHILDREN['Pod'].format(namespace)}/{pod}"
        nodes.silence(real.call("GET", path)[1]["metadata"]["uid"])
        assert real.call("DELETE", f"{path}?gracePeriodSeconds=1")[0] == 200
        assert real.call("GET", path)[1]["metadata"]["deletionTimestamp"]

        def explain():
            return get(real, namespace), owned(real, namespace), operator.said()

        until(lambda: not ready(real, namespace), 60, explain)
        until(lambda: replaced(real, namespace), 300, explain)
        assert real.call("GET", path)[0] == 200, "it is still there, and blocks nothing"
        until(lambda: ready(real, namespace), 120, explain)
        # Somebody removes the node: no engine moves.
        assert real.call("DELETE", f"{path}?gracePeriodSeconds=0")[0] == 200
        at_rest(real, operator)
        assert replaced(real, namespace)
        until(lambda: ready(real, namespace), 60, explain)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_an_engine_comes_back_when_somebody_deletes_its_lost_node(real, operator, namespace):
    """Kubernetes removes the pods of a node that is no object any more. They are made again."""
    operator.start()
    with PlayedNodes(real, namespace) as nodes:
        pod = on_a_node_of_its_own(real, operator, namespace)
        path = f"{CHILDREN['Pod'].format(namespace)}/{pod}"
        before = real.call("GET", path)[1]["metadata"]["uid"]
        nodes.silence(before)

        def explain():
            return get(real, namespace), owned(real, namespace), operator.said()

        until(lambda: not ready(real, namespace), 120, explain)
        assert real.call("DELETE", f"/api/v1/nodes/{namespace}-gone")[0] == 200
        until(
            lambda: real.call("GET", path)[1].get("metadata", {}).get("uid", before) != before,
            300,
            explain,
        )
        until(lambda: ready(real, namespace), 120, explain)


def on_a_node_of_its_own(real, operator, namespace) -> str:
    """Bring a cluster up whose prefill engine runs on a node without a kubelet; return its pod."""
    create(real, namespace, cluster())
    pods = until(lambda: prefill_pods(real, namespace), 60, operator.said)
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"{namespace}-gone"}}
    assert real.call("POST", "/api/v1/nodes", node)[0] == 201
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": pods[0]},
        "target": {"apiVersion": "v1", "kind": "Node", "name": f"{namespace}-gone"},
    }
    path = f"{CHILDREN['Pod'].format(namespace)}/{pods[0]}/binding"
    assert real.call("POST", path, binding)[0] == 201
    until(lambda: ready(real, namespace), 120, operator.said)
    return str(pods[0])


def prefill_pods(real, namespace) -> list[str]:
    pods = (one.partition("/")[2] for one in owned(real, namespace, "Pod"))
    return [one for one in pods if "-prefill-" in one]


def replaced(real, namespace) -> bool:
    """Whether the only prefill engine has another index, and a pod."""
    engines = [one for one in owned(real, namespace, "StatefulSet") if "-prefill-" in one]
    pods = prefill_pods(real, namespace)
    return len(engines) == 1 and engines[0].endswith("-1") and any("-1-0" in one for one in pods)


def ready(real, namespace) -> bool:
    return condition(real, namespace, "Ready").get("status") == "True"


@pytest.mark.timeout(300)
def test_an_etcd_that_starts_again_loses_nothing(real, operator, namespace):
    operator.start()
    create(real, namespace, cluster())
    until(lambda: len(owned(real, namespace, "StatefulSet")) == 2, 60, operator.said)
    before = set(owned(real, namespace, "StatefulSet"))
    real.kill_etcd()
    time.sleep(3)
    real.start_etcd()
    until(real.ready, 60, lambda: real.log("kube-apiserver"))
    until(lambda: edit(real, namespace, {"decode": {"replicas": 2}})[0] == 200, 60, operator.said)

    def grown():
        operator.start_if_ended()
        return before < set(owned(real, namespace, "StatefulSet"))

    until(
        grown,
        120,
        lambda: (owned(real, namespace), operator.said()),
    )
    assert condition(real, namespace, "Accepted")["status"] == "True"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [-600.0, 600.0])
def test_nodes_whose_clock_is_ten_minutes_off_run_engines_and_changes(
    real, operator, namespace, ahead
):
    """Times in the status of a pod are the kubelet's."""
    operator.start()
    with PlayedNodes(real, namespace, clock=ahead):

        def explain():
            return get(real, namespace), operator.said()

        create(real, namespace, cluster())
        until(lambda: done(real, namespace), 120, explain)
        at_rest(real, operator)
        pods = {one["metadata"]["uid"] for one in found(real, namespace, "Pod")}
        time.sleep(10)
        assert {one["metadata"]["uid"] for one in found(real, namespace, "Pod")} == pods
        assert edit(real, namespace, {"engine": {"blockSize": 32}})[0] == 200
        until(lambda: done(real, namespace), 180, explain)
        at_rest(real, operator)
        assert len(found(real, namespace, "StatefulSet")) == 2
        assert not {one["metadata"]["uid"] for one in found(real, namespace, "Pod")} & pods
