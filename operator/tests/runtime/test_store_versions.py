"""A store between a watch that lags, lists that take time, and the answers to our own writes."""

from __future__ import annotations

import pytest
from listing import list_into

from pdcluster_operator.adapters.api_server.kinds import BY_NAME, slim
from pdcluster_operator.api.object_names import CLUSTER_LABEL
from pdcluster_operator.runtime.interfaces import Key
from pdcluster_operator.runtime.store import GONE_SECONDS, Store

KEY = Key("default", "llama")


def cluster(version: int, uid: str = "uid-0") -> dict:
    metadata = {"name": "llama", "namespace": "default", "uid": uid}
    return {"kind": "PDCluster", "metadata": {**metadata, "resourceVersion": str(version)}}


def version(store: Store) -> str | None:
    held = store.cluster(KEY)
    return held and held["metadata"]["resourceVersion"]


def test_a_watch_that_lags_behind_our_own_write_changes_nothing() -> None:
    store = Store()
    store.put(cluster(12))
    assert store.put(cluster(9)) == KEY, "the key is worked on all the same"
    assert version(store) == "12"
    store.put(cluster(100))
    assert version(store) == "100", "versions are numbers, not words"


def test_a_version_that_is_held_is_looked_at_once() -> None:
    store = Store()
    store.put(cluster(12))
    held = store.cluster(KEY)
    assert store.put({**cluster(12), "spec": {"other": 1}}) is None
    assert store.cluster(KEY) is held, "no version is looked at twice"
    for spec in ({}, {"other": 1}):
        unversioned = {"kind": "Service", "metadata": {"name": "c"}, "spec": spec}
        store.put(unversioned)
        assert store.held(unversioned) == unversioned, "nobody knows whether it changed"


def test_an_object_made_anew_counts_whatever_its_version() -> None:
    store = Store()
    store.put(cluster(12))
    store.put(cluster(3, "uid-1"))
    assert version(store) == "3"


def test_a_list_does_not_undo_what_the_watch_said_meanwhile() -> None:
    store = Store()
    store.put(cluster(5))
    store.put(cluster(7))
    list_into(store, "PDCluster", [cluster(5)], "6")
    assert version(store) == "7"

    store.drop(cluster(8))
    list_into(store, "PDCluster", [cluster(7)], "7")
    assert store.cluster(KEY) is None, "a deleted object does not come back as a ghost"

    store.put(cluster(9))
    list_into(store, "PDCluster", [], "8")
    assert version(store) == "9", "an object made during the list stays"


def test_a_list_removes_what_no_watch_told_of() -> None:
    store = Store()
    store.put(cluster(5))
    assert list_into(store, "PDCluster", []) == {KEY}
    assert store.cluster(KEY) is None


def test_an_answer_that_comes_after_the_deletion_brings_nothing_back() -> None:
    now = [0.0]
    store = Store(lambda: now[0])
    store.put(cluster(5))
    store.drop(cluster(8))
    assert store.put(cluster(7)) == KEY, "it tells of a change all the same"
    assert store.cluster(KEY) is None
    store.put(cluster(9))
    assert version(store) == "9", "such as one whose label, which is watched, is there again"
    store.drop(cluster(10))
    store.put(cluster(6, "uid-1"))
    assert version(store) == "6", "it was created again"


def test_a_deletion_is_remembered_for_a_while() -> None:
    now = [0.0]
    store = Store(lambda: now[0])
    for moment in range(1000):
        now[0] = float(moment)
        store.drop(cluster(moment, f"uid-{moment}") | {"kind": f"Kind{moment}"})
    assert len(store._gone) == GONE_SECONDS + 1


def test_what_a_list_lacks_is_missing_unless_it_was_made_later() -> None:
    store = Store()
    store.put(cluster(5))
    assert store.listed("PDCluster", None, {("default", "llama")}, "9") == []
    assert store.listed("PDCluster", "another", set(), "9") == []
    assert store.listed("Pod", None, set(), "9") == []
    assert store.listed("PDCluster", None, set(), "4") == []
    for namespace in (None, "default"):
        assert store.listed("PDCluster", namespace, set(), "5") == [store.cluster(KEY)]


@pytest.mark.parametrize("namespace", [None, "default"])
def test_an_answer_that_comes_after_a_list_without_the_object_brings_nothing_back(
    namespace: str | None,
) -> None:
    store = Store()
    store.listed("PDCluster", namespace, set(), "9")
    store.listed("PDCluster", "another", set(), "99")
    store.answered(cluster(8))
    assert store.cluster(KEY) is None
    store.answered(cluster(10))
    assert version(store) == "10"
    store.answered(cluster(7, "uid-1"))
    assert version(store) == "10", "that one was deleted, too, and its name is used again"
    store.listed("PDCluster", namespace, {KEY}, "20")
    store.answered(cluster(12))
    assert version(store) == "12", "it is there, so it is newer than what is held"


def test_a_cluster_is_as_fresh_as_the_last_word_of_the_api_server() -> None:
    now = [0.0]
    store = Store(lambda: now[0])
    assert store.reported_seconds(KEY, "uid-0") == float("inf")
    store.put(cluster(5))
    now[0] = 7.0
    assert store.reported_seconds(KEY, "uid-0") == 7.0
    store.put(cluster(4))
    assert store.reported_seconds(KEY, "uid-0") == 7.0, "what a watch reports late is no news"
    store.put(cluster(5))
    assert store.reported_seconds(KEY, "uid-0") == 0.0
    now[0] = 9.0
    list_into(store, "PDCluster", [cluster(5)])
    assert store.reported_seconds(KEY, "uid-0") == 0.0
    store.drop(cluster(5))
    assert store.reported_seconds(KEY, "uid-0") == float("inf")
    store.put(cluster(6, "uid-1"))
    assert store.reported_seconds(KEY, "uid-1") == 0.0
    assert store.reported_seconds(KEY, "uid-0") == float("inf"), "another one has its name"


def service(version: int, **parts: object) -> dict:
    metadata = {"name": "a", "namespace": "default", "labels": {CLUSTER_LABEL: "llama"}}
    metadata |= {"uid": "s", "resourceVersion": str(version), "managedFields": [version]}
    return {"metadata": metadata, "spec": {"ports": [{"port": 1}]}, **parts}


def told(store: Store, manifest: dict) -> Key | None:
    return store.put(slim(manifest, BY_NAME["Service"]))


def test_what_nobody_reads_is_no_news_and_its_version_is_known() -> None:
    store = Store()
    assert told(store, service(5)) == KEY
    assert told(store, service(5)) is None, "our own write, or the same again"
    assert told(store, service(6, status={"loadBalancer": {}})) is None
    assert store.held({**service(6), "kind": "Service"})["metadata"]["resourceVersion"] == "6"
    assert told(store, service(7, spec={"ports": [{"port": 2}]})) == KEY
    assert told(store, service(8, spec={"ports": [{"port": 2}], "type": "NodePort"})) == KEY
    assert told(store, service(4)) == KEY, "somebody changed it, and our write came later"


def test_what_did_not_change_is_held_once() -> None:
    store = Store()
    told(store, service(5, spec={"ports": [{"port": 1}], "note": "x" * 1000}))
    before = store.held({**service(5), "kind": "Service"})
    told(store, service(6, spec={"ports": [{"port": 2}], "note": "x" * 1000}))
    after = store.held({**service(6), "kind": "Service"})
    assert after["spec"]["ports"] == [{"port": 2}]
    assert after["spec"]["note"] is before["spec"]["note"]
    assert after["metadata"]["labels"] is before["metadata"]["labels"]


def test_a_value_of_a_user_keeps_its_type() -> None:
    store = Store()
    store.put({**cluster(5), "spec": {"free": 1}})
    store.put({**cluster(6), "spec": {"free": True}})
    assert store.cluster(KEY)["spec"]["free"] is True


def test_a_label_or_an_annotation_that_changes_is_news() -> None:
    store = Store()
    store.put(cluster(1))
    assert store.put(cluster(2)) is None, "only the version is another"
    for number, field in enumerate(("labels", "annotations"), 3):
        changed = cluster(number)
        changed["metadata"][field] = {"a.example": "x"}
        assert store.put(changed) == KEY


@pytest.mark.parametrize(("before", "after"), [("12", "x9"), ("x12", "9"), ("", "9"), ("x", "")])
def test_a_version_that_is_no_number_is_neither_older_nor_newer(before: str, after: str) -> None:
    store = Store()
    for one in (before, after):
        manifest = cluster(0)
        del manifest["metadata"]["resourceVersion"]
        manifest["metadata"] |= {"resourceVersion": one} if one else {}
        store.put(manifest)
    assert store.cluster(KEY)["metadata"].get("resourceVersion", "") == after
