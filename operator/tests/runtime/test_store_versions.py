"""A store between a watch that lags, lists that take time, and the answers to our own writes."""

from __future__ import annotations

from pdcluster_operator.runtime.queue import Key
from pdcluster_operator.runtime.store import Store

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


def test_an_object_made_anew_counts_whatever_its_version() -> None:
    store = Store()
    store.put(cluster(12))
    store.put(cluster(3, "uid-1"))
    assert version(store) == "3"


def test_a_list_does_not_undo_what_the_watch_said_meanwhile() -> None:
    store = Store()
    store.put(cluster(5))
    store.begin("PDCluster")
    store.put(cluster(7))
    assert store.replace("PDCluster", [cluster(5)]) == set()
    assert version(store) == "7"

    store.begin("PDCluster")
    store.drop(cluster(8))
    store.replace("PDCluster", [cluster(7)])
    assert store.cluster(KEY) is None, "a deleted object does not come back as a ghost"

    store.begin("PDCluster")
    store.put(cluster(9))
    store.replace("PDCluster", [])
    assert version(store) == "9", "an object made during the list stays"


def test_a_list_removes_what_no_watch_told_of() -> None:
    store = Store()
    store.put(cluster(5))
    store.begin("PDCluster")
    assert store.replace("PDCluster", []) == {KEY}
    assert store.cluster(KEY) is None


def test_a_cluster_is_as_fresh_as_the_last_word_of_the_api_server() -> None:
    now = [0.0]
    store = Store(lambda: now[0])
    assert store.reported_seconds(KEY) == float("inf")
    store.put(cluster(5))
    now[0] = 7.0
    assert store.reported_seconds(KEY) == 7.0
    store.put(cluster(4))
    assert store.reported_seconds(KEY) == 7.0, "what a watch reports late is no news"
    store.put(cluster(5))
    assert store.reported_seconds(KEY) == 0.0
    now[0] = 9.0
    store.replace("PDCluster", [cluster(5)])
    assert store.reported_seconds(KEY) == 0.0
    store.drop(cluster(5))
    assert store.reported_seconds(KEY) == float("inf")
