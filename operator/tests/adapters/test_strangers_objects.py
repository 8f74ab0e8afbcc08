"""Objects of others with our names and labels, on a real API server: they hold up nothing."""

from __future__ import annotations

import pytest
from operator_runs import CHILDREN, Operator, at_rest, cluster, create, edit, owned, until
from real_api import RealApi

pytestmark = pytest.mark.cluster

REPLICA_SETS = "/apis/apps/v1/namespaces/{}/replicasets"
ENGINE = "tiny-prefill-zzzzz-0"
LABELS = {
    "engine": {
        "pdcluster.dev/role": "prefill",
        "pdcluster.dev/revision": "zzzzz",
        "pdcluster.dev/engine": ENGINE,
    },
    "router": {
        "app.kubernetes.io/component": "router",
        "pdcluster.dev/pairing-key": "zzzzzzzzzz",
    },
}


def add_workload(real: RealApi, path: str, namespace: str, name: str, whose: str) -> None:
    """Create a stranger's workload whose own labels name nobody, and wait for its pod."""
    labels = {"stranger": name, "pdcluster.dev/cluster": "tiny", **LABELS[whose]}
    pod = {"containers": [{"name": "engine", "image": "busybox"}]}
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": {"stranger": name}},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    body = {"metadata": {"name": name}, "spec": spec}
    status, answer = real.call("POST", path.format(namespace), body)
    assert status == 201, answer
    pods = f"{CHILDREN['Pod'].format(namespace)}?labelSelector=stranger%3D{name}"
    until(lambda: len(real.call("GET", pods)[1]["items"]) == 1, 60, lambda: real.call("GET", pods))


def test_strangers_with_our_names_and_labels_hold_up_no_change(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    """Before, the old engines went and no new ones came: one that nobody has was still ending."""
    operator.start()
    create(real, namespace, cluster(rollout={"type": "Recreate"}))
    until(lambda: len(owned(real, namespace, "StatefulSet")) == 2, 60, operator.said)
    (deployment,) = owned(real, namespace, "Deployment")
    name = deployment.partition("/")[2]
    add_workload(real, REPLICA_SETS, namespace, f"{name}-engine", "engine")
    add_workload(real, REPLICA_SETS, namespace, f"{name}-router", "router")
    add_workload(real, CHILDREN["StatefulSet"], namespace, ENGINE, "engine")
    at_rest(real, operator)
    before = set(owned(real, namespace, "StatefulSet"))
    strangers = [one for one in owned(real, namespace, "Pod") if is_strangers(one)]
    assert len(strangers) == 3
    assert edit(real, namespace, {"engine": {"env": [{"name": "A", "value": "1"}]}})[0] == 200

    def new_ones() -> bool:
        now = set(owned(real, namespace, "StatefulSet"))
        return len(now) == 2 and not now & before

    until(new_ones, 60, operator.said)
    until(lambda: len(owned(real, namespace, "Deployment")) == 1, 60, operator.said)
    at_rest(real, operator)
    assert [one for one in owned(real, namespace, "Pod") if is_strangers(one)] == strangers


def is_strangers(pod: str) -> bool:
    return ENGINE in pod or "-engine-" in pod or "-router-router-" in pod or pod.count("router") > 1
