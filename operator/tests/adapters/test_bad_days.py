"""Days on which a part of Kubernetes is lost: a node, or etcd."""

from __future__ import annotations

import time

import pytest
from operator_runs import CHILDREN, cluster, condition, create, edit, owned, until

pytestmark = pytest.mark.cluster


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_an_engine_on_a_node_that_is_gone_is_replaced_under_a_new_index(real, operator, namespace):
    """The pod is bound to a node without a kubelet, so nobody ever confirms that it ended."""
    operator.start()
    create(real, namespace, cluster(router={"replicas": 0}))
    until(lambda: len(owned(real, namespace, "Pod")) == 2, 60, operator.said)
    [pod] = [one.partition("/")[2] for one in owned(real, namespace, "Pod") if "-prefill-" in one]
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"{namespace}-gone"}}
    assert real.call("POST", "/api/v1/nodes", node)[0] == 201
    path = f"{CHILDREN['Pod'].format(namespace)}/{pod}"
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": pod},
        "target": {"apiVersion": "v1", "kind": "Node", "name": f"{namespace}-gone"},
    }
    assert real.call("POST", f"{path}/binding", binding)[0] == 201
    assert real.call("DELETE", f"{path}?gracePeriodSeconds=1")[0] == 200
    assert real.call("GET", path)[1]["metadata"]["deletionTimestamp"]

    def replaced() -> bool:
        engines = [one for one in owned(real, namespace, "StatefulSet") if "-prefill-" in one]
        return len(engines) == 1 and engines[0].endswith("-1")

    until(replaced, 200, lambda: (owned(real, namespace), operator.said()))
    assert real.call("GET", path)[0] == 200, "it is still there, and blocks nothing"
    assert any("-prefill-" in one and "-1-0" in one for one in owned(real, namespace, "Pod"))
    # Somebody removes the node: no engine moves.
    assert real.call("DELETE", f"{path}?gracePeriodSeconds=0")[0] == 200
    time.sleep(5)
    assert replaced()


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
