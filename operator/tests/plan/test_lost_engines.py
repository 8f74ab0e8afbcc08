"""An engine whose node is gone is replaced under another index. One without StatefulSet serves."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from simulated_cluster import SimulatedCluster, brought_up

from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.plan.observed.pods import LOST_SECONDS
from pdcluster_operator.plan.rollout.fleet import choose_indexes


def indexes(world: SimulatedCluster, role: str = "prefill") -> list[int]:
    return sorted(name.index for name in world.leaders(role))


def lose(world: SimulatedCluster, name: str) -> None:
    """The node of a pod is gone: its pod was evicted, and nobody confirms that it ended."""
    world.pods[name]["metadata"]["deletionTimestamp"] = timestamp(world.now)
    world.pods[name]["metadata"]["finalizers"] = ["kept by a test"]


def later(world: SimulatedCluster) -> None:
    world.now += LOST_SECONDS + 1


def test_a_pod_that_is_terminating_for_ever_does_not_block_its_role() -> None:
    world = brought_up(prefill={"replicas": 2})
    lost = world.leaders("prefill")[0]
    lose(world, lost.pod())
    world.step()
    assert indexes(world) == [0, 1], "its grace period may not be over"
    assert world.condition("PrefillReady")["reason"] == "Draining"
    world.now += 59
    world.step()
    assert indexes(world) == [0, 1], "the kubelet has a minute to confirm that the pod ended"
    later(world)
    world.step()
    assert indexes(world) == [1, 2]
    world.run_pods()
    world.speak()
    world.step()
    world.link()
    world.route()
    world.settle()
    assert lost.pod() in world.pods, "the pod is still there"
    assert world.condition("Ready")["status"] == "True", world.condition("Ready")
    assert world.plan().steps == ()


def test_an_index_that_is_free_again_moves_no_engine() -> None:
    world = brought_up(prefill={"replicas": 2})
    lost = world.leaders("prefill")[0]
    lose(world, lost.pod())
    later(world)
    world.step()
    del world.pods[lost.pod()]  # somebody removed the node
    world.settle()
    assert indexes(world) == [1, 2]
    world.edit(prefill={"replicas": 3})
    world.settle()
    assert indexes(world) == [0, 1, 2]


def test_a_lost_engine_of_another_revision_does_not_block_the_new_one() -> None:
    world = brought_up(rollout={"type": "Recreate"})
    old = world.leaders("decode")[0]
    world.edit(decode={"engine": {"maxModelLen": 128}})
    world.step()  # it is tried out
    world.step()
    assert world.leaders("decode") == [], "the old one has to go first"
    later(world)
    world.pods[old.pod()]["metadata"]["deletionTimestamp"] = timestamp(world.now - LOST_SECONDS - 1)
    world.step()
    [new] = world.leaders("decode")
    assert new.revision != old.revision
    assert old.pod() in world.pods


def test_no_engine_waits_for_a_router_that_is_lost() -> None:
    """A router that ends may still have streams. One whose node is gone has none."""
    world = brought_up(decode={"replicas": 2})
    [deployment] = [child for (kind, _), child in world.children.items() if kind == "Deployment"]
    world.pods["a-router"] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "a-router",
            "namespace": "default",
            "uid": "a-router",
            "labels": deployment["metadata"]["labels"],
        },
        "spec": deployment["spec"]["template"]["spec"],
        "status": {"phase": "Running"},
    }
    lose(world, "a-router")
    world.edit(decode={"replicas": 1})
    for _ in range(3):
        world.step()
    assert indexes(world, "decode") == [0, 1]
    later(world)
    world.step()
    assert indexes(world, "decode") == [0]


def test_one_lost_pod_of_several_takes_its_engine_with_it() -> None:
    world = brought_up(prefill={"parallelism": {"tensor": 4, "nodes": 2}})
    lost = world.leaders("prefill")[0]
    lose(world, lost.pod(1))
    later(world)
    world.step()
    assert indexes(world) == [1]


@given(
    replicas=st.integers(0, 6),
    live=st.sets(st.integers(0, 9), max_size=6),
    lost=st.sets(st.integers(0, 9), max_size=4),
)
def test_the_indexes_are_enough_stable_and_never_lost(replicas, live, lost) -> None:
    chosen = choose_indexes(replicas, live, lost)
    assert len(chosen) == len(set(chosen)) == replicas
    assert not lost & set(chosen)
    kept = live - lost
    assert kept & set(chosen) == set(sorted(kept)[:replicas]), "no engine goes without need"
    assert list(choose_indexes(replicas, chosen, lost)) == list(chosen), "and none comes and goes"


def test_of_too_many_engines_those_with_the_highest_indexes_go() -> None:
    assert choose_indexes(1, (9, 1)) == [1]
    assert choose_indexes(2, (17, 9, 1)) == [1, 9]


def test_a_lost_engine_of_another_revision_goes_although_no_new_one_runs_yet() -> None:
    """One that only stopped may be back in a moment. This one comes back nowhere."""
    world = brought_up(rollout={"type": "Surge"})
    [old] = world.leaders("decode")
    world.edit(engine={"blockSize": 32})
    for _ in range(3):
        world.step()
        world.make_pods()  # the new engines never start
    lose(world, old.pod())
    world.step()
    assert old in world.leaders("decode")
    later(world)
    world.step()
    assert old not in world.leaders("decode")
    assert len(world.leaders("decode")) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engines_wait_for_routers_also_when_one_has_lost_its_statefulset(role: str) -> None:
    """Somebody deleted it with ``--cascade orphan``, and its pods serve on."""
    world = brought_up(prefill={"replicas": 2}, decode={"replicas": 2})
    before = world.plan().routed
    assert len(before) == 4
    orphan = world.leaders(role)[0]
    del world.children["StatefulSet", orphan.stateful_set]
    assert world.plan().routed == before
    plan = world.settle()
    [routers] = [one for (kind, _), one in world.children.items() if kind == "Deployment"]
    assert orphan.api_url in str(routers["spec"]["template"])
    assert plan.routed == before
