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
