from __future__ import annotations

import pytest

from pdcluster_operator.local.api_server import LocalApi
from pdcluster_operator.local.cluster import Workloads
from pdcluster_operator.runtime.interfaces import Conflict


def config_map(name: str = "c", **fields: object) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "ns"},
        **fields,
    }


def statefulset(replicas: int = 1, image: str = "one") -> dict:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "s", "namespace": "ns"},
        "spec": {
            "replicas": replicas,
            "serviceName": "s",
            "template": {
                "metadata": {"labels": {"app": "s"}},
                "spec": {"containers": [{"name": "x", "image": image}]},
            },
        },
    }


def deployment(image: str) -> dict:
    return {**statefulset(1, image), "kind": "Deployment"}


def owned(manifest: dict, owner: dict) -> dict:
    reference = {
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "apiVersion": "v1",
    }
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}}


def test_apply_assigns_what_a_server_assigns_and_a_no_op_is_no_event() -> None:
    api, events = LocalApi(), []
    api.watch(lambda event, manifest: events.append((event, manifest["metadata"]["name"])))
    first = api.apply(config_map(spec={"a": 1}))
    assert first["metadata"]["uid"]
    assert first["metadata"]["generation"] == 1
    again = api.apply(config_map(spec={"a": 1}))
    assert again == first
    changed = api.apply(config_map(spec={"a": 2}))
    assert changed["metadata"]["generation"] == 2
    assert changed["metadata"]["uid"] == first["metadata"]["uid"]
    assert changed["metadata"]["resourceVersion"] != first["metadata"]["resourceVersion"]
    labelled = config_map(spec={"a": 2})
    labelled["metadata"]["labels"] = {"l": "1"}
    assert api.apply(labelled)["metadata"]["generation"] == 2
    assert events == [("ADDED", "c"), ("MODIFIED", "c"), ("MODIFIED", "c")]


def test_what_an_apply_omits_goes_away_but_not_the_status() -> None:
    api = LocalApi()
    api.apply(config_map(spec={"a": 1, "b": 2}))
    assert api.set_status("ConfigMap", "ns", "c", {"seen": True})
    live = api.apply(config_map(spec={"a": 1}, status={"forged": True}))
    assert live["spec"] == {"a": 1}
    assert live["status"] == {"seen": True}
    assert live["metadata"]["generation"] == 2


def test_status_changes_no_generation_and_misses_another_object() -> None:
    api = LocalApi()
    uid = api.apply(config_map())["metadata"]["uid"]
    version = api.get("ConfigMap", "ns", "c")["metadata"]["resourceVersion"]
    assert not api.set_status("ConfigMap", "ns", "c", {"x": 1}, "another")
    assert not api.set_status("ConfigMap", "ns", "gone", {"x": 1})
    assert api.set_status("ConfigMap", "ns", "c", {"x": 1}, uid)
    live = api.get("ConfigMap", "ns", "c")
    assert live["metadata"]["generation"] == 1
    assert live["metadata"]["resourceVersion"] != version
    api.set_status("ConfigMap", "ns", "c", {"x": 1}, uid)
    assert api.get("ConfigMap", "ns", "c") == live


def test_reads_are_copies() -> None:
    api = LocalApi()
    seen: list[dict] = []
    api.watch(lambda _, manifest: seen.append(manifest))
    api.apply(config_map(spec={"a": 1}))["spec"]["a"] = 9
    api.get("ConfigMap", "ns", "c")["spec"]["a"] = 9
    api.list("ConfigMap")[0]["spec"]["a"] = 9
    seen[0]["spec"]["a"] = 9
    assert api.get("ConfigMap", "ns", "c")["spec"] == {"a": 1}


def test_delete_keeps_its_preconditions() -> None:
    api = LocalApi()
    live = api.apply(config_map())["metadata"]
    with pytest.raises(Conflict):
        api.delete("ConfigMap", "ns", "c", uid="another")
    with pytest.raises(Conflict):
        api.delete("ConfigMap", "ns", "c", resource_version="0")
    assert api.get("ConfigMap", "ns", "c") is not None
    api.delete("ConfigMap", "ns", "c", uid=live["uid"], resource_version=live["resourceVersion"])
    assert api.get("ConfigMap", "ns", "c") is None
    api.delete("ConfigMap", "ns", "c")


def test_applying_to_another_uid_is_a_conflict() -> None:
    api = LocalApi()
    api.apply(config_map())
    wrong = config_map()
    wrong["metadata"]["uid"] = "another"
    with pytest.raises(Conflict):
        api.apply(wrong)


def test_owned_objects_go_with_their_owner_and_are_refused_after_it() -> None:
    api = LocalApi()
    owner = api.apply(config_map("owner"))
    child = api.apply(owned(config_map("child"), owner))
    api.apply(owned(config_map("grandchild"), child))
    api.apply(config_map("stranger"))
    api.delete("ConfigMap", "ns", "owner")
    assert [m["metadata"]["name"] for m in api.list("ConfigMap")] == ["stranger"]
    api.apply(owned(config_map("late"), owner))
    assert api.get("ConfigMap", "ns", "late") is None


def test_a_pod_goes_in_two_steps() -> None:
    api = LocalApi()
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "ns"}}
    live = api.apply(pod)
    api.delete("Pod", "ns", "p")
    assert api.get("Pod", "ns", "p")["metadata"]["deletionTimestamp"]
    api.finalize({**live, "metadata": {**live["metadata"], "uid": "another"}})
    assert api.get("Pod", "ns", "p") is not None
    api.finalize(live)
    assert api.get("Pod", "ns", "p") is None


def names(api: LocalApi) -> list[str]:
    return [pod["metadata"]["name"] for pod in api.list("Pod")]


def ready(api: LocalApi, name: str) -> None:
    api.set_status("Pod", "ns", name, {"conditions": [{"type": "Ready", "status": "True"}]})


async def test_a_statefulset_gets_its_pods_and_only_the_planner_restarts_them() -> None:
    api = LocalApi()
    workloads = Workloads(api)
    api.apply(statefulset(2))
    workloads.sync()
    assert names(api) == ["s-0", "s-1"]
    pod = api.get("Pod", "ns", "s-1")
    assert pod["metadata"]["labels"]["apps.kubernetes.io/pod-index"] == "1"
    assert pod["metadata"]["labels"]["app"] == "s"
    old = pod["metadata"]["uid"]
    api.apply(statefulset(2, image="two"))
    workloads.sync()
    assert api.get("Pod", "ns", "s-1")["metadata"]["uid"] == old
    assert api.get("StatefulSet", "ns", "s")["status"]["updatedReplicas"] == 0
    api.delete("Pod", "ns", "s-1")
    workloads.sync()
    assert api.get("Pod", "ns", "s-1")["metadata"]["uid"] == old, "it is still ending"
    api.finalize(pod)
    workloads.sync()
    fresh = api.get("Pod", "ns", "s-1")
    assert fresh["metadata"]["uid"] != old
    assert fresh["spec"]["containers"][0]["image"] == "two"
    ready(api, "s-0")
    workloads.sync()
    assert api.get("StatefulSet", "ns", "s")["status"]["availableReplicas"] == 1


async def test_a_statefulset_shrinks_from_the_top_and_takes_its_pods_along() -> None:
    api = LocalApi()
    workloads = Workloads(api)
    api.apply(statefulset(3))
    workloads.sync()
    api.apply(statefulset(1))
    workloads.sync()
    going = [p["metadata"]["name"] for p in api.list("Pod") if "deletionTimestamp" in p["metadata"]]
    assert going == ["s-1", "s-2"]
    api.delete("StatefulSet", "ns", "s")
    assert all("deletionTimestamp" in pod["metadata"] for pod in api.list("Pod"))


async def test_a_deployment_keeps_the_old_pod_until_the_new_one_is_ready() -> None:
    api = LocalApi()
    workloads = Workloads(api)
    api.apply(deployment("one"))
    workloads.sync()
    [old] = names(api)
    ready(api, old)
    api.apply(deployment("two"))
    workloads.sync()
    [new] = set(names(api)) - {old}
    assert "deletionTimestamp" not in api.get("Pod", "ns", old)["metadata"]
    ready(api, new)
    workloads.sync()
    assert "deletionTimestamp" in api.get("Pod", "ns", old)["metadata"]
    assert "deletionTimestamp" not in api.get("Pod", "ns", new)["metadata"]


async def test_a_pass_over_what_is_as_wanted_changes_nothing() -> None:
    api = LocalApi()
    workloads = Workloads(api)
    api.apply(statefulset(2))
    api.apply({**deployment("one"), "metadata": {"name": "d", "namespace": "ns"}})
    for _ in range(3):
        workloads.sync()
    events: list[str] = []
    api.watch(lambda event, _: events.append(event))
    events.clear()
    workloads.sync()
    assert events == []
