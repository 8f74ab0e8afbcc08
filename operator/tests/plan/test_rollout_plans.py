"""Rollouts through the whole planner: engines, links, routers and the Service."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from simulated_cluster import SimulatedCluster, brought_up, copied

from pdcluster_connector.protocol.launcher_documents import EngineState, LinkState
from pdcluster_operator.api.conditions import StatusReason, find_condition, timestamp
from pdcluster_operator.api.object_names import PAIRING_LABEL, engine_of
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.rollout.moves import MAKE_ROOM
from pdcluster_operator.plan.types import Place

ENV = {"decode": {"engine": {"env": [{"name": "A", "value": "2"}]}}}
KEY = {"engine": {"blockSize": 32}}


def up(how: str, **spec: Any) -> SimulatedCluster:
    world = brought_up(rollout={"type": how}, **spec)
    assert world.condition("Ready")["status"] == "True"
    return world


def engines(world: SimulatedCluster) -> set[str]:
    return {name for kind, name in world.children if kind == "StatefulSet"}


def selector(world: SimulatedCluster) -> str:
    return world.children["Service", "llama-router"]["spec"]["selector"][PAIRING_LABEL]


def routers(world: SimulatedCluster) -> dict[str, str]:
    """Return the engines that each set of routers knows, by pairing key."""
    return {
        child["metadata"]["labels"][PAIRING_LABEL]: " ".join(
            child["spec"]["template"]["spec"]["containers"][0]["args"]
        )
        for (kind, _), child in world.children.items()
        if kind == "Deployment"
    }


def go_on(world: SimulatedCluster, rounds: int = 30) -> None:
    """Let pods start, links come and routers follow, until nothing changes."""
    for _ in range(rounds):
        before = (set(world.children), set(world.pods))
        plan = world.step()
        assert world.condition("Available")["status"] == "True", world.condition("Available")
        assert_served(world)
        world.others_act()
        if not plan.steps and before == (set(world.children), set(world.pods)):
            return
    raise AssertionError("it does not end")


def assert_served(world: SimulatedCluster) -> None:
    """The Service selects routers, and no engine that they know is being removed."""
    known = routers(world)[selector(world)]
    words = [word for word in known.split() if word.startswith("http://")]
    assert words
    for word in words:
        pod = word.removeprefix("http://").partition(".")[0]
        metadata = world.pods.get(pod, {"metadata": {}})["metadata"]
        assert not metadata.get("deletionTimestamp"), f"{pod} is still routed"


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("change", [ENV, KEY])
def test_surge_serves_all_the_time_and_ends_with_the_new_engines(
    replicas: int, change: dict[str, Any]
) -> None:
    sides = {role: {"replicas": replicas} for role in ("prefill", "decode")}
    world = up("Surge", **sides)
    old, key = engines(world), selector(world)
    world.edit(**{**change, "decode": {**sides["decode"], **change.get("decode", {})}})
    go_on(world)
    now = engines(world)
    assert len(now) == 2 * replicas
    assert len(now - old) == (replicas if change is ENV else 2 * replicas)
    assert (selector(world) == key) is (change is ENV)
    assert list(routers(world)) == [selector(world)]
    assert world.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("how", ["Surge", "Replace", "Recreate"])
def test_engines_join_the_routers_when_they_are_verified_and_leave_them_first(how: str) -> None:
    world = up(how)
    for sizes in ((2, 3), (1, 2), (3, 1), (1, 1)):
        wanted = dict(zip(("prefill", "decode"), sizes, strict=True))
        world.edit(**{role: {"replicas": count} for role, count in wanted.items()})
        go_on(world)
        known = routers(world)[selector(world)]
        for role, count in wanted.items():
            assert known.count(f"--{role} ") == count
        assert len(engines(world)) == sum(sizes)


def test_an_engine_that_is_not_verified_stays_out_of_the_routers() -> None:
    world = up("Recreate")
    before = routers(world)
    world.edit(decode={"replicas": 2})
    for _ in range(3):
        world.step()
        world.run_pods()
        world.speak()
        assert routers(world) == before
    world.link()
    world.step()
    assert routers(world)[selector(world)].count("--decode ") == 2
    assert world.condition("Ready")["reason"] == "RouterReplacing", "routers hear of it only now"


def test_an_engine_that_restarts_stays_with_the_routers() -> None:
    """Otherwise their pods would be replaced twice."""
    world = up("Recreate", decode={"replicas": 2})
    before = routers(world)
    first = next(name for name in world.engines if ".decode." in name)
    world.engines[first] = structs.replace(world.engines[first], ready=False, state="Starting")
    world.links.pop(first)
    world.step()
    assert world.condition("Ready")["status"] == "False"
    assert routers(world) == before


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_that_is_evicted_leaves_the_routers_if_another_one_serves(replicas: int) -> None:
    world = up("Recreate", decode={"replicas": replicas})
    before = routers(world)
    first = min(name for name in world.pods if "-decode-" in name)
    world.pods[first]["metadata"]["deletionTimestamp"] = timestamp(world.now + 2000)
    world.step()
    known = routers(world)[selector(world)]
    assert (first in known) is (replicas == 1)
    world.reap()
    del world.links[next(name for name in world.links if name.endswith(".0"))]
    world.run_pods()
    world.step()
    assert routers(world)[selector(world)] == known, "it is not verified yet"
    world.link()
    world.step()
    assert routers(world) == before


def test_a_drain_of_nodes_evicts_every_engine_and_clients_always_reach_some() -> None:
    """The budgets let the second engine go when the pod of the first is ready again.

    That may be before the first is verified. The second serves until it gets no more requests, so
    the routers keep it until then.
    """
    world = up("Recreate", prefill={"replicas": 2}, decode={"replicas": 2})
    before = {name: pod["metadata"]["uid"] for name, pod in world.pods.items()}
    everybody = routers(world)
    first, second = (
        [next(name for name in world.pods if f"-{role}-" in name and name.endswith(f"-{index}-0"))
         for role in ("prefill", "decode")]
        for index in (0, 1)
    )  # fmt: skip

    def known() -> str:
        return routers(world)[selector(world)]

    evict(world, first)
    world.step()
    assert not any(name in known() for name in first)
    assert all(name in known() for name in second)
    world.route()
    world.reap()
    world.run_pods()
    world.speak()  # the first ones are ready, and not linked yet
    world.links.clear()
    evict(world, second)
    world.step()
    assert all(name in known() for name in second), "nobody else serves"
    assert not any(name in known() for name in first), "they are not verified yet"
    world.link()
    world.step()
    assert all(name in known() for name in first)
    assert not any(name in known() for name in second)
    world.route()
    world.others_act()
    world.settle()
    world.route()
    world.settle()
    assert routers(world) == everybody
    assert world.condition("Ready")["status"] == "True"
    assert not set(before.values()) & {pod["metadata"]["uid"] for pod in world.pods.values()}


def test_an_engine_that_is_evicted_serves_on_until_no_router_knows_it() -> None:
    world = up("Recreate", decode={"replicas": 2})
    pod = min(name for name in world.pods if "-decode-" in name)
    engine = engine_of(world.pods[pod])
    assert engine is not None
    assert engine.logical in world.plan().routed
    evict(world, [pod])
    assert engine.logical in world.step().routed
    assert pod not in routers(world)[selector(world)]
    [deployment] = [child for (kind, _), child in world.children.items() if kind == "Deployment"]
    deployment["status"] = {"availableReplicas": 1, "updatedReplicas": 0}
    assert engine.logical in world.plan().routed, "the routers that know it still run"
    world.route()
    assert engine.logical not in world.plan().routed


@pytest.mark.parametrize("change", [{"decode": {"replicas": 1}}, ENV])
def test_an_engine_that_is_evicted_while_it_leaves_stays_until_no_router_knows_it(
    change: dict[str, Any],
) -> None:
    """Once its StatefulSet is gone, it waits for no router any more."""
    world = up("Surge", decode={"replicas": 2})
    old = engines(world)
    world.edit(**change)
    for _ in range(20):
        before = routers(world)
        world.step()
        gone = [
            name
            for name, pod in world.pods.items()
            if engine_of(pod).api_url in before[selector(world)]
            and engine_of(pod).api_url not in routers(world)[selector(world)]
        ]
        if gone:
            break
        world.others_act()
    [deployment] = [child for (kind, _), child in world.children.items() if kind == "Deployment"]
    deployment["status"] = {"availableReplicas": 1, "updatedReplicas": 0}
    evict(world, gone)
    world.step()
    world.step()
    assert engines(world) >= old, "the routers that know it still run"
    world.route()
    world.step()
    assert not engines(world) >= old


def test_the_only_engine_of_a_role_waits_for_no_router() -> None:
    """No router forgets it, because no other one could serve."""
    world = up("Recreate", decode={"replicas": 2})
    assert world.plan().routed == {engine.logical for engine in world.leaders("decode")}


def test_an_engine_that_the_operator_removes_waits_for_no_router() -> None:
    world = up("Recreate", prefill={"replicas": 2}, decode={"replicas": 2})
    old = {engine.logical for role in ("prefill", "decode") for engine in world.leaders(role)}
    assert world.plan().routed == old
    world.edit(**KEY)
    for _ in range(2):
        world.step()
    assert not engines(world)
    assert world.pods, "they drain"
    assert not world.plan().routed & old


def evict(world: SimulatedCluster, pods: list[str]) -> None:
    """Let pods end. Their launchers say that they drain."""
    for name in pods:
        pod = world.pods[name]
        pod["metadata"]["deletionTimestamp"] = timestamp(world.now + 2000)
        engine = engine_of(pod)
        assert engine is not None
        report = world.engines[engine.logical]
        world.engines[engine.logical] = structs.replace(report, ready=False, state="Draining")


@pytest.mark.parametrize("how", ["Surge", "Replace", "Recreate"])
def test_the_last_verified_engine_is_not_too_many(how: str) -> None:
    """Decode 0 is broken. It is the one to stay, and the other one serves until it works."""
    world = up(how, decode={"replicas": 2})
    first = min(name for name in world.engines if ".decode." in name)
    world.engines[first] = structs.replace(world.engines[first], ready=False, state="Starting")
    report = world.links.pop(first)
    world.edit(decode={"replicas": 1})
    for _ in range(3):
        world.step()
        world.route()
    assert len(engines(world)) == 3
    world.speak()
    world.links[first] = report
    go_on(world)
    assert len(engines(world)) == 2


def test_engines_of_two_keys_are_never_linked() -> None:
    world = up("Surge")
    world.edit(**KEY)
    for _ in range(3):
        world.step()
        world.run_pods()
        world.speak()
    keys = {child["metadata"]["labels"][PAIRING_LABEL] for child in world.pods.values()
            if engine_of(child)}  # fmt: skip
    assert len(keys) == 2
    for reader, document in world.plan().peers.items():
        (peer,) = document.peers
        decode, prefill = reader.split("."), peer.engine.split(".")
        key = {
            engine_of(pod).revision: pod["metadata"]["labels"][PAIRING_LABEL]
            for pod in world.pods.values()
            if engine_of(pod)
        }
        assert key[decode[-2]] == key[prefill[-2]]


def test_old_engines_stay_until_the_pods_of_their_routers_are_gone() -> None:
    """The Deployment is gone a moment before its pods begin to end."""
    world = up("Surge")
    old = engines(world)
    [deployment] = [child for (kind, _), child in world.children.items() if kind == "Deployment"]
    metadata = {"name": "a-router", "namespace": "default", "uid": "a-router"}
    world.pods["a-router"] = {
        "metadata": {**metadata, "labels": deployment["metadata"]["labels"]},
        "spec": deployment["spec"]["template"]["spec"],
        "status": {"phase": "Running"},
    }
    world.edit(**KEY)
    for _ in range(10):
        world.step()
        world.others_act()
    assert len(routers(world)) == 1
    assert len(engines(world)) == 4
    assert old < engines(world)
    del world.pods["a-router"]
    go_on(world)
    assert not engines(world) & old


@pytest.mark.parametrize("trouble", ["deleted", "another selector"])
@pytest.mark.parametrize("how", ["Surge", "Replace"])
def test_a_service_that_somebody_breaks_comes_back_to_the_engines_that_serve(
    how: str, trouble: str
) -> None:
    world = up(how, prefill={"replicas": 2}, decode={"replicas": 2})
    key = selector(world)
    world.edit(**KEY)
    for _ in range(4):
        world.step()
        world.make_pods()  # of the new engines no pod starts yet
    before = engines(world)
    if trouble == "deleted":
        del world.children["Service", "llama-router"]
    else:
        world.children["Service", "llama-router"]["spec"]["selector"][PAIRING_LABEL] = "nobody"
    for _ in range(6):
        world.step()
        assert selector(world) == key
        assert key in routers(world)
        assert engines(world) == before
    world.others_act()
    go_on(world)
    assert selector(world) != key


def test_a_router_that_is_asked_for_in_the_middle_begins_with_the_engines_that_serve() -> None:
    world = up("Surge", router={"replicas": 0})
    world.edit(**KEY)
    world.step()
    before = engines(world)
    world.edit(router={"replicas": 1})
    for _ in range(4):
        world.step()
        assert before <= engines(world)
    world.others_act()
    go_on(world)
    assert len(engines(world) & before) == 0


@pytest.mark.parametrize("what", ["restarts", "is evicted"])
def test_an_old_engine_that_comes_back_outlives_a_rollout_that_is_stuck(what: str) -> None:
    world = up("Surge")
    world.edit(**KEY)
    for _ in range(3):
        world.step()
        world.make_pods()  # the new engines never start: a bad image, say
    [old] = [
        name
        for name in world.pods
        if world.pods[name]["status"]["phase"] == "Running" and "decode" in name
    ]
    before = engines(world)
    pod = world.pods[old]
    if what == "restarts":  # once, and the kubelet starts it again
        ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
        pod["status"]["containerStatuses"] = [{"name": "engine", "restartCount": 1, "state": ended}]
    else:  # its StatefulSet makes it again elsewhere
        pod["metadata"]["deletionTimestamp"] = timestamp(world.now + 30)
    world.step()
    world.step()
    assert engines(world) == before, "only this engine can serve again"


@pytest.mark.parametrize("replicas", [2, 20])
@pytest.mark.parametrize("how", ["Surge", "Replace"])
def test_engines_that_nobody_hears_for_a_moment_are_not_deleted(how: str, replicas: int) -> None:
    """As when the control plane is cut off from the nodes: clients may still be served.

    The status has no place for all of many engines.
    """
    world = up(how, prefill={"replicas": replicas}, decode={"replicas": replicas})
    world.edit(**KEY)
    for _ in range(3):
        world.step()
        world.make_pods()  # of the new engines no pod starts yet
    before = engines(world)
    for pod in world.pods.values():
        pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.engines.clear()
    world.step()
    assert engines(world) == before


def test_replace_holds_while_nobody_knows_whether_the_only_pair_serves() -> None:
    """The operator cannot reach the launchers. Clients may reach the engines."""
    world = up("Replace")
    before = engines(world)
    world.engines.clear()
    world.links.clear()
    world.edit(**KEY)
    for _ in range(3):
        world.step()
    assert engines(world) == before
    assert world.condition("Progressing")["reason"] == StatusReason.INSUFFICIENT_CAPACITY


def test_the_service_stays_if_the_new_pair_dies_before_it_moves() -> None:
    world = up("Surge")
    old, key = engines(world), selector(world)
    world.edit(**KEY)
    while len(routers(world)) == 1:
        world.step()
        world.run_pods()
        world.speak()
        world.link()
    world.route()
    [new] = [n for n in world.pods if "-prefill-" in n and n.rpartition("-")[0] not in old]
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    running = world.pods[new]["status"]["containerStatuses"]
    world.pods[new]["status"]["containerStatuses"] = [{"name": "engine", "state": ended}]
    for _ in range(3):
        world.step()
        assert selector(world) == key, "a verified pair stands behind these routers"
        assert engines(world) >= old
        assert world.condition("Available")["status"] == "True"
    world.pods[new]["status"]["containerStatuses"] = running
    go_on(world)
    assert selector(world) != key
    assert not engines(world) & old


def test_replace_rolls_two_engines_of_each_role_without_another_gpu() -> None:
    world = up("Replace", prefill={"replicas": 2}, decode={"replicas": 2})
    old = engines(world)
    world.edit(**KEY)
    for _ in range(40):
        world.step()
        assert len(engines(world)) <= 4
        assert_served(world)
        world.others_act()
    assert not engines(world) & old
    assert len(engines(world)) == 4
    assert world.condition("Ready")["status"] == "True"


def test_a_change_is_no_outage_unless_the_user_asks_for_one() -> None:
    world = brought_up()
    old = engines(world)
    world.edit(**KEY)
    go_on(world)
    assert not engines(world) & old


@pytest.mark.parametrize("how", ["Surge", "Replace", "Recreate"])
def test_another_type_of_rollout_alone_changes_nothing(how: str) -> None:
    """So an object that has the default of an older CRD is no change, nor is one without a type."""
    world = up("Recreate")
    world.edit(rollout={"type": how})
    assert world.plan().steps == ()
    world.edit(rollout={})
    assert world.plan().steps == ()


@pytest.mark.parametrize("how", ["Surge", "Replace", "Recreate"])
def test_a_paused_rollout_takes_no_router_and_no_engine_away(how: str) -> None:
    world = up(how, decode={"replicas": 2})
    before = (engines(world), routers(world), selector(world))
    world.edit(rollout={"type": how, "paused": True}, **KEY)
    for _ in range(3):
        assert world.step().steps == ()
        world.others_act()
    assert (engines(world), routers(world), selector(world)) == before
    assert world.condition("Available")["status"] == "True"


def test_a_surge_that_is_paused_half_way_keeps_its_routers_also_as_recreate() -> None:
    """Recreate ends all routers before it removes engines. It may not while it is paused."""
    world = up("Surge", decode={"replicas": 2})
    old = engines(world)
    world.edit(decode={**ENV["decode"], "replicas": 2})
    while not engines(world) - old:
        world.step()
        world.others_act()
    world.edit(rollout={"type": "Recreate", "paused": True})
    there = engines(world)
    assert old < there
    for _ in range(3):
        world.step()
        assert_served(world)
        [router] = [child for (kind, _), child in world.children.items() if kind == "Deployment"]
        assert router["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
        world.others_act()
    assert engines(world) == there


def test_recreate_ends_old_routers_so_that_old_engines_get_no_more_requests() -> None:
    """An engine that is told to end serves on as long as requests come."""
    world = up("Recreate")
    old = engines(world)

    def unavailable() -> object:
        [router] = [child for (kind, _), child in world.children.items() if kind == "Deployment"]
        return router["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"]

    assert unavailable() == 0
    world.edit(**ENV)
    while engines(world) >= old:
        assert unavailable() == 0
        world.step()
    assert unavailable() == "100%"
    for _ in range(30):
        world.others_act()
        world.step()
    assert world.condition("Ready")["status"] == "True"
    assert len(engines(world) - old) == 1
    assert unavailable() == 0


@pytest.mark.parametrize("how", ["Surge", "Replace", "Recreate"])
def test_at_each_moment_of_a_rollout_one_engine_of_a_role_may_be_evicted(how: str) -> None:
    """Each engine has one pod. One that is missing counts as one that was evicted."""
    world = up(how, prefill={"replicas": 2}, decode={"replicas": 3})
    old = engines(world)
    world.edit(**KEY)
    still = 0
    for _ in range(60):
        before = copied((world.children, world.pods))
        plan = world.step()
        for role, replicas in (("prefill", 2), ("decode", 3)):
            there = sum(f"-{role}-" in name for name in engines(world))
            budget = world.children["PodDisruptionBudget", f"llama-{role}"]["spec"]
            assert budget["minAvailable"] == max(there, replicas) - 1
        world.others_act()
        still = 0 if plan.steps or before != (world.children, world.pods) else still + 1
        if still == 5:
            break
    assert not engines(world) & old
    assert world.condition("Ready")["status"] == "True"


def test_replace_holds_with_one_engine_of_a_role_and_says_why() -> None:
    world = up("Replace")
    old = engines(world)
    world.edit(**KEY)
    for _ in range(4):
        world.step()
    assert engines(world) == old
    said = world.condition("Progressing")
    assert (said["status"], said["reason"]) == ("False", StatusReason.INSUFFICIENT_CAPACITY)
    assert "no verified pair would be left" in said["message"]
    assert world.condition("Available")["status"] == "True"
    # With spare GPUs it goes on.
    world.edit(rollout={"type": "Surge"})
    go_on(world)
    assert not engines(world) & old


def test_replace_goes_on_where_no_pair_ever_served() -> None:
    world = up("Replace")
    world.link(state=LinkState.FAILED)
    old = engines(world)
    world.edit(**KEY)
    for _ in range(4):
        world.step()
        world.route()
        world.reap()
    assert not engines(world) & old, "nothing is lost without them"


def test_the_service_moves_at_once_when_nothing_is_left_behind_it() -> None:
    world = up("Surge")
    old, key = engines(world), selector(world)
    world.edit(**KEY)
    while engines(world) == old:
        world.step()
    assert selector(world) == key, "the new engines are not verified"
    for name in old:
        del world.children["StatefulSet", name]
    world.pods.clear()
    world.step()
    assert selector(world) != key
    assert list(routers(world)) == [selector(world)]


NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
NO_SUCH_NODE = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."


def no_node(world: SimulatedCluster, old: set[str], words: str) -> None:
    """Let the scheduler find no node for the new decode engines. All others run."""
    world.others_act()
    for name, pod in world.pods.items():
        engine = engine_of(pod)
        if engine is not None and engine.role == "decode" and engine.stateful_set not in old:
            scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            world.pods[name]["status"] = {"conditions": [{**scheduled, "message": words}]}
            world.engines.pop(engine.logical, None)
            world.links.pop(engine.logical, None)


@pytest.mark.parametrize(
    "words",
    [
        NO_GPU,
        "0/3 nodes are available: 3 Too many pods.",
        "0/3 nodes are available: 3 node(s) didn't have free ports for the requested pod ports.",
        "0/3 nodes are available: 3 node(s) didn't match pod anti-affinity rules.",
        "3 node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode",
    ],
)
def test_a_surge_without_room_names_the_other_types(words: str) -> None:
    """All that a scheduler says of what other pods hold. The old engines are such pods."""
    world = up("Surge")
    old = engines(world)
    world.edit(**ENV)
    for _ in range(3):
        world.step()
        no_node(world, old, words)
    world.step()
    said = world.condition("Progressing")["message"]
    assert words in said
    assert "set rollout.type to Replace" in said
    assert "or to Recreate" in said


@pytest.mark.parametrize(("gate", "room"), [("kueue.x-k8s.io/admission", True), ("a/b", False)])
def test_a_surge_that_waits_in_a_queue_names_the_other_types(gate: str, room: bool) -> None:
    """The old engines hold what the queue may use. Of other gates nobody knows that."""
    world = up("Surge")
    old = engines(world)
    world.edit(**ENV)
    for _ in range(3):
        world.step()
        no_node(world, old, "Scheduling is blocked due to non-empty scheduling gates")
        for pod in world.pods.values():
            if engine_of(pod) is not None and "podIP" not in pod["status"]:
                pod["spec"]["schedulingGates"] = [{"name": gate}]
    world.step()
    said = world.condition("Progressing")
    assert (said["status"], said["reason"]) == ("True", StatusReason.REPLACING)
    assert "decode" in said["message"]
    assert ("set rollout.type to Replace" in said["message"]) is room


def test_a_surge_whose_pods_are_never_made_names_the_other_types_when_it_gives_up() -> None:
    """As when a quota has room for the engine of one role, and each is tried out by itself."""
    world = up("Surge")
    world.edit(**ENV)
    for _ in range(3):
        world.step()
    said = world.condition("Progressing")
    assert "0 of 1 pod so far" in said["message"]
    assert MAKE_ROOM not in said["message"], "they may be on their way"
    world.now += 4000
    world.step()
    said = world.condition("Progressing")
    assert said["reason"] == StatusReason.PROGRESS_DEADLINE_EXCEEDED
    assert said["message"].endswith(MAKE_ROOM)
    assert world.condition("Available")["status"] == "True"


def test_surge_that_gets_no_gpu_gives_up_and_the_old_engines_serve() -> None:
    world = up("Surge")
    old = engines(world)
    world.edit(**ENV)
    for _ in range(3):
        world.step()
        no_node(world, old, NO_GPU)
    world.step()
    progressing = world.condition("Progressing")
    assert progressing["status"] == "True"
    assert NO_GPU in progressing["message"]
    assert progressing["message"].endswith(MAKE_ROOM)
    world.now += 4000
    world.step()
    progressing = world.condition("Progressing")
    assert progressing["reason"] == StatusReason.PROGRESS_DEADLINE_EXCEEDED
    assert NO_GPU in progressing["message"]
    assert progressing["message"].endswith(MAKE_ROOM)
    assert world.condition("Available")["status"] == "True"
    assert old < engines(world)
    assert_served(world)


def test_what_gets_no_gpu_is_told_although_engines_of_the_other_role_wait_for_it() -> None:
    world = up("Surge", prefill={"replicas": 2}, decode={"replicas": 2})
    old = engines(world)
    world.edit(**KEY)
    for _ in range(8):
        world.step()
        no_node(world, old, NO_GPU)
    world.step()
    assert world.condition("PrefillReady")["reason"] == StatusReason.PODS_MISSING
    ready, progressing = world.condition("Ready"), world.condition("Progressing")
    assert ready["reason"] == StatusReason.UNSCHEDULABLE
    assert NO_GPU in ready["message"]
    assert NO_GPU in progressing["message"]
    assert "Make room" in progressing["message"]
    world.now += 4000
    world.step()
    progressing = world.condition("Progressing")
    assert progressing["reason"] == StatusReason.PROGRESS_DEADLINE_EXCEEDED
    assert NO_GPU in progressing["message"]
    assert "Make room" in progressing["message"]


def test_where_no_room_would_help_nobody_is_told_to_make_some() -> None:
    """With Recreate the old engines would go, and the new ones still find no node."""
    world = up("Surge")
    old = engines(world)
    world.edit(**ENV)
    for moment in (0, 4000):
        for _ in range(3):
            world.step()
            no_node(world, old, NO_SUCH_NODE)
        world.now += moment
        world.step()
        progressing = world.condition("Progressing")
        assert NO_SUCH_NODE in progressing["message"]
        assert "rollout.type" not in progressing["message"]
    assert progressing["reason"] == StatusReason.PROGRESS_DEADLINE_EXCEEDED
    assert world.condition("Available")["status"] == "True"


def test_only_a_surge_is_told_of_the_other_types() -> None:
    """With Replace, an old engine has made room already."""
    world = up("Replace", decode={"replicas": 2})
    old = engines(world)
    world.edit(decode={**ENV["decode"], "replicas": 2})
    for _ in range(4):
        world.step()
        no_node(world, old, NO_GPU)
    world.step()
    assert len(engines(world) - old) == 1
    said = world.condition("Progressing")
    assert (said["status"], said["reason"]) == ("True", StatusReason.REPLACING)
    assert NO_GPU in said["message"]
    assert "rollout.type" not in said["message"]


def test_a_pause_stops_a_rollout_where_it_is() -> None:
    world = up("Surge", decode={"replicas": 2})
    world.edit(decode={"replicas": 2, **ENV["decode"]})
    for _ in range(2):
        world.step()
    half = engines(world)
    assert len(half) == 4
    world.edit(rollout={"type": "Surge", "paused": True})
    for _ in range(5):
        world.run_pods()
        world.speak()
        world.link()
        world.step()
        world.route()
    assert engines(world) == half
    assert_served(world)
    world.edit(rollout={"type": "Surge"})
    go_on(world)
    assert len(engines(world)) == 3


def half_way(change: dict[str, Any], rounds: int) -> tuple[SimulatedCluster, dict[str, Any]]:
    """A surge of three engines of each role after some rounds; and the spec without its pause."""
    sides = {role: {"replicas": 3} for role in ("prefill", "decode")}
    world = up("Surge", **sides)
    spec = {**sides, **change, "decode": {**sides["decode"], **change.get("decode", {})}}
    world.edit(**spec)
    for _ in range(rounds):
        world.step()
        world.others_act()
    world.edit(rollout={"type": "Surge", "paused": True})
    return world, spec


def served(world: SimulatedCluster, role: str) -> int:
    """How many engines of a role stand behind the Service."""
    return routers(world)[selector(world)].split().count(f"--{role}")


@pytest.mark.sampled
@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("rounds", range(1, 7))
@pytest.mark.parametrize("change", [ENV, KEY], ids=["env", "key"])
def test_a_rollout_that_is_paused_half_way_still_scales(
    change: dict[str, Any], rounds: int, replicas: int
) -> None:
    world, spec = half_way(change, rounds)
    go_on(world)
    paused, key = engines(world), selector(world)
    for _ in range(3):
        assert world.step().steps == ()
        world.others_act()
    sides = {role: {**spec[role], "replicas": replicas} for role in ("prefill", "decode")}
    world.edit(**sides)
    go_on(world)
    assert selector(world) == key, "the Service stays where it is"
    for role in sides:
        there = len(world.leaders(role))
        unserved = sum(key not in str(world.children["StatefulSet", name.stateful_set]["metadata"])
                       for name in world.leaders(role))  # fmt: skip
        assert there <= replicas + 1, "they have GPUs for one more"
        assert there == replicas + 1 or served(world, role) == replicas
        assert served(world, role) == there - unserved >= min(replicas, replicas + 1 - unserved)
    revisions = {name.rpartition("-")[0] for name in engines(world)}
    assert revisions <= {name.rpartition("-")[0] for name in paused}, "of none that did not run"
    world.edit(rollout={"type": "Surge"})
    go_on(world)
    assert world.condition("Ready")["status"] == "True"
    assert len(engines(world)) == 2 * replicas


def test_a_new_revision_that_does_not_work_is_not_what_a_paused_rollout_scales_with() -> None:
    world = up("Surge")
    old = engines(world)
    world.edit(**ENV)
    for _ in range(3):
        world.step()
    [broken] = engines(world) - old
    world.edit(rollout={"type": "Surge", "paused": True}, decode={**ENV["decode"], "replicas": 3})
    for _ in range(9):
        world.step()
        world.others_act()
        world.links.pop(
            next(n.logical for n in world.leaders("decode") if n.stateful_set == broken)
        )
    assert served(world, "decode") == 3
    assert len(world.leaders("decode")) == 4
    assert len({name.revision for name in world.leaders("decode")}) == 2


def test_available_is_about_the_pair_that_the_service_reaches() -> None:
    """Half-way between two pairing keys, the other pair is verified and has routers that run."""
    world = up("Surge")
    key = selector(world)
    old = [*world.leaders("prefill"), *world.leaders("decode")]
    world.edit(**KEY)
    while len(routers(world)) == 1:
        world.step()
        world.others_act()
    world.edit(rollout={"type": "Surge", "paused": True})
    world.step()
    assert world.condition("Available")["status"] == "True"
    for name in old:
        world.engines[name.logical] = structs.replace(
            world.engines[name.logical], ready=False, state=EngineState.FAILED
        )
    world.step()
    assert selector(world) == key
    for kind in ("Available", "Ready"):
        assert world.condition(kind)["status"] == "False", kind
    assert world.condition("Available")["reason"] == StatusReason.NO_VERIFIED_PAIR
    world.others_act()
    assert world.step().steps == ()
    assert world.condition("Available")["status"] == "True"


def test_available_asks_for_the_routers_that_the_service_reaches() -> None:
    world = up("Surge")
    key = selector(world)
    world.edit(**KEY)
    while len(routers(world)) == 1:
        world.step()
        world.others_act()
    world.edit(rollout={"type": "Surge", "paused": True})
    world.children["Deployment", f"llama-router-{key}"]["status"] = {}
    world.step()
    assert world.condition("Available")["reason"] == StatusReason.ROUTER_UNAVAILABLE


def assert_no_router_mixes_keys(world: SimulatedCluster) -> None:
    for key, known in routers(world).items():
        for name in (*world.leaders("prefill"), *world.leaders("decode")):
            labels = world.children["StatefulSet", name.stateful_set]["metadata"]["labels"]
            assert name.api_url not in known.split() or labels[PAIRING_LABEL] == key


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("how", "held"), [("Surge", "refused"), ("Replace", "paused"), ("Recreate", "refused")]
)
@pytest.mark.parametrize("roles", [("prefill",), ("prefill", "decode")])
@pytest.mark.parametrize("rounds", range(1, 5))
def test_a_revision_that_is_deleted_half_way_moves_no_service_to_routers_that_never_ran(
    rounds: int, roles: tuple[str, ...], held: str, how: str
) -> None:
    world = up(how, prefill={"replicas": 2}, decode={"replicas": 2})
    world.edit(**KEY)
    for _ in range(rounds):
        world.step()
        world.others_act()
    used = {name.rpartition("-")[0] for name in engines(world)}
    for kind, name in list(world.children):
        if kind == "ControllerRevision" and name in used and name.split("-")[1] in roles:
            del world.children[kind, name]
    if held == "refused":
        world.refused = "the server says no"
        world.edit(engine={"blockSize": 64})
    else:
        world.edit(engine={"blockSize": 64}, rollout={"type": how, "paused": True})
    left = bool(engines(world))  # with Recreate, the old ones may be gone
    for _ in range(8):
        before = selector(world)
        running = {
            key
            for key in routers(world)
            if world.children["Deployment", f"llama-router-{key}"]["status"].get(
                "availableReplicas"
            )
        }
        serves = find_condition(world.plan().status, "Available")["status"] == "True"
        world.step()
        if serves:
            assert selector(world) == before or selector(world) in running
            assert world.condition("Available")["status"] == "True"
        assert_no_router_mixes_keys(world)
        world.others_act()
    assert (world.condition("Available")["status"] == "True") is left
    assert bool(engines(world)) is left, "none is made of what is refused"
    world.refused = ""
    world.edit(rollout={"type": how})
    for _ in range(40):
        world.step()
        world.others_act()
    assert world.condition("Ready")["status"] == "True"
    assert len(engines(world)) == 4


def test_a_pause_moves_no_service_and_mixes_no_keys() -> None:
    world = up("Surge")
    key = selector(world)
    world.edit(**KEY)
    for _ in range(2):
        world.step()
    world.edit(rollout={"type": "Surge", "paused": True})
    for _ in range(5):
        world.run_pods()
        world.speak()
        world.link()
        world.route()
        world.step()
    assert selector(world) == key
    for found, known in routers(world).items():
        words = [word for word in known.split() if word.startswith("http://")]
        pods = [word.removeprefix("http://").partition(".")[0] for word in words]
        assert {world.pods[pod]["metadata"]["labels"][PAIRING_LABEL] for pod in pods} == {found}
    world.edit(rollout={"type": "Surge"})
    go_on(world)
    assert selector(world) != key


def test_replace_spares_no_engine_whose_links_have_all_failed() -> None:
    """Nothing is lost with it. Where nobody answers, something may be."""
    for failed in (True, False):
        world = up("Replace")
        before = engines(world)
        if failed:
            world.link(state=LinkState.FAILED, reason="BackendError", message="no route")
        else:
            world.engines, world.links = {}, {}
        world.edit(**ENV)
        for _ in range(4):
            world.step()
        assert (engines(world) == before) is not failed


def test_the_plan_that_moves_the_service_ends_the_routers_behind_it() -> None:
    """They serve nobody then, and hold their pods' memory."""
    world = up("Surge")
    before = selector(world)
    world.edit(**KEY)
    for _ in range(20):
        world.step()
        if selector(world) != before:
            break
        world.others_act()
    assert list(routers(world)) == [selector(world)] != [before]


def test_the_budget_counts_all_pods_of_engines_that_are_still_to_be_made() -> None:
    """Of those that exist, at most one engine may be evicted."""
    wide = {"replicas": 2, "parallelism": {"tensor": 3, "nodes": 3}}
    world = up("Recreate", prefill=wide)
    budget = world.children["PodDisruptionBudget", "llama-prefill"]["spec"]
    assert budget["minAvailable"] == 5
    world.edit(**KEY)
    for _ in range(3):
        world.step()
    assert not world.leaders("prefill")
    budget = world.children["PodDisruptionBudget", "llama-prefill"]["spec"]
    assert budget["minAvailable"] == 5


def test_the_budget_counts_the_pods_that_old_engines_have() -> None:
    wide = {"replicas": 2, "parallelism": {"tensor": 3, "nodes": 3}}
    world = up("Surge", prefill=wide)
    world.edit(prefill={"replicas": 2})
    for _ in range(3):
        world.step()
    sizes = [
        child["spec"]["replicas"]
        for (kind, name), child in world.children.items()
        if kind == "StatefulSet" and "-prefill-" in name
    ]
    assert {1, 3} == set(sizes)
    budget = world.children["PodDisruptionBudget", "llama-prefill"]["spec"]
    assert budget["minAvailable"] == sum(sizes) - 1


def test_with_pdcluster_up_no_engine_waits_for_routers() -> None:
    """Routers and engines are processes of one machine, and end together."""
    world = up("Recreate", decode={"replicas": 2})
    for one_node in (True, False):
        plan = make_plan(replace(world.observed(), place=Place(one_node=one_node)), world.now)
        assert bool(plan.routed) is not one_node


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"updatedReplicas": 1, "availableReplicas": 0},
        {"updatedReplicas": 0, "availableReplicas": 1},
        {"updatedReplicas": 1, "availableReplicas": 1, "replicas": 2},
        {"updatedReplicas": 1, "availableReplicas": 1, "observedGeneration": 1},
    ],
    ids=str,
)
def test_the_service_moves_when_all_new_routers_are_ready(status: dict[str, int]) -> None:
    world = up("Surge")
    key = selector(world)
    world.edit(**KEY)
    while len(routers(world)) == 1:
        world.step()
        world.run_pods()
        world.speak()
        world.link()
    [new] = [
        child
        for (kind, _), child in world.children.items()
        if kind == "Deployment" and child["metadata"]["labels"][PAIRING_LABEL] != key
    ]
    new["metadata"]["generation"] = 2
    new["status"] = {"observedGeneration": 2, **status}
    for _ in range(2):
        world.step()
        assert selector(world) == key
    new["status"] = {"observedGeneration": 2, "updatedReplicas": 1, "availableReplicas": 1}
    world.step()
    assert selector(world) != key


@pytest.mark.parametrize("paused", [False, True])
def test_an_engine_that_somebody_scales_serves_on(paused: bool) -> None:
    """Its StatefulSet gets one pod too many, which takes part in nothing."""
    rollout = {"type": "Replace", "paused": paused}
    world = brought_up(decode={"replicas": 1}, rollout=rollout)
    world.edit(engine={"blockSize": 32})
    world.settle()
    [engine] = world.leaders("decode")
    world.children["StatefulSet", engine.stateful_set]["spec"]["replicas"] = 2
    world.make_pods()  # the second one is not scheduled
    world.settle()
    assert world.leaders("decode") == [engine]
    assert world.condition("Available")["status"] == "True"
    assert world.condition("DecodeReady")["status"] == ("True" if paused else "False")
    assert world.condition("Progressing")["reason"] == (
        "Paused" if paused else "InsufficientCapacity"
    )
