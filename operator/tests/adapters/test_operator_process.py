"""The operator's own process against a real API server, killed and starved at will."""

from __future__ import annotations

import itertools
import random
import time
from datetime import datetime

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
    owned,
    until,
)
from rights import RBAC

from pdcluster_operator.plan.status.pace import QUIET_SECONDS

pytestmark = pytest.mark.cluster

KINDS = {
    "ControllerRevision": 4,  # ours of each role, and one that each StatefulSet has
    "Deployment": 1,
    "NetworkPolicy": 2,
    "Pod": 3,
    "PodDisruptionBudget": 2,
    "Service": 3,
    "ServiceAccount": 1,
    "StatefulSet": 2,
}
"""What one cluster of two engines and a router owns."""


def counts(real, namespace):
    found = {}
    for one in owned(real, namespace):
        kind = one.partition("/")[0]
        found[kind] = found.get(kind, 0) + 1
    return found


def settled(real, operator, namespace, wanted=None):
    until(
        lambda: (
            counts(real, namespace) == (wanted or KINDS)
            and condition(real, namespace, "Ready").get("reason") == "ContainerCreating"
        ),
        60,
        lambda: (counts(real, namespace), get(real, namespace).get("status"), operator.said()),
    )


def test_from_a_manifest_to_objects_and_a_status(real, operator, namespace):
    operator.start()
    made = create(real, namespace, cluster())
    settled(real, operator, namespace)
    live = get(real, namespace)
    assert condition(real, namespace, "Accepted")["status"] == "True"
    assert "finalizers" not in live["metadata"]
    assert "annotations" not in live["metadata"]
    managers = {entry["manager"] for entry in live["metadata"]["managedFields"]}
    assert managers == {"pdcluster-operator-status", "Python-urllib"}
    # Reconciles are counted after the status was written.
    done = 'pdcluster_reconciles_total{outcome="done"}'
    until(lambda: operator.metric(done) > 0, 60, operator.said)
    assert operator.metric('pdcluster_reconciles_total{outcome="failed"}') == 0
    assert operator.metric("pdcluster_reconcile_seconds_count") > 0
    assert operator.metric("pdcluster_clusters") == 1
    assert operator.page("/healthz") == (200, "ok\n")
    assert made["metadata"]["uid"] == live["metadata"]["uid"]
    assert operator.stop() == 0, operator.said()


def test_at_rest_nothing_is_written(real, operator, namespace):
    operator.start()
    create(real, namespace, cluster())
    settled(real, operator, namespace)
    at_rest(real, operator)
    before = real.written
    done = 'pdcluster_reconciles_total{outcome="done"}'
    reconciles = operator.metric(done)
    time.sleep(15)
    until(lambda: operator.metric(done) > reconciles, 60, operator.said)
    assert [write["requestURI"] for write in real.writes(before)] == []


def test_each_write_was_needed(real, operator, namespace):
    before = real.written
    operator.start()
    create(real, namespace, cluster())
    settled(real, operator, namespace)
    at_rest(real, operator)
    found = (write for write in real.writes(before) if write["verb"] != "create")
    writes = [write for write in found if "dryRun=" not in write["requestURI"]]
    children = [write for write in writes if write["objectRef"].get("subresource") != "status"]
    applied = [write["objectRef"]["name"] for write in children]
    kinds = [write["objectRef"]["resource"] for write in children]
    assert len(applied) == len(set(zip(kinds, applied, strict=True))), "each child once"
    statuses = [write for write in writes if write not in children]
    said = [write["requestObject"]["status"] for write in statuses]
    assert said
    assert all(one != other for one, other in itertools.pairwise(said)), said
    # What flips no condition waits: it is written more often only in a machine that stalls.
    flipped = sum(flips(one) != flips(other) for one, other in itertools.pairwise(said))
    first, last = (
        datetime.fromisoformat(write["requestReceivedTimestamp"])
        for write in (statuses[0], statuses[-1])
    )
    assert len(said) <= 3 + flipped + (last - first).total_seconds() / QUIET_SECONDS, said


def flips(status):
    return [(one["type"], one["status"]) for one in status["conditions"]]


def test_what_is_removed_or_bent_by_hand_comes_back(real, operator, namespace):
    operator.start()
    create(real, namespace, cluster())
    settled(real, operator, namespace)
    service = f"{CHILDREN['Service'].format(namespace)}/tiny-router"
    real.call("DELETE", service)
    until(lambda: real.call("GET", service)[0] == 200, 60, operator.said)
    port = [{"op": "replace", "path": "/spec/ports/0/port", "value": 81}]
    assert real.call("PATCH", service, port, "application/json-patch+json")[0] == 200
    until(
        lambda: real.call("GET", service)[1]["spec"]["ports"][0]["port"] == 8000, 60, operator.said
    )
    unlabelled = [{"op": "remove", "path": "/metadata/labels/pdcluster.dev~1cluster"}]
    assert real.call("PATCH", service, unlabelled, "application/json-patch+json")[0] == 200
    until(
        lambda: real.call("GET", service)[1]["metadata"]["labels"]["pdcluster.dev/cluster"],
        60,
        operator.said,
    )


def test_a_changed_spec_replaces_and_removes(real, operator, namespace):
    operator.start()
    create(real, namespace, cluster())
    settled(real, operator, namespace)
    before = set(owned(real, namespace, "StatefulSet"))
    assert edit(real, namespace, {"decode": {"replicas": 2}, "router": {"replicas": 0}})[0] == 200
    wanted = {**KINDS, "StatefulSet": 3, "Pod": 3, "Service": 3, "NetworkPolicy": 1}
    wanted["ControllerRevision"] = 5  # one more StatefulSet has one of its own
    del wanted["Deployment"]
    settled(real, operator, namespace, wanted)
    assert before < set(owned(real, namespace, "StatefulSet")), "the others stay"


def test_a_name_that_is_taken_is_said_and_not_taken(real, operator, namespace):
    theirs = {"metadata": {"name": "tiny-router"}, "spec": {"ports": [{"port": 80}]}}
    path = CHILDREN["Service"].format(namespace)
    assert real.call("POST", path, {"apiVersion": "v1", "kind": "Service", **theirs})[0] == 201
    operator.start()
    create(real, namespace, cluster())
    said = until(
        lambda: (
            (now := condition(real, namespace, "Progressing")).get("reason") == "NameConflict"
            and now
        ),
        60,
        operator.said,
    )
    assert "Service tiny-router" in said["message"]
    kept = real.call("GET", f"{path}/tiny-router")[1]
    assert kept["spec"]["ports"][0]["port"] == 80
    assert "ownerReferences" not in kept["metadata"]


def test_deletion_leaves_nothing_with_the_operator_running_or_not(real, operator, namespace):
    operator.start()
    for _ in range(2):
        create(real, namespace, cluster())
        settled(real, operator, namespace)
        if _ == 1:
            operator.stop()
        delete(real, namespace)
        until(lambda: not owned(real, namespace), 60, lambda: owned(real, namespace))
        time.sleep(2)
        assert not owned(real, namespace), "nothing is brought back to life"


def test_a_cluster_made_anew_at_once_gets_children_of_its_own(real, operator, namespace):
    operator.start()
    create(real, namespace, cluster())
    settled(real, operator, namespace)
    delete(real, namespace)
    uid = create(real, namespace, cluster())["metadata"]["uid"]

    def its_own():
        sets = real.call("GET", CHILDREN["StatefulSet"].format(namespace))[1]["items"]
        owners = {one["uid"] for item in sets for one in item["metadata"]["ownerReferences"]}
        return owners == {uid} and counts(real, namespace) == KINDS

    until(its_own, 60, lambda: (counts(real, namespace), operator.said()))


@pytest.mark.timeout(300)
def test_twenty_kills_while_it_creates_and_deletes(real, operator, namespace):
    dice = random.Random(20)
    names = [f"c{number}" for number in range(3)]
    for turn in range(20):
        operator.start(ready=False)
        name = names[turn % len(names)]
        if get(real, namespace, name).get("kind") == "PDCluster":
            delete(real, namespace, name)
        else:
            create(real, namespace, cluster(name))
        # From before its first call to the midst of its writes.
        time.sleep(dice.uniform(0.7, 1.6))
        operator.kill()
    alive = [name for name in names if get(real, namespace, name).get("kind") == "PDCluster"]
    gone = [name for name in names if name not in alive]
    assert alive
    assert gone
    operator.start()
    wanted = {kind: number * len(alive) for kind, number in KINDS.items()}
    uids = {get(real, namespace, name)["metadata"]["uid"] for name in alive}

    def done() -> bool:
        return counts(real, namespace) == wanted and owners(real, namespace) == uids

    until(done, 60, lambda: (counts(real, namespace), owners(real, namespace), operator.said()))
    at_rest(real, operator)
    assert done()
    assert not [one for one in owned(real, namespace) for name in gone if f"/{name}-" in one]


def owners(real, namespace):
    """UIDs of the PDClusters that children belong to, also of those that are gone."""
    query = "?labelSelector=pdcluster.dev/cluster"
    return {
        owner["uid"]
        for path in CHILDREN.values()
        for item in real.call("GET", path.format(namespace) + query)[1]["items"]
        for owner in item["metadata"].get("ownerReferences", ())
        if owner["kind"] == "PDCluster"
    }


@pytest.mark.timeout(300)
def test_an_api_server_that_goes_away_and_comes_back(real, operator, namespace):
    operator.start()
    create(real, namespace, cluster())
    settled(real, operator, namespace)
    real.kill_api_server()
    time.sleep(5)
    real.start_api_server()
    until(lambda: edit(real, namespace, {"decode": {"replicas": 2}})[0] == 200, 60, operator.said)

    def grown():
        operator.start_if_ended()
        return len(owned(real, namespace, "StatefulSet")) == 3

    until(
        grown,
        120,
        lambda: (owned(real, namespace), operator.said()),
    )


def test_it_waits_for_an_api_server_that_is_not_there(real, namespace):
    operator = Operator(
        real, "run", f"--authority-secret={namespace}/authority", f"--namespace={namespace}"
    )
    operator._environment["KUBECONFIG"] = str(real.folder / "nobody.kubeconfig")
    text = (
        (real.folder / "operator.kubeconfig").read_text().replace(real.url, "https://127.0.0.1:1")
    )
    (real.folder / "nobody.kubeconfig").write_text(text)
    operator.start(ready=False)
    until(lambda: operator.page("/healthz")[0] == 200, 60, operator.said)
    assert operator.page("/readyz")[0] == 503
    until(lambda: "waiting for Secret" in operator.said(), 60, operator.said)
    assert operator.stop() == 0


def test_clusters_of_other_namespaces_are_left_alone(real, operator, namespace):
    other = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"{namespace}-other"}}
    assert real.call("POST", "/api/v1/namespaces", other)[0] == 201
    operator.start()
    create(real, f"{namespace}-other", cluster())
    create(real, namespace, cluster())
    settled(real, operator, namespace)
    assert not owned(real, f"{namespace}-other")


def test_cluster_wide_with_the_rights_of_the_chart(real, namespace):
    from rights import SUBJECT, WATCHED_RULES

    kind = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "operator"}}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "operator"}
    binding = {**kind, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": SUBJECT}
    rules = {**kind, "kind": "ClusterRole", "rules": WATCHED_RULES}
    assert real.call("POST", f"{RBAC}/clusterroles", rules)[0] == 201
    assert real.call("POST", f"{RBAC}/clusterrolebindings", binding)[0] == 201
    operator = Operator(
        real, "run", "--authority-secret=default/authority", "--allow-host-path-models"
    ).start()
    try:
        create(real, namespace, cluster())
        settled(real, operator, namespace)
    finally:
        operator.stop()
        real.call("DELETE", f"{RBAC}/clusterrolebindings/operator")
        real.call("DELETE", f"{RBAC}/clusterroles/operator")
