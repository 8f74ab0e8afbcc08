"""Whose objects are a cluster's: those of its controller's UID, whatever their labels say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from listing import list_into, loop_lists

from pdcluster_operator.plan.objects import ownership
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.interfaces import ApiError, Key
from pdcluster_operator.runtime.store import Store

KEY = Key("ns", "tiny")
ENGINE = "tiny-prefill-bcdfg-0"
LABELS = {
    "pdcluster.dev/cluster": "tiny",
    "pdcluster.dev/role": "prefill",
    "pdcluster.dev/revision": "bcdfg",
    "pdcluster.dev/engine": ENGINE,
}


def thing(kind: str, name: str, uid: str, *owner: str, controller: bool = True) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "namespace": "ns", "uid": uid}
    if kind != "PDCluster":
        metadata["labels"] = dict(LABELS)
    if owner:
        reference = dict(zip(("kind", "name", "uid"), owner, strict=True))
        metadata["ownerReferences"] = [{**reference, "controller": controller}]
    return {"kind": kind, "metadata": {**metadata, "resourceVersion": "7"}}


CLUSTER = thing("PDCluster", "tiny", "c")
OF_CLUSTER = ("PDCluster", "tiny", "c")
STATEFUL_SET = thing("StatefulSet", ENGINE, "s", *OF_CLUSTER)
DEPLOYMENT = thing("Deployment", "tiny-router-k", "d", *OF_CLUSTER)
POD = thing("Pod", f"{ENGINE}-0", "p", "StatefulSet", ENGINE, "s")
REPLICA_SET = thing("ReplicaSet", "tiny-router-k-5d4f", "rs", "Deployment", "tiny-router-k", "d")


def filled(*manifests: dict[str, Any]) -> Store:
    store = Store()
    for manifest in (CLUSTER, STATEFUL_SET, DEPLOYMENT, *manifests):
        assert store.put(copy.deepcopy(manifest)) == KEY
    return store


def names(store: Store) -> list[str]:
    return [pod["metadata"]["name"] for pod in store.pods(KEY)]


def of_router(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the pod without an engine's labels."""
    pod["metadata"]["labels"] = {"pdcluster.dev/cluster": "tiny"}
    return pod


class Server:
    """What the API server answers to a GET, by kind and name, and what it was asked."""

    def __init__(self, *manifests: dict[str, Any]) -> None:
        self.live = {(one["kind"], one["metadata"]["name"]): one for one in manifests}
        self.asked: list[tuple[str, str]] = []

    async def read(self, kind: str, namespace: str, name: str) -> Any:
        assert namespace == "ns"
        place = kind, name
        self.asked.append(place)
        return copy.deepcopy(self.live.get(place))


async def learned(store: Store, server: Server) -> list[str]:
    await store.learn_owners(KEY, server.read)
    return names(store)


def test_what_a_user_made_dependent_on_the_cluster_is_no_child() -> None:
    mine = thing("ConfigMap", "my-notes", "m", *OF_CLUSTER, controller=False)
    assert {child["metadata"]["uid"] for child in filled(mine).children(KEY)} == {"s", "d"}


@pytest.mark.parametrize(
    "stranger",
    [
        thing("Pod", "debug", "x"),
        thing("Pod", "debug", "x", "Job", "debug", "j"),
        thing("Pod", "debug", "x", "StatefulSet", "somebody-elses", "y"),
        thing("Pod", "debug", "x", "StatefulSet", ENGINE, "another"),
        thing("Pod", "debug", "x", "StatefulSet", ENGINE, "s", controller=False),
        thing("Pod", "debug", "x", "Deployment", "tiny-router-k", "another"),
    ],
)
def test_a_label_makes_no_pod_the_clusters(stranger: dict[str, Any]) -> None:
    assert names(filled(POD, stranger)) == [f"{ENGINE}-0"]


OTHER_GROUP = [{**REPLICA_SET["metadata"]["ownerReferences"][0], "apiVersion": "example.com/v1"}]


@pytest.mark.parametrize(
    "owner",
    [
        thing("ReplicaSet", "tiny-router-k-5d4f", "rs"),
        thing("ReplicaSet", "tiny-router-k-5d4f", "rs", "Deployment", "web", "w"),
        thing("ReplicaSet", "tiny-router-k-5d4f", "rs", "Deployment", "tiny-router-k", "another"),
        thing("ReplicaSet", "tiny-router-k-5d4f", "rs", "ReplicaSet", "tiny-router-k-5d4f", "rs"),
        {**REPLICA_SET, "metadata": {**REPLICA_SET["metadata"], "ownerReferences": OTHER_GROUP}},
        thing("StatefulSet", "tiny-prefill-zzzzz-0", "rs"),
        thing("StatefulSet", "tiny-prefill-zzzzz-0", "rs", "PDCluster", "tiny", "another"),
    ],
)
@pytest.mark.parametrize("labels", ["engine", "router"])
async def test_a_name_makes_no_pod_the_clusters(owner: dict[str, Any], labels: str) -> None:
    """Nobody watches a stranger's objects without our labels, so the API server is asked."""
    kind, name = owner["kind"], owner["metadata"]["name"]
    stranger = thing("Pod", f"{name}-0", "x", kind, name, "rs")
    if labels == "router":
        of_router(stranger)
    elif kind == "StatefulSet":
        stranger["metadata"]["labels"] |= {
            "pdcluster.dev/revision": "zzzzz",
            "pdcluster.dev/engine": name,
        }
    web = thing("Deployment", "web", "w")
    store, server = filled(POD, stranger), Server(owner, web)
    assert await learned(store, server) == [f"{ENGINE}-0"]
    asked = list(server.asked)
    assert asked[0] == (kind, name)
    assert await learned(store, server) == [f"{ENGINE}-0"]
    assert server.asked == asked, "each UID is looked up once"


@pytest.mark.parametrize("name", ["..", "a/b", "a?b", ""])
async def test_nothing_is_asked_about_what_no_object_can_be_called(name: str) -> None:
    store, server = filled(of_router(thing("Pod", "x", "x", "ReplicaSet", name, "rs"))), Server()
    assert await learned(store, server) == []
    assert server.asked == []


async def test_pods_of_engines_and_of_routers_count() -> None:
    router = of_router(thing("Pod", "router", "r", "ReplicaSet", "tiny-router-k-5d4f", "rs"))
    local = of_router(thing("Pod", "router-local", "l", "Deployment", "tiny-router-k", "d"))
    store, server = filled(POD, router, local), Server(REPLICA_SET)
    everyone = [f"{ENGINE}-0", "router", "router-local"]
    assert await learned(store, server) == everyone
    assert server.asked == [("ReplicaSet", "tiny-router-k-5d4f")]
    # The garbage collector deletes the ReplicaSet and its pods after the Deployment.
    store.drop(DEPLOYMENT)
    assert await learned(store, Server()) == everyone


async def test_pods_whose_workload_went_before_this_process_came_count() -> None:
    router = of_router(thing("Pod", "router", "r", "ReplicaSet", "tiny-router-k-5d4f", "rs"))
    store, server = filled(POD, router), Server()
    store.drop(STATEFUL_SET)
    assert await learned(store, server) == [f"{ENGINE}-0", "router"]
    assert sorted(server.asked) == [("ReplicaSet", "tiny-router-k-5d4f"), ("StatefulSet", ENGINE)]
    assert await learned(store, server) == [f"{ENGINE}-0", "router"]
    assert len(server.asked) == 2


async def test_a_child_that_lost_its_label_is_found_through_its_pods() -> None:
    """No watch reports it. So it is read each time, until it has the label again or is gone."""
    bare = thing("StatefulSet", ENGINE, "s", *OF_CLUSTER)
    bare["metadata"] |= {"labels": {}, "resourceVersion": "8"}
    store, server = filled(POD), Server(bare)
    store.drop(bare)  # as the watch reports it
    for number in (1, 2):
        assert await learned(store, server) == [f"{ENGINE}-0"]
        assert bare in store.children(KEY)
        assert server.asked == [("StatefulSet", ENGINE)] * number
    store.put({**STATEFUL_SET, "metadata": {**STATEFUL_SET["metadata"], "resourceVersion": "9"}})
    await learned(store, server)
    assert len(server.asked) == 2, "the watch reports it again"
    store.drop(STATEFUL_SET)
    server.live.clear()
    assert await learned(store, server) == [f"{ENGINE}-0"], "its pods outlive it"
    assert [child["metadata"]["uid"] for child in store.children(KEY)] == ["d"]
    assert len(server.asked) == 3
    await learned(store, server)
    assert len(server.asked) == 3, "it is known to be gone"


async def test_the_pods_of_a_workload_that_lost_its_owner_are_not_the_clusters() -> None:
    """A backup that is restored may take owner references away. Then the workload is nobody's."""
    store = filled(POD)
    assert names(store) == [f"{ENGINE}-0"]
    orphan = thing("StatefulSet", ENGINE, "s")
    orphan["metadata"]["resourceVersion"] = "8"
    store.put(orphan)
    assert await learned(store, Server(orphan)) == []


async def test_what_the_server_said_of_a_workload_is_forgotten_with_its_pods() -> None:
    router = of_router(thing("Pod", "router", "r", "ReplicaSet", "tiny-router-k-5d4f", "rs"))
    store, server = filled(router), Server(REPLICA_SET)
    await learned(store, server)
    store.drop(router)
    assert await learned(store, server) == []
    store.put({**router, "metadata": {**router["metadata"], "uid": "r2", "resourceVersion": "9"}})
    assert await learned(store, server) == ["router"]
    assert len(server.asked) == 2


async def test_who_cannot_be_asked_about_counts_by_its_labels() -> None:
    """So an engine that may still run is not taken for one that has ended."""

    async def refuse(kind: str, namespace: str, name: str) -> Any:
        raise ApiError("Forbidden", f"{kind} in {namespace}")

    store = filled(of_router(thing("Pod", "router", "r", "ReplicaSet", "tiny-router-k-5d4f", "rs")))
    with pytest.raises(ApiError, match="ReplicaSet in ns"):
        await store.learn_owners(KEY, refuse)
    assert names(store) == ["router"]


def test_a_pod_that_outlives_its_statefulset_counts_until_it_is_gone() -> None:
    store = filled(POD)
    store.drop(STATEFUL_SET)
    assert names(store) == [f"{ENGINE}-0"]
    store.drop(POD)
    assert names(store) == []


def test_an_object_that_changes_its_owner_moves() -> None:
    store = filled()
    moved = thing("StatefulSet", ENGINE, "s", "PDCluster", "other", "o")
    moved["metadata"]["resourceVersion"] = "8"
    store.put(moved)
    assert [child["metadata"]["uid"] for child in store.children(KEY)] == ["d"]
    list_into(store, "Deployment", [thing("Deployment", "tiny-router-k", "d2", *OF_CLUSTER)])
    list_into(store, "Deployment", [])
    assert store.children(KEY) == ()


def created(manifest: dict[str, Any], second: int, **metadata: str) -> dict[str, Any]:
    """Return the object as it was created in this second of a minute."""
    born = {"creationTimestamp": f"2026-11-25T10:00:{second:02}Z"}
    return {**manifest, "metadata": {**manifest["metadata"], **born, **metadata}}


def test_the_pods_of_a_deleted_cluster_are_not_those_of_its_successor() -> None:
    """The garbage collector comes to the StatefulSets of a deleted cluster some seconds later."""
    store = Store()
    for manifest in (created(CLUSTER, 1), created(STATEFUL_SET, 2), created(POD, 3)):
        store.put(manifest)
    assert names(store) == [POD["metadata"]["name"]]
    store.drop(CLUSTER)
    assert names(store) == []
    store.put(created(CLUSTER, 9, uid="c2"))
    assert store.children(KEY) == ()
    assert names(store) == []
    own = thing("StatefulSet", ENGINE, "s2", "PDCluster", "tiny", "c2")
    store.put(own)
    # The clock of another API server may be late.
    store.put(created(thing("Pod", f"{ENGINE}-0", "p2", "StatefulSet", ENGINE, "s2"), 8))
    assert [pod["metadata"]["uid"] for pod in store.pods(KEY)] == ["p2"]


@pytest.mark.parametrize(("second", "counts"), [(3, False), (9, True), (12, True)])
async def test_a_pod_whose_workload_is_gone_counts_unless_it_is_older_than_the_cluster(
    second: int, counts: bool
) -> None:
    """It would hold an engine's place and GPUs, although a deleted cluster had made it."""
    store = Store()
    store.put(created(CLUSTER, 9))
    store.put(created(POD, second))
    assert (await learned(store, Server()) == names(store) == [POD["metadata"]["name"]]) is counts


@pytest.mark.parametrize("way", ["watch", "list"])
async def test_a_pod_that_somebody_gives_to_another_cluster_concerns_both(way: str) -> None:
    """The one that it leaves would count it as its own, up to five minutes, until its resync."""
    unused: Any = object()
    loop = ControlLoop(
        api_server=unused, launchers=unused, events=unused, connector=unused, clock=unused
    )
    for manifest in (CLUSTER, STATEFUL_SET, POD):
        loop.see("ADDED", copy.deepcopy(manifest))
    woken: set[Key] = set()
    loop.queue.add = lambda key, **_: woken.add(key)  # type: ignore[method-assign]
    moved = copy.deepcopy(POD)
    moved["metadata"]["labels"]["pdcluster.dev/cluster"] = "other"
    moved["metadata"]["resourceVersion"] = "8"
    if way == "watch":
        loop.see("MODIFIED", moved)
    else:
        loop_lists(loop, "Pod", [moved])
    assert woken == {KEY, Key("ns", "other")}


def test_reading_one_cluster_costs_no_more_with_many_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[str] = []

    def counting(manifest: Any) -> Any:
        looked_at.append(manifest["metadata"]["name"])
        return real(manifest)

    real = ownership.controller_of
    costs = []
    for others in (0, 50):
        store = filled(POD)
        for number in range(others):
            for manifest in (CLUSTER, STATEFUL_SET, POD):
                other = copy.deepcopy(manifest)
                other["metadata"]["namespace"] = f"ns-{number}"
                other["metadata"]["uid"] = f"{number}-{manifest['kind']}"
                store.put(other)
        looked_at.clear()
        with monkeypatch.context() as patch:
            patch.setattr(ownership, "controller_of", counting)
            assert len(store.children(KEY)) == 2
            assert len(store.pods(KEY)) == 1
            store.put(POD)
        costs.append(len(looked_at))
    assert costs[0] == costs[1] > 0


def test_the_clusters_of_a_namespace_are_those_that_are_there_now() -> None:
    store = filled()
    other = {**thing("PDCluster", "other", "o"), "spec": {}}
    elsewhere = thing("PDCluster", "tiny", "e")
    elsewhere["metadata"]["namespace"] = "elsewhere"
    for cluster in (other, elsewhere):
        store.put(cluster)
    assert store.clusters_in("ns") == {KEY: "c", Key("ns", "other"): "o"}
    assert store.clusters_in("elsewhere") == {Key("elsewhere", "tiny"): "e"}
    store.drop(CLUSTER)
    list_into(store, "PDCluster", [copy.deepcopy(other)])
    assert store.keys() == list(store.clusters_in("ns")) == [Key("ns", "other")]
    assert store.clusters_in("elsewhere") == {}
