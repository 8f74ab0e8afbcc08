"""What the operator made says which certificates an engine has; a pod's labels say nothing."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from simulated_cluster import START, SimulatedCluster, manifest as cluster

from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.api.object_names import TLS_LABEL
from pdcluster_operator.api.spec.types import Certificates
from pdcluster_operator.plan.launchers import launchers_to_poll
from pdcluster_operator.plan.observed.pods import LOST_SECONDS

ROLE: dict[str, Any] = {
    "podTemplate": {
        "spec": {
            "containers": [
                {"name": "engine", "volumeMounts": [{"name": "own", "mountPath": "/pdcluster-tls"}]}
            ],
            "volumes": [{"name": "own", "secret": {"secretName": "engine"}}],
        }
    }
}
HELD = {
    "Mounted": Certificates.MOUNTED,
    "Enabled": Certificates.OPERATOR,
    "Disabled": Certificates.NONE,
}


def world_of(tls: str, **spec: Any) -> SimulatedCluster:
    role = ROLE if tls == "Mounted" else {}
    spec = {"prefill": role, "decode": role, **spec}
    world = SimulatedCluster(cluster(transfer={"device": "CPU", "tls": tls}, **spec))
    world.bring_up()
    return world


def asked(world: SimulatedCluster) -> set[tuple[str, Certificates]]:
    seen = world.observed()
    targets = launchers_to_poll(seen.pods, seen.children)
    return {(target.url.split(":")[0], target.certificates) for target in targets}


def transfer(world: SimulatedCluster) -> Any:
    world.step()
    return world.cluster["status"]["transfer"]


UNRELATED: dict[str, Any] = {"name": "copied", "secret": {"secretName": "llama-certificates"}}
ITEMS = [{"key": "ca.crt", "path": "ca.crt"}]
SAME_NAME = {"name": "certificate", "secret": {**UNRELATED["secret"], "items": ITEMS}}


@pytest.mark.parametrize(
    ("tls", "volume", "path"),
    [
        ("Mounted", UNRELATED, "/copied"),
        ("Mounted", SAME_NAME, "/copied"),
        ("Disabled", UNRELATED, "/copied"),
        ("Disabled", SAME_NAME, "/copied"),
        ("Disabled", UNRELATED, "/pdcluster-tls"),
    ],
)
def test_a_users_volume_of_the_operators_secret_is_no_certificate_of_the_engines(
    tls: str, volume: dict[str, Any], path: str
) -> None:
    mounts = [{"name": volume["name"], "mountPath": path}]
    volumes = [volume]
    if tls == "Mounted":
        mounts += ROLE["podTemplate"]["spec"]["containers"][0]["volumeMounts"]
        volumes += ROLE["podTemplate"]["spec"]["volumes"]
    pod = {"containers": [{"name": "engine", "volumeMounts": mounts}], "volumes": volumes}
    role = {"podTemplate": {"spec": pod}}
    world = world_of(tls, prefill=role, decode=role)
    assert asked(world) == {("http" if tls == "Disabled" else "https", HELD[tls])}
    assert transfer(world) == {"certificates": HELD[tls].value}


def delete(world: SimulatedCluster, *kinds: str) -> None:
    """Let somebody delete objects. The pods stay, as they do for their grace period."""
    world.children = {name: one for name, one in world.children.items() if name[0] not in kinds}


@pytest.mark.parametrize("tls", list(HELD))
@pytest.mark.parametrize("label", [None, "", "None", "Mounted", "Enabled", "Disabled"])
def test_a_label_that_a_stranger_changes_on_pods_changes_no_answer(
    tls: str, label: str | None
) -> None:
    world = world_of(tls)
    before = asked(world)
    assert before == {("http" if tls == "Disabled" else "https", HELD[tls])}
    for pod in world.pods.values():
        pod["metadata"]["labels"].pop(TLS_LABEL, None)
        if label is not None:
            pod["metadata"]["labels"][TLS_LABEL] = label
    assert asked(world) == before
    assert transfer(world) == {"certificates": HELD[tls].value}


@pytest.mark.parametrize("tls", list(HELD))
def test_a_pod_that_outlives_its_statefulset_is_known_by_its_stored_revision(tls: str) -> None:
    world = world_of(tls)
    before = asked(world)
    delete(world, "StatefulSet")
    for pod in world.pods.values():
        pod["metadata"]["labels"].pop(TLS_LABEL, None)
    assert asked(world) == before
    assert transfer(world) == {"certificates": HELD[tls].value}


@pytest.mark.parametrize("tls", list(HELD))
def test_where_nothing_is_known_the_operator_speaks_only_tls_and_the_status_says_so(
    tls: str,
) -> None:
    world = world_of(tls)
    delete(world, "StatefulSet", "ControllerRevision")
    assert asked(world) == {("https", Certificates.UNKNOWN)}
    plan = world.plan()
    told = plan.status["transfer"]
    assert told["certificates"] == "Unknown"
    assert "2 of 2 engines" in told["message"]
    assert "Delete their pods" in told["message"], "what helps"
    assert [one.type for one in plan.events if one.message == told["message"]] == ["Warning"]


def forget(world: SimulatedCluster, role: str) -> None:
    """Delete a role's StatefulSet and its stored revision."""
    name = next(name for kind, name in world.children if kind == "StatefulSet" and role in name)
    del world.children["StatefulSet", name]
    del world.children["ControllerRevision", name.rpartition("-")[0]]


def test_engines_of_which_nothing_is_known_are_counted_among_the_others() -> None:
    world = world_of("Enabled")
    forget(world, "decode")
    told = world.plan().status["transfer"]
    assert told["certificates"] == "Mixed"
    assert "1 of 2 engines" in told["message"]


def test_a_pod_of_a_lost_node_does_not_count() -> None:
    """It stays until somebody removes the node. Long before, nothing tells what it was made of."""
    world = world_of("Enabled")
    pod = next(pod for name, pod in world.pods.items() if "-decode-" in name)
    pod["metadata"]["deletionTimestamp"] = timestamp(world.now)
    forget(world, "decode")
    assert world.plan().status["transfer"]["certificates"] == "Mixed", "it may still end"
    world.now += LOST_SECONDS + 1
    assert world.plan().status["transfer"] == {"certificates": "Operator"}


def test_the_end_of_a_silent_engines_certificate_stays_if_another_engine_becomes_unknown() -> None:
    world = world_of("Enabled", decode={"replicas": 2})
    first, *others = sorted(world.engines)
    for name in (first, *others):
        moment = START + (5 if name == first else 60) * 86400.0
        world.engines[name] = structs.replace(world.engines[name], certificate_expires=moment)
    assert transfer(world)["notAfter"] == timestamp(START + 5 * 86400.0)
    del world.engines[first]
    assert transfer(world)["notAfter"] == timestamp(START + 5 * 86400.0)
    forget(world, "prefill")
    told = transfer(world)
    assert told["certificates"] == "Mixed"
    assert told["notAfter"] == timestamp(START + 5 * 86400.0)
