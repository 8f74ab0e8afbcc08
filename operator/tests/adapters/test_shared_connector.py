"""The connector that PDClusters of a namespace share comes, stays and goes on a real API server."""

from __future__ import annotations

import pytest
from operator_runs import (
    CHILDREN,
    Operator,
    at_rest,
    cluster,
    condition,
    create,
    delete,
    get,
    owned,
    until,
)

pytestmark = pytest.mark.cluster
KEEP = "--keep-connector-seconds=2"


def connectors(real, namespace):
    path = CHILDREN["ConfigMap"].format(namespace) + "?labelSelector=pdcluster.dev/connector"
    return {one["metadata"]["name"]: one for one in real.call("GET", path)[1]["items"]}


def mounted(real, namespace):
    """The names that live pods and workloads mount."""
    found = set()
    for kind in ("StatefulSet", "Pod"):
        for item in real.call("GET", CHILDREN[kind].format(namespace))[1]["items"]:
            spec = item["spec"] if kind == "Pod" else item["spec"]["template"]["spec"]
            volumes = spec.get("volumes") or ()
            found |= {one["configMap"]["name"] for one in volumes if one.get("configMap")}
    return {name for name in found if name.startswith("pdcluster-connector-")}


@pytest.fixture
def hasty(real, namespace):
    """An operator that deletes what nothing mounts after two seconds; not started yet."""
    process = Operator(real, "run", f"--namespace={namespace}", "--allow-host-path-models", KEEP)
    yield process
    process.stop()


def has_pods(real, namespace, names):
    pods = owned(real, namespace, "Pod")
    return all(
        any(pod.startswith(f"Pod/{name}-{role}-") for pod in pods)
        for name in names
        for role in ("prefill", "decode")
    )


def test_clusters_made_at_once_share_one(real, operator, namespace):
    operator.start()
    names = ["one", "two", "three", "four"]
    for name in names:
        create(real, namespace, cluster(name))
    until(lambda: has_pods(real, namespace, names), 60, operator.said)
    [(name, live)] = connectors(real, namespace).items()
    assert mounted(real, namespace) == {name}
    assert live["immutable"] is True
    assert "ownerReferences" not in live["metadata"]
    made = [
        write["responseStatus"]["code"]
        for write in real.writes()
        if write["objectRef"].get("name") == name
        and write["objectRef"].get("namespace") == namespace
    ]
    assert made.count(201) == 1, "the API server takes the first"
    assert set(made) <= {200, 201, 409}, "200: who came second has applied what was there already"
    assert len(made) <= 2 * len(names), "it is large, and nobody sends it again and again"


def test_a_connector_that_nothing_mounts_goes_and_who_needs_it_gets_it(real, hasty, namespace):
    hasty.start()
    create(real, namespace, cluster("one"))
    create(real, namespace, cluster("two"))
    until(lambda: has_pods(real, namespace, ["one", "two"]), 60, hasty.said)
    at_rest(real, hasty)
    [(name, live)] = connectors(real, namespace).items()

    def gone(cluster_name):
        return not [one for one in owned(real, namespace) if f"/{cluster_name}-" in one]

    delete(real, namespace, "one")
    until(lambda: gone("one"), 60, hasty.said)
    at_rest(real, hasty)  # the collector has looked meanwhile
    assert connectors(real, namespace)[name]["metadata"]["uid"] == live["metadata"]["uid"]

    # Somebody deletes it by hand: the operator brings it back.
    path = f"{CHILDREN['ConfigMap'].format(namespace)}/{name}"
    assert real.call("DELETE", path)[0] == 200
    until(lambda: name in connectors(real, namespace), 60, hasty.said)

    # An operator that was down when the last cluster went deletes it later.
    hasty.stop()
    delete(real, namespace, "two")
    until(lambda: not owned(real, namespace), 60, lambda: owned(real, namespace))
    assert name in connectors(real, namespace)
    hasty.start()
    until(lambda: not connectors(real, namespace), 60, hasty.said)
    create(real, namespace, cluster("three"))
    until(lambda: has_pods(real, namespace, ["three"]), 60, hasty.said)
    assert set(connectors(real, namespace)) == mounted(real, namespace) == {name}


def test_a_pod_that_is_not_ours_keeps_what_it_mounts(real, hasty, namespace):
    hasty.start()
    create(real, namespace, cluster("one"))
    until(lambda: has_pods(real, namespace, ["one"]), 60, hasty.said)
    at_rest(real, hasty)
    [(name, live)] = connectors(real, namespace).items()
    volumes = [{"name": "connector", "configMap": {"name": name}}]
    spec = {"containers": [{"name": "a", "image": "a"}], "volumes": volumes}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "by-hand"}, "spec": spec}
    pods = CHILDREN["Pod"].format(namespace)
    assert real.call("POST", pods, pod)[0] == 201
    said = len(hasty.log.read_text())
    delete(real, namespace, "one")
    until(lambda: not owned(real, namespace), 60, lambda: owned(real, namespace))
    # It is not watched, so only the look before the deletion finds it.
    until(lambda: "something mounts it again" in hasty.log.read_text()[said:], 60, hasty.said)
    assert connectors(real, namespace)[name]["metadata"]["uid"] == live["metadata"]["uid"]
    assert real.call("DELETE", f"{pods}/by-hand?gracePeriodSeconds=0")[0] == 200
    until(lambda: not connectors(real, namespace), 60, hasty.said)


def test_operators_of_two_classes_leave_each_others_alone(real, namespace):
    arguments = ("run", f"--namespace={namespace}", "--allow-host-path-models", KEEP)
    ours = Operator(real, *arguments)
    theirs = Operator(real, *arguments, "--operator-class=blue")
    try:
        ours.start()
        theirs.start()
        create(real, namespace, cluster("plain"))
        create(real, namespace, cluster("blue", operatorClass="blue"))
        until(lambda: has_pods(real, namespace, ["plain", "blue"]), 60, ours.said)
        at_rest(real, ours)
        at_rest(real, theirs)
        [name] = connectors(real, namespace)
        uid = connectors(real, namespace)[name]["metadata"]["uid"]
        delete(real, namespace, "plain")
        until(lambda: not has_pods(real, namespace, ["plain"]), 60, ours.said)
        at_rest(real, ours)  # both collectors have looked meanwhile
        at_rest(real, theirs)
        assert connectors(real, namespace)[name]["metadata"]["uid"] == uid
        delete(real, namespace, "blue")
        until(lambda: not connectors(real, namespace), 60, lambda: ours.said() + theirs.said())
    finally:
        ours.stop()
        theirs.stop()


def test_a_stranger_of_that_name_is_said_and_not_taken(real, hasty, namespace):
    hasty.start()
    create(real, namespace, cluster("one"))
    until(lambda: has_pods(real, namespace, ["one"]), 60, hasty.said)
    [name] = connectors(real, namespace)
    delete(real, namespace, "one")
    until(lambda: not connectors(real, namespace), 60, hasty.said)
    theirs = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"a": "b"},
    }
    path = CHILDREN["ConfigMap"].format(namespace)
    assert real.call("POST", path, theirs)[0] == 201
    create(real, namespace, cluster("tiny"))
    said = until(
        lambda: (
            (now := condition(real, namespace, "Progressing")).get("reason") == "NameConflict"
            and now
        ),
        60,
        lambda: (get(real, namespace), hasty.said()),
    )
    assert f"ConfigMap {name} exists and does not hold this operator's connector" in said["message"]
    assert real.call("GET", f"{path}/{name}")[1]["data"] == {"a": "b"}
    assert owned(real, namespace, "StatefulSet") == [], "no pod mounts what somebody else wrote"
    assert real.call("DELETE", f"{path}/{name}")[0] == 200
    until(lambda: has_pods(real, namespace, ["tiny"]), 60, hasty.said)
