"""The store knows at once which shared ConfigMaps pods mount, and tells who lacks one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from listing import list_into

from pdcluster_operator.adapters.api_server.kinds import BY_NAME, slim
from pdcluster_operator.plan.connectors import shared_connectors_of
from pdcluster_operator.runtime import store as store_module
from pdcluster_operator.runtime.store import Store

NAMES = [f"pdcluster-connector-{digit * 16}" for digit in "ab"]


def cluster(namespace: str, name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "uid": name, "resourceVersion": "1"}
    return {"kind": "PDCluster", "metadata": metadata}


def connector(name: str, namespace: str = "ns", version: str = "1") -> dict[str, Any]:
    labels = {"pdcluster.dev/connector": name.rpartition("-")[2]}
    metadata = {"name": name, "namespace": namespace, "uid": name, "labels": labels}
    return {"kind": "ConfigMap", "metadata": {**metadata, "resourceVersion": version}}


def holder(kind: str, name: str, namespace: str, mounts: list[str], uid: str) -> dict[str, Any]:
    pod = {"spec": {"volumes": [{"configMap": {"name": one}} for one in mounts]}}
    body = {"Pod": pod, "ControllerRevision": {"data": {"template": pod}}}
    metadata = {"name": name, "namespace": namespace, "uid": uid}
    return {"kind": kind, "metadata": metadata, **body.get(kind, {"spec": {"template": pod}})}


HOLDERS = st.builds(
    holder,
    st.sampled_from(["StatefulSet", "Deployment", "ControllerRevision", "Pod"]),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["ns", "other"]),
    st.lists(st.sampled_from([*NAMES, "settings"]), max_size=2),
    st.sampled_from(["1", "2"]),
)


@settings(max_examples=2 * settings().max_examples)
@given(st.lists(st.tuples(st.sampled_from(["put", "drop", "replace"]), HOLDERS), max_size=15))
def test_what_is_mounted_is_what_the_objects_say(acts: list[tuple[str, dict[str, Any]]]) -> None:
    store = Store()
    held: dict[tuple[str, str, str], dict[str, Any]] = {}
    for number, (act, bare) in enumerate(acts, 1):
        version = {"resourceVersion": str(number)}
        manifest = {**bare, "metadata": {**bare["metadata"], **version}}
        kind, metadata = manifest["kind"], manifest["metadata"]
        identity = kind, metadata["namespace"], metadata["name"]
        if act == "put":
            store.put(manifest)
            held[identity] = manifest
        elif act == "drop":
            store.drop(manifest)
            if identity in held and held[identity]["metadata"]["uid"] == metadata["uid"]:
                del held[identity]
        else:
            list_into(store, kind, [manifest])
            held = {one: thing for one, thing in held.items() if one[0] != kind}
            held[identity] = store._held(identity) or {}
        for namespace in ("ns", "other"):
            for name in NAMES:
                mounted = any(
                    name in shared_connectors_of(one)
                    for (_, where, _), one in held.items()
                    if where == namespace
                )
                assert store.is_mounted(namespace, name) == mounted


def test_connectors_are_known_by_namespace() -> None:
    store = Store()
    store.put(connector(NAMES[0]))
    store.put(connector(NAMES[1], "other"))
    foreign = connector("pdcluster-connector-of-mine")
    store.put(foreign)
    assert [one["metadata"]["name"] for one in store.connectors("ns")] == [NAMES[0]]
    assert {one["metadata"]["name"] for one in store.all_connectors()} == set(NAMES)
    store.drop(connector(NAMES[0]))
    assert store.connectors("ns") == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just(NAMES[0]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["template", "spec", "volumes", "configMap", "name"]), inner, max_size=2
        )
    ),
    max_leaves=8,
)
PATHS = {
    "ControllerRevision": ("data", "template", "spec", "volumes", 0, "configMap", "name"),
    "StatefulSet": ("spec", "template", "spec", "volumes", 0, "configMap", "name"),
    "Deployment": ("spec", "template", "spec", "volumes", 0, "configMap", "name"),
}


def broken(kind: str, depth: int, value: object) -> dict[str, Any]:
    """Put a value in the place of one part of an object that mounts a connector."""
    manifest: Any = holder(kind, "a", "ns", [NAMES[0]], "1")
    manifest["metadata"] |= {"resourceVersion": "1"}
    part = manifest
    for step in PATHS[kind][: depth % len(PATHS[kind])]:
        part = part[step]
    part[PATHS[kind][depth % len(PATHS[kind])]] = value
    return slim(manifest, BY_NAME[kind])


@settings(max_examples=2 * settings().max_examples)
@given(st.builds(broken, st.sampled_from(sorted(PATHS)), st.integers(0, 6), JSON))
def test_whatever_others_write_into_an_object_it_can_be_read(manifest: dict[str, Any]) -> None:
    assert shared_connectors_of(manifest) <= set(NAMES)
    store = Store()
    store.put(manifest)
    store.drop(manifest)
    list_into(store, manifest["kind"], [manifest])
    mounted = NAMES[0] in shared_connectors_of(manifest)
    assert store.is_mounted("ns", NAMES[0]) == mounted


def test_one_object_that_cannot_be_read_keeps_no_other_from_the_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(manifest: dict[str, Any]) -> frozenset[str]:
        if manifest["metadata"]["name"] == "bad":
            raise AttributeError("of a kind that nobody thought of")
        return shared_connectors_of(manifest)

    monkeypatch.setattr(store_module, "shared_connectors_of", read)
    store = Store()
    good = holder("StatefulSet", "good", "ns", [NAMES[0]], "1")
    bad = holder("StatefulSet", "bad", "ns", [NAMES[1]], "2")
    for manifest in (bad, good):
        manifest["metadata"]["resourceVersion"] = "1"
    list_into(store, "StatefulSet", [bad, good])
    store.put(bad)
    assert store.is_mounted("ns", NAMES[0])
    assert "StatefulSet ns/bad cannot be read" in caplog.text
    store.drop(bad)


def test_a_label_alone_makes_no_shared_connector() -> None:
    store = Store()
    store.put(connector("pdcluster-connector-foo"))
    store.put(connector(NAMES[0].upper()))
    assert store.connectors("ns") == ()
    assert store.all_connectors() == [], "what mounts it is not known, so it must not be deleted"
