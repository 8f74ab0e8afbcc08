"""Which steps a plan takes, from nothing to Ready and through changes."""

from __future__ import annotations

import copy
import re

import pytest
from msgspec import structs
from simulated_cluster import SimulatedCluster, brought_up, manifest

from pdcluster_connector.protocol.launcher_documents import PeersDocument, decode_peers, encode_json
from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.plan.renewals import DAY
from pdcluster_operator.plan.types import (
    Apply,
    Delete,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
)


def kinds(plan):
    return [
        (type(step).__name__, step.kind if isinstance(step, Delete) else step.manifest["kind"])
        for step in plan.steps
        if isinstance(step, Apply | TryOut | WriteTicketKey | WriteCertificates | Delete)
    ]


def test_a_new_cluster_gets_its_fences_first_and_the_router_last():
    plan = SimulatedCluster(manifest()).plan()
    assert [kind for _, kind in kinds(plan)] == [
        "Secret", "Secret", "ServiceAccount", "NetworkPolicy", "NetworkPolicy",
        "PodDisruptionBudget", "PodDisruptionBudget",
        "ConfigMap", "ControllerRevision", "Service", "StatefulSet",
        "ControllerRevision", "Service", "StatefulSet", "Deployment", "Service",
    ]  # fmt: skip
    assert isinstance(plan.steps[0], WriteTicketKey)
    assert isinstance(plan.steps[1], WriteCertificates)
    assert all(isinstance(step, Apply | TryOut) for step in plan.steps[2:])
    assert all(step.why for step in plan.steps)


def test_every_child_is_owned_by_the_cluster():
    for step in SimulatedCluster(manifest()).plan().steps:
        if step.manifest["kind"] == "ConfigMap":  # the one that the namespace shares
            assert "ownerReferences" not in step.manifest["metadata"]
            continue
        (owner,) = step.manifest["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["kind"]) == ("uid-0", True, "PDCluster")


def test_every_data_parallel_rank_has_a_port_with_a_name_that_kubernetes_takes():
    world = SimulatedCluster(manifest(prefill={"parallelism": {"data": 1024}}))
    world.step()
    (pod,) = [
        child["spec"]["template"]["spec"]
        for (kind, name), child in world.children.items()
        if kind == "StatefulSet" and "-prefill-" in name
    ]
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert len(ports) == 3 + 1024
    assert sorted(ports.values())[2:] == [*range(5600, 5600 + 1024), 8000]
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]{0,13}[a-z0-9])?", name) for name in ports)


def test_decode_learns_how_many_ranks_its_peers_have():
    world = SimulatedCluster(manifest(prefill={"parallelism": {"data": 2}}))
    world.step()
    world.run_pods()
    world.speak()

    def told() -> int:
        (assignment,) = world.plan().peers.values()
        (peer,) = assignment.peers
        return peer.data_parallel_size

    # A launcher that does not say it is believed to run what is asked for; what it says counts.
    assert told() == 2
    (name,) = world.leaders("prefill")
    world.engines[name.logical] = structs.replace(world.engines[name.logical], data_parallel_size=4)
    assert told() == 4


def test_ranks_of_follower_pods_are_named_by_their_addresses():
    wide = {"parallelism": {"data": 4, "nodes": 2}}
    world = SimulatedCluster(manifest(prefill=wide))
    world.step()
    world.run_pods()
    world.speak()
    (name,) = world.leaders("prefill")
    follower = next(p for p in world.pods.values() if p["metadata"]["name"] == name.pod(1))
    (peer,) = next(iter(world.plan().peers.values())).peers
    assert (peer.data_parallel_size, peer.follower_hosts) == (
        4, (follower["status"]["podIP"],),
    )  # fmt: skip
    assert isinstance(
        decode_peers(encode_json(next(iter(world.plan().peers.values())))), PeersDocument
    )
    # A pod without an address has no side channels yet: the engine is no peer.
    del follower["status"]["podIP"]
    assert next(iter(world.plan().peers.values())).peers == ()
    # One rank over both pods has its side channel in the leader's.
    world = SimulatedCluster(manifest(prefill={"parallelism": {"tensor": 4, "nodes": 2}}))
    world.step()
    world.run_pods()
    world.speak()
    assert next(iter(world.plan().peers.values())).peers[0].follower_hosts == ()


def test_a_ready_cluster_at_rest_needs_nothing():
    world = brought_up(prefill={"replicas": 2})
    assert world.condition("Ready")["status"] == "True"
    before = copy.deepcopy(world.cluster["status"])
    world.now += 3600
    plan = world.plan()
    assert plan.steps == ()
    assert plan.status == before
    assert (plan.requeue_after or 0) > DAY, "only new certificates are due one day"
    assert plan.events == ()


def test_an_edited_child_is_put_right():
    world = brought_up()
    (service,) = [
        c for (k, n), c in world.children.items() if (k, n) == ("Service", "llama-router")
    ]
    service["spec"]["ports"][0]["port"] = 81
    (step,) = world.plan().steps
    assert isinstance(step, Apply)
    assert step.manifest["metadata"]["name"] == "llama-router"


def test_a_field_that_is_no_longer_wanted_is_removed():
    template = {"spec": {"priorityClassName": "high"}}
    world = brought_up(router={"podTemplate": template})
    world.edit(router={})
    (step,) = world.plan().steps
    assert step.manifest["kind"] == "Deployment"
    assert "priorityClassName" not in step.manifest["spec"]["template"]["spec"]


def test_scaling_up_adds_and_scaling_down_removes_with_preconditions():
    world = brought_up()
    world.edit(decode={"replicas": 2})
    assert kinds(world.step()) == [
        ("WriteCertificates", "Secret"), ("Apply", "PodDisruptionBudget"),
        ("Apply", "Service"), ("Apply", "StatefulSet"),
    ]  # fmt: skip
    world.run_pods()
    world.edit(decode={"replicas": 1})
    plan = world.step()
    (gone,) = [step for step in plan.steps if isinstance(step, Delete)]
    assert gone.kind == "StatefulSet"
    assert gone.name.endswith("-1")
    assert gone.uid
    assert gone.resource_version
    # Its address goes when its last pod is gone. It counts no more.
    plan = world.step()
    assert plan.steps == ()
    assert plan.status["decode"] == "1/1"
    assert gone.name not in {engine["name"] for engine in plan.status["engines"]}
    world.reap()
    assert kinds(world.step()) == [("WriteCertificates", "Secret"), ("Delete", "Service")]


def test_a_change_of_decode_replaces_decode_alone_and_waits_for_the_old_to_go():
    world = brought_up(rollout={"type": "Recreate"})
    old = {name for kind, name in world.children if kind == "StatefulSet"}
    prefill = next(name for name in old if "prefill" in name)
    world.edit(decode={"engine": {"env": [{"name": "OMP_NUM_THREADS", "value": "2"}]}})
    world.step()  # it is tried out
    plan = world.step()
    assert [k for k in kinds(plan) if k[1] == "StatefulSet"] == [("Delete", "StatefulSet")]
    assert world.condition("Ready")["status"] == "False"
    # The old pod is still going: no new engine beside it.
    assert not [k for k in kinds(world.step()) if k[1] == "StatefulSet"]
    world.reap()
    plan = world.step()
    assert [k for k in kinds(plan) if k[1] == "StatefulSet"] == [("Apply", "StatefulSet")]
    now = {name for kind, name in world.children if kind == "StatefulSet"}
    assert prefill in now
    assert len(now - old) == 1


def test_a_change_of_the_block_size_replaces_both_roles_and_the_router():
    world = brought_up()
    old = set(world.children)
    world.edit(engine={"blockSize": 32})
    for _ in range(6):
        world.step()
        world.others_act()
    world.settle()
    assert {key for key in world.children if key[0] in ("StatefulSet", "Deployment")} & old == set()


def test_paused_keeps_the_old_engines():
    world = brought_up()
    old = {name for kind, name in world.children if kind == "StatefulSet"}
    world.edit(engine={"maxModelLen": 512}, rollout={"paused": True})
    world.settle()
    assert {name for kind, name in world.children if kind == "StatefulSet"} == old
    assert world.condition("Ready")["reason"] == "Paused"
    assert world.condition("Progressing")["reason"] == "Paused"


def test_a_refused_spec_touches_nothing_and_says_why():
    world = brought_up()
    children, peers = copy.deepcopy(world.children), world.plan().peers
    world.edit(decode={"engine": {"blockSize": 64}}, prefill={"engine": {"blockSize": 16}})
    plan = world.step()
    assert plan.steps == ()
    assert plan.peers == peers
    assert world.children == children
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "PrefixCachingHeterogeneousBlocks")
    assert "64" in accepted["message"]
    assert world.condition("PrefillReady")["status"] == "True"


def test_a_cluster_that_is_being_deleted_is_left_alone():
    world = brought_up()
    world.cluster["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    world.children.clear()
    plan = world.plan()
    assert plan.steps == ()
    assert plan.status == world.cluster["status"], "what it was until it went"


def test_objects_of_other_kinds_are_not_deleted():
    world = brought_up()
    metadata = {"name": "extra", "uid": "x", "resourceVersion": "1"}
    world.children["Secret", "extra"] = {"kind": "Secret", "metadata": metadata}
    assert world.plan().steps == ()


def test_what_is_being_deleted_is_not_deleted_again():
    world = brought_up()
    metadata = {"name": "extra", "uid": "x", "resourceVersion": "1", "namespace": "default"}
    world.children["Service", "extra"] = {"kind": "Service", "metadata": metadata}
    assert kinds(world.plan()) == [("Delete", "Service")]
    metadata["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    assert world.plan().steps == ()


def test_decode_engines_learn_their_peers_and_a_silent_one_keeps_its_place():
    world = SimulatedCluster(
        manifest(
            prefill={"replicas": 2}, model={"name": "tiny", "source": {"hostPath": {"path": "/m"}}}
        )
    )
    world.step()
    world.run_pods()
    assert world.step().peers == {}
    world.speak()
    (peer,) = world.step().peers.values()
    assert peer.model == "tiny"
    assert [entry.engine for entry in peer.peers] == [
        name.logical for name in world.leaders("prefill")
    ]
    silent = world.leaders("prefill")[0].logical
    del world.engines[silent]
    assert next(iter(world.plan().peers.values())) == peer
    world.speak()
    # One that starts for the first time is no peer yet; one that starts again stays one.
    starting = structs.replace(world.engines[world.leaders("prefill")[1].logical], ready=False)
    world.engines[starting.engine] = starting
    assert len(next(iter(world.plan().peers.values())).peers) == 1
    world.link()
    assert len(next(iter(world.plan().peers.values())).peers) == 2
    # A new incarnation is news.
    world.speak()
    world.engines[silent] = structs.replace(world.engines[silent], engine_id=f"{silent}/ffff")
    body = next(iter(world.plan().peers.values()))
    assert body.generation != peer.generation
    assert body.peers[0].engine_id == f"{silent}/ffff"


@pytest.mark.parametrize("given", [{}, {"hostPID": False}, {"hostPID": True}])
def test_a_router_that_waits_for_engines_ends_at_once(given):
    """As process 1 it would ignore SIGTERM for its whole grace period: it has no handler yet.

    With hostPID it is not process 1 either, and Kubernetes refuses both together.
    """
    world = SimulatedCluster(manifest(router={"podTemplate": {"spec": given}}))
    world.step()
    (pod,) = (
        child["spec"]["template"]["spec"]
        for (kind, _), child in world.children.items()
        if kind == "Deployment"
    )
    assert (pod.get("hostPID") is True) is not (pod.get("shareProcessNamespace") is True)


def test_no_router_means_no_router():
    world = SimulatedCluster(manifest(router={"replicas": 0}))
    plan = world.step()
    assert "Deployment" not in [kind for _, kind in kinds(plan)]
    assert plan.status["endpoint"] == ""
    world.run_pods()
    world.speak()
    world.link()
    world.settle()
    assert world.condition("Ready")["status"] == "True"


def engines(world):
    return {name for kind, name in world.children if kind == "StatefulSet"}


def test_a_change_of_the_router_alone_replaces_no_engine():
    world = brought_up()
    old = engines(world)
    world.edit(router={"replicas": 3, "resources": {"limits": {"memory": "4Gi"}}})
    plan = world.step()
    assert kinds(plan) == [("Apply", "PodDisruptionBudget"), ("Apply", "Deployment")]
    assert engines(world) == old


def test_an_engine_that_somebody_scaled_to_nothing_is_missing_its_pods():
    world = brought_up()
    key = next(key for key in world.children if key[0] == "StatefulSet" and "-decode-" in key[1])
    world.children[key]["spec"]["replicas"] = 0
    world.pods = {name: pod for name, pod in world.pods.items() if key[1] not in name}
    plan = world.step()
    assert [step.manifest["metadata"]["name"] for step in plan.steps] == [key[1]], "put right"
    condition = world.condition("DecodeReady")
    assert (condition["status"], condition["reason"]) == ("False", "PodsMissing")
    assert "0 of 1 pod so far" in condition["message"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_whose_statefulset_is_not_seen_serves_until_its_pods_end(replicas: int) -> None:
    """Somebody deletes it, or takes the label away by which the operator watches it."""
    world = brought_up(decode={"replicas": replicas})
    name = world.leaders("decode")[0]
    del world.children["StatefulSet", name.stateful_set]
    for _ in range(2):
        assert world.step().steps == ()
    assert world.condition("Available")["status"] == "True"
    world.pods[name.pod()]["metadata"]["deletionTimestamp"] = timestamp(world.now + 30)
    world.step()
    routers = [one for (kind, _), one in world.children.items() if kind == "Deployment"]
    assert name.api_url not in str([one["spec"] for one in routers])
    # Until its pods are gone, they find each other by it.
    assert ("Service", name.stateful_set) in world.children
    world.others_act()
    world.step()
    assert ("StatefulSet", name.stateful_set) in world.children
