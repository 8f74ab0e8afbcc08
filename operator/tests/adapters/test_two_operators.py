"""Two operators' processes over one namespace of a real API server."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from operator_runs import (
    CHILDREN,
    Operator,
    at_rest,
    cluster,
    condition,
    create,
    edit,
    owned,
    until,
)
from real_api import RealApi

pytestmark = pytest.mark.cluster

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"


@pytest.fixture
def two(real: RealApi, namespace: str) -> Iterator[list[Operator]]:
    """Two releases that watch the same namespace, and would build engines differently."""
    first = Operator(real, "run", f"--namespace={namespace}", "--allow-host-path-models")
    second = Operator(real, "run", f"--namespace={namespace}")  # admits no folder of a node
    yield [first, second]
    for process in (first, second):
        process.stop()


def uids(real: RealApi, namespace: str) -> dict[str, str]:
    path = CHILDREN["StatefulSet"].format(namespace) + "?labelSelector=pdcluster.dev/cluster"
    items = real.call("GET", path)[1]["items"]
    return {item["metadata"]["name"]: item["metadata"]["uid"] for item in items}


def holders(real: RealApi, namespace: str) -> dict[str, str]:
    items = real.call("GET", LEASES.format(namespace))[1]["items"]
    return {item["metadata"]["name"]: item["spec"]["holderIdentity"] for item in items}


def test_only_one_works_and_the_other_follows_when_it_ends(real, two, namespace):
    first, second = two
    first.start()
    create(real, namespace, cluster())
    until(lambda: len(uids(real, namespace)) == 2, 60, first.said)
    made = uids(real, namespace)
    second.start()
    at_rest(real, first)
    before = real.written
    time.sleep(5)
    assert real.writes(before) == []
    assert uids(real, namespace) == made
    assert condition(real, namespace, "Accepted")["status"] == "True"
    until(lambda: "left to the operator" in second.said(), 60, second.said)
    assert holders(real, namespace) == {"pdcluster-operator": f"operator-{first.health}"}
    assert first.stop() == 0
    until(lambda: condition(real, namespace, "Accepted")["status"] == "False", 60, second.said)
    assert holders(real, namespace) == {"pdcluster-operator": f"operator-{second.health}"}
    assert uids(real, namespace) == made, "a spec that is not accepted changes nothing"


def test_each_class_has_its_operators(real, namespace):
    plain = Operator(real, "run", f"--namespace={namespace}", "--allow-host-path-models")
    blue = Operator(
        real, "run", f"--namespace={namespace}", "--allow-host-path-models", "--operator-class=blue"
    )
    try:
        plain.start()
        blue.start()
        create(real, namespace, cluster("one"))
        create(real, namespace, cluster("two", operatorClass="blue"))
        create(real, namespace, cluster("three", operatorClass="green"))
        until(lambda: len(uids(real, namespace)) == 4, 60, plain.said)
        time.sleep(2)
        assert {name.partition("-")[0] for name in uids(real, namespace)} == {"one", "two"}
        assert holders(real, namespace) == {
            "pdcluster-operator": f"operator-{plain.health}",
            "pdcluster-operator-blue": f"operator-{blue.health}",
        }
        blue.kill()
        name = next(one for one in owned(real, namespace, "Service") if "two-decode" in one)
        path = f"{CHILDREN['Service'].format(namespace)}/{name.partition('/')[2]}"
        assert real.call("DELETE", path)[0] == 200
        time.sleep(2)
        assert name not in owned(real, namespace, "Service"), "it is not plain's"
        blue.start()
        until(lambda: name in owned(real, namespace, "Service"), 60, blue.said)
    finally:
        plain.stop()
        blue.stop()


def test_a_cluster_that_changes_its_class_is_handed_over_without_a_restart(real, namespace):
    folders = "--allow-host-path-models"
    plain = Operator(real, "run", f"--namespace={namespace}", folders)
    blue = Operator(real, "run", f"--namespace={namespace}", folders, "--operator-class=blue")
    try:
        plain.start()
        blue.start()
        create(real, namespace, cluster())
        until(lambda: len(uids(real, namespace)) == 2, 60, plain.said)
        made = uids(real, namespace)
        assert edit(real, namespace, {"operatorClass": "blue"})[0] == 200
        assert edit(real, namespace, {"decode": {"replicas": 2}})[0] == 200
        until(lambda: len(uids(real, namespace)) == 3, 60, blue.said)
        at_rest(real, blue)
        assert len(uids(real, namespace)) == 3
        assert made.items() <= uids(real, namespace).items()
        assert holders(real, namespace)["pdcluster-operator-blue"] == f"operator-{blue.health}"
    finally:
        plain.stop()
        blue.stop()
