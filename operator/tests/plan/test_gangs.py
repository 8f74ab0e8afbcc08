"""Which pods are in one PodGroup, and how many of them have to fit at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from simulated_cluster import SimulatedCluster, manifest

from pdcluster_operator.api.conditions import StatusReason
from pdcluster_operator.api.object_names import PAIRING_LABEL, EngineName, engine_of
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.forecast.course import forecast
from pdcluster_operator.plan.observed.engines import HELD
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.types import Apply, Place

GANG = {"gang": "Enabled"}
EXAMPLES = settings().max_examples // 4  # each is dozens of plans


def world_of(prefill: int = 1, decode: int = 1, nodes: int = 1, **spec: Any) -> SimulatedCluster:
    def role(replicas: int) -> dict[str, Any]:
        return {"replicas": replicas, "parallelism": {"tensor": nodes, "nodes": nodes}}

    spec.setdefault("scheduling", GANG)
    world = SimulatedCluster(manifest(prefill=role(prefill), decode=role(decode), **spec))
    world.settle()
    return world


def scaled(world: SimulatedCluster, role: str, replicas: int) -> None:
    world.edit(**{role: {**world.cluster["spec"][role], "replicas": replicas}})
    world.settle()


def group_in(template: dict[str, Any]) -> str:
    return (template["spec"].get("schedulingGroup") or {}).get("podGroupName", "")


def engines(world: SimulatedCluster) -> dict[EngineName, str]:
    """The group of every engine that exists; empty for those in none."""
    found = {}
    for (kind, _), child in world.children.items():
        if kind == "StatefulSet":
            found[engine_of(child)] = group_in(child["spec"]["template"])
    return found


def groups(world: SimulatedCluster) -> dict[str, int]:
    """How many pods each PodGroup asks for."""
    return {
        name: child["spec"]["schedulingPolicy"]["gang"]["minCount"]
        for (kind, name), child in world.children.items()
        if kind == "PodGroup"
    }


def shown(world: SimulatedCluster) -> list[str]:
    """`prefill-0 start` for each engine, with its group without the cluster's name and hashes."""
    lines = []
    for name, group in engines(world).items():
        word = "start" if "-start-" in group else "own" if group else "alone"
        lines.append(f"{name.role}-{name.index} {word}")
    return sorted(lines)


def place(world: SimulatedCluster, *roles: str) -> None:
    """Give the pods of these roles a node."""
    world.make_pods()
    for pod in world.pods.values():
        if engine_of(pod).role in roles:
            pod["spec"]["nodeName"] = "node"


def everybody_runs(world: SimulatedCluster) -> None:
    for _ in range(10):
        world.others_act()
        world.settle()


def test_the_first_pair_starts_together_and_the_others_wait_for_it() -> None:
    world = world_of(3, 2)
    assert shown(world) == ["decode-0 start", "prefill-0 start"]
    assert list(groups(world).values()) == [2]
    place(world, "prefill")
    world.settle()
    assert len(engines(world)) == 2, "decode has no node yet"
    waiting = next(one for one in world.cluster["status"]["engines"] if "prefill" in one["name"]
                   and one["name"].endswith("-1"))  # fmt: skip
    assert HELD in waiting["message"]
    place(world, "decode")
    world.settle()
    assert shown(world) == [
        "decode-0 start", "decode-1 alone", "prefill-0 start", "prefill-1 alone", "prefill-2 alone",
    ]  # fmt: skip
    assert list(groups(world).values()) == [2]


@pytest.mark.parametrize("nodes", [2, 3])
def test_all_pods_of_both_engines_count_and_further_engines_have_a_group_of_their_own(
    nodes: int,
) -> None:
    world = world_of(2, 1, nodes=nodes)
    assert list(groups(world).values()) == [2 * nodes]
    place(world, "prefill", "decode")
    world.settle()
    assert shown(world) == ["decode-0 start", "prefill-0 start", "prefill-1 own"]
    assert sorted(groups(world).values()) == [nodes, 2 * nodes]


def test_without_the_field_there_are_no_groups() -> None:
    world = world_of(2, 2, nodes=2, scheduling={})
    assert set(engines(world).values()) == {""}
    assert not groups(world)
    assert len(engines(world)) == 4


def test_engines_of_one_role_alone_have_no_group() -> None:
    world = world_of(2, 0)
    assert shown(world) == ["prefill-0 alone", "prefill-1 alone"], "nothing to wait for"
    scaled(world, "decode", 1)
    assert shown(world)[0] == "decode-0 alone", "its partners exist already"


def test_engines_that_exist_keep_their_pods_when_the_field_is_set_and_unset() -> None:
    world = world_of(nodes=2, scheduling={})
    everybody_runs(world)
    pods = {pod["metadata"]["uid"] for pod in world.pods.values()}
    world.edit(scheduling=GANG)
    world.settle()
    assert shown(world) == ["decode-0 alone", "prefill-0 alone"]
    joint = world_of()
    everybody_runs(joint)
    before = {pod["metadata"]["uid"] for pod in joint.pods.values()}
    joint.edit(scheduling={"gang": "Disabled"})
    everybody_runs(joint)
    assert shown(joint) == ["decode-0 start", "prefill-0 start"]
    assert list(groups(joint).values()) == [2], "a pod that is made again needs its group"
    assert {pod["metadata"]["uid"] for pod in joint.pods.values()} == before
    assert {pod["metadata"]["uid"] for pod in world.pods.values()} == pods


def test_a_surge_of_one_role_waits_for_nobody() -> None:
    world = world_of(rollout={"type": "Surge"})
    everybody_runs(world)
    world.edit(prefill={**world.cluster["spec"]["prefill"], "engine": {"env": [
        {"name": "A", "value": "1"}]}})  # fmt: skip
    world.settle()
    assert sorted(shown(world)) == ["decode-0 start", "prefill-0 alone", "prefill-0 start"]
    everybody_runs(world)
    assert shown(world) == ["decode-0 start", "prefill-0 alone"]
    assert list(groups(world).values()) == [1], "what is left in it"


def test_a_surge_to_another_pairing_key_starts_its_own_pair_together() -> None:
    world = world_of(2, 2, rollout={"type": "Surge"})
    everybody_runs(world)
    world.edit(engine={"blockSize": 32})
    world.settle()
    found = [group for name, group in engines(world).items() if group]
    assert sorted(Counter(found).values()) == [2, 2]
    keys = {
        group_in(child["spec"]["template"]): child["metadata"]["labels"][PAIRING_LABEL]
        for child in world.children.values()
        if child["kind"] == "StatefulSet" and group_in(child["spec"]["template"])
    }
    assert len(set(keys.values())) == 2, "a group holds engines of one key"
    everybody_runs(world)
    assert world.condition("Ready")["status"] == "True"
    assert len(groups(world)) == 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_group_asks_for_the_same_pods_when_its_engines_have_become_old(nodes: int) -> None:
    world = world_of(nodes=nodes)
    everybody_runs(world)
    [(start, count)] = groups(world).items()
    assert count == 2 * nodes
    world.edit(engine={"blockSize": 32})
    world.settle()
    assert groups(world)[start] == count
    assert sorted(groups(world).values()) == [count, count], "and the new pair has its own"


def test_recreate_starts_together_again() -> None:
    world = world_of(rollout={"type": "Recreate"})
    everybody_runs(world)
    world.edit(engine={"env": [{"name": "A", "value": "1"}]})
    everybody_runs(world)
    assert shown(world) == ["decode-0 start", "prefill-0 start"]
    assert list(groups(world).values()) == [2]


def test_a_restart_of_one_waits_for_nobody_while_others_serve() -> None:
    world = world_of(2, 2)
    everybody_runs(world)
    [start] = groups(world)
    first = [name for name, group in engines(world).items() if group]
    for name in first[:1]:
        del world.pods[name.pod()]["spec"]["nodeName"]
    world.settle()
    assert groups(world) == {start: 2}, "its partner has its node and counts"
    for name in first[1:]:
        del world.pods[name.pod()]["spec"]["nodeName"]
    world.settle()
    assert groups(world) == {start: 1}, "others serve: none of the two waits for the other"
    for pod in world.pods.values():
        pod["spec"].pop("nodeName", None)
    world.settle()
    assert groups(world) == {start: 2}, "nobody serves: it is a start again"


def test_further_engines_do_not_wait_for_a_first_pair_that_restarts() -> None:
    world = world_of(2, 2)
    everybody_runs(world)
    first = [name for name, group in engines(world).items() if group]
    del world.pods[first[0].pod()]["spec"]["nodeName"]
    world.edit(decode={**world.cluster["spec"]["decode"], "replicas": 3})
    world.settle()
    assert sum(name.role is Role.DECODE for name in engines(world)) == 3


def test_the_group_of_engines_that_leave_goes_last() -> None:
    world = world_of()
    everybody_runs(world)
    scaled(world, "prefill", 0)
    scaled(world, "decode", 0)
    assert groups(world), "their pods may still be made again"
    world.reap()
    world.settle()
    assert not groups(world)
    assert not engines(world)


def test_a_half_created_start_is_completed() -> None:
    world = world_of()
    [decode] = [name for name in engines(world) if name.role == "decode"]
    del world.children["StatefulSet", decode.stateful_set]
    world.settle()
    assert shown(world) == ["decode-0 start", "prefill-0 start"]


def test_the_group_has_the_priority_of_its_pods() -> None:
    high = {"spec": {"priorityClassName": "high"}}
    world = SimulatedCluster(
        manifest(prefill={"podTemplate": high}, decode={"podTemplate": high}, scheduling=GANG)
    )
    world.settle()
    [group] = [child for child in world.children.values() if child["kind"] == "PodGroup"]
    assert group["spec"]["priorityClassName"] == "high"
    assert group["metadata"]["name"] != next(iter(groups(world_of()))), "it can never be changed"


def test_a_queue_is_for_new_engines() -> None:
    world = world_of(scheduling={"queueName": "team-a"})
    everybody_runs(world)
    world.edit(scheduling={"queueName": "team-b"})
    scaled(world, "decode", 2)
    found = {
        name: child["metadata"]["labels"].get("kueue.x-k8s.io/queue-name")
        for (kind, name), child in world.children.items()
        if kind == "StatefulSet"
    }
    assert Counter(found.values()) == {"team-a": 2, "team-b": 1}
    template = next(c for (kind, _), c in world.children.items() if kind == "StatefulSet")
    labels = template["spec"]["template"]["metadata"]["labels"]
    assert "kueue.x-k8s.io/queue-name" not in labels, "Kueue writes it there"


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("scale"), st.sampled_from(["prefill", "decode"]), st.integers(0, 3)),
        st.tuples(st.just("roll"), st.sampled_from(["prefill", "decode", "engine"])),
        st.tuples(st.just("gang"), st.sampled_from(["Enabled", "Disabled"])),
        st.tuples(st.just("others")),
        st.tuples(st.just("step")),
        st.tuples(st.just("evict"), st.integers(0, 5)),
    ),
    max_size=8,
)


def act(world: SimulatedCluster, action: tuple[Any, ...], turn: int) -> None:
    spec = world.cluster["spec"]
    if action[0] == "scale":
        world.edit(**{action[1]: {**spec[action[1]], "replicas": action[2]}})
    elif action[0] == "roll" and action[1] == "engine":
        world.edit(engine={"blockSize": 16 << turn % 3})
    elif action[0] == "roll":
        env = [{"name": "TURN", "value": str(turn)}]
        world.edit(**{action[1]: {**spec[action[1]], "engine": {"env": env}}})
    elif action[0] == "gang":
        world.edit(scheduling={"gang": action[1]})
    elif action[0] == "others":
        world.others_act()
    elif action[0] == "evict" and world.pods:
        names = sorted(world.pods)
        world.pods[names[action[1] % len(names)]]["spec"].pop("nodeName", None)
    world.step()


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 2), st.sampled_from(["Surge", "Replace", "Recreate"]), ACTIONS)
def test_groups_hold_under_any_course(nodes: int, how: str, actions: list[tuple]) -> None:
    world = world_of(2, 1, nodes=nodes, rollout={"type": how})
    before: dict[str, str] = {}
    for turn, action in enumerate(actions):
        act(world, action, turn)
        found = engines(world)
        held = {
            world.children["StatefulSet", name.stateful_set]["metadata"]["uid"]: group
            for name, group in found.items()
        }
        assert all(held[uid] == group for uid, group in before.items() if uid in held)
        before = held
        members = Counter(group for group in found.values() if group)
        assert members.keys() <= groups(world).keys(), "a pod without its group would hang"
        for group, count in groups(world).items():
            sizes = [nodes for name, mine in found.items() if mine == group]
            roles = Counter(name.role for name, mine in found.items() if mine == group)
            assert count <= max(sum(sizes), 0) or not sizes, "it waits for pods that never come"
            assert all(number == 1 for number in roles.values())
            keys = {
                world.children["StatefulSet", name.stateful_set]["metadata"]["labels"][
                    PAIRING_LABEL
                ]
                for name, mine in found.items()
                if mine == group
            }
            assert len(keys) <= 1
    for role in ("prefill", "decode"):
        world.edit(**{role: {**world.cluster["spec"][role], "replicas": 2}})
    if how == "Replace":
        world.edit(rollout={"type": "Recreate"})
    for _ in range(60):
        world.others_act()
        if not world.step().steps and world.condition("Ready")["status"] == "True":
            return
    raise AssertionError(world.condition("Progressing"))


@pytest.mark.parametrize("served", [True, False])
def test_an_api_server_without_pod_groups_is_named_and_nothing_is_created(served: bool) -> None:
    world = SimulatedCluster(manifest(scheduling=GANG))
    plan = make_plan(replace(world.observed(), pod_groups=served), world.now)
    accepted = plan.status["conditions"][0]
    assert accepted["type"] == "Accepted"
    if served:
        assert accepted["status"] == "True"
        return
    assert accepted["status"] == "False"
    assert "spec.scheduling.gang" in accepted["message"]
    assert "[PodGroupsNotServed]" in accepted["message"]
    assert "GenericWorkload" in accepted["message"]
    assert not plan.steps


def test_a_pod_that_waits_for_its_gang_has_the_schedulers_words() -> None:
    words = "minCount (2) cannot be satisfied: 0 scheduled, 1 remaining"
    world = world_of()
    world.make_pods()
    world.settle()
    [group] = groups(world)
    together = f"waits for nodes together with the other pods of PodGroup {group}"
    assert world.condition("PrefillReady")["message"].endswith(together)
    for pod in world.pods.values():
        waiting = {"type": "PodScheduled", "status": "False", "message": words}
        pod["status"] = {"phase": "Pending", "conditions": [waiting]}
    world.settle()
    for kind in ("PrefillReady", "DecodeReady"):
        assert world.condition(kind)["reason"] == StatusReason.UNSCHEDULABLE
        assert f"{together}: {words}" in world.condition(kind)["message"]


def test_the_forecast_names_the_groups_and_ends_with_every_engine() -> None:
    world = SimulatedCluster(manifest(prefill={"replicas": 2}, scheduling=GANG))
    course = forecast(world.observed(), world.now)
    assert course.complete, course.end
    rounds = [Counter(step.manifest["kind"] for step in one.steps) for one in course.rounds]
    assert rounds[0]["PodGroup"] == 1
    assert rounds[0]["StatefulSet"] == 2
    assert sum(one["StatefulSet"] for one in rounds) == 3


def test_routers_are_made_once_for_the_first_pair() -> None:
    """Engines that wait for the pair join when they are verified, and are not forgotten before."""
    role = {"replicas": 2}
    world = SimulatedCluster(manifest(prefill=role, decode=role, scheduling=GANG))
    world.step()
    assert world.step().steps == ()


def test_a_group_is_not_written_where_pod_groups_are_not_served_any_more() -> None:
    world = world_of()
    for key in [key for key in world.children if key[0] == "PodGroup"]:
        del world.children[key]
    world.edit(scheduling={"gang": "Disabled"})
    for served in (True, False):
        plan = make_plan(replace(world.observed(), pod_groups=served), world.now)
        written = [step.manifest["kind"] for step in plan.steps if isinstance(step, Apply)]
        assert ("PodGroup" in written) is served


def high_priority() -> dict[str, Any]:
    return {"podTemplate": {"spec": {"priorityClassName": "high"}}}


def test_a_group_keeps_its_priority_when_that_of_new_engines_is_another() -> None:
    world = SimulatedCluster(
        manifest(prefill=high_priority(), decode=high_priority(), scheduling=GANG)
    )
    world.settle()
    everybody_runs(world)
    world.edit(prefill={}, decode={})
    world.settle()
    assert shown(world) == [
        "decode-0 alone", "decode-0 start", "prefill-0 alone", "prefill-0 start",
    ]  # fmt: skip
    [group] = [child for child in world.children.values() if child["kind"] == "PodGroup"]
    assert group["spec"]["priorityClassName"] == "high", "its pods have it still"


def test_an_engine_that_somebody_deleted_joins_its_partner_again_whoever_else_serves() -> None:
    world = world_of(2, 1)
    everybody_runs(world)
    [decode] = world.leaders("decode")
    del world.children["StatefulSet", decode.stateful_set]
    del world.pods[decode.pod()]
    world.settle()
    assert shown(world) == ["decode-0 start", "prefill-0 start", "prefill-1 alone"]
    assert list(groups(world).values()) == [2]


def test_beside_old_engines_the_first_new_pair_starts_before_other_new_engines() -> None:
    """The old ones serve under another key. They keep no new engine from waiting for its pair."""
    world = world_of(2, 2, rollout={"type": "Surge", "maxSurge": 2})
    everybody_runs(world)
    old = set(engines(world))
    world.edit(engine={"blockSize": 32})
    world.settle()
    new = set(engines(world)) - old
    assert sorted((one.role.value, one.index) for one in new) == [("decode", 0), ("prefill", 0)]
    held = {one["name"] for one in world.cluster["status"]["engines"] if HELD in one["message"]}
    assert len(held) == 2
    assert not held & {one.stateful_set for one in old}, "those serve"
    place(world, "prefill", "decode")
    world.settle()
    assert len(set(engines(world)) - old) == 4


def test_of_a_first_pair_that_restarts_each_engine_waits_for_its_own_pods_alone() -> None:
    """Others serve, so each of the two is of use without the other."""
    world = SimulatedCluster(
        manifest(
            prefill={"replicas": 2, "parallelism": {"tensor": 3, "nodes": 3}},
            decode={"replicas": 2},
            scheduling=GANG,
        )
    )
    world.settle()
    everybody_runs(world)
    first = [name for name, group in engines(world).items() if "-start-" in group]
    [start] = {engines(world)[name] for name in first}
    assert sorted(groups(world).values()) == [3, 4]
    for pod in world.pods.values():
        if engine_of(pod) in first:
            del pod["spec"]["nodeName"]
    world.settle()
    assert groups(world)[start] == 1, "the smaller of the two may start"
    [prefill] = [name for name in first if name.role is Role.PREFILL]
    world.pods[prefill.pod(1)]["spec"]["nodeName"] = "node"
    world.settle()
    assert groups(world)[start] == 1, "one pod of three is no engine"
    world.pods[prefill.pod(0)]["spec"]["nodeName"] = "node"
    world.pods[prefill.pod(2)]["spec"]["nodeName"] = "node"
    world.settle()
    assert groups(world)[start] == 4, "the one that has its nodes does not keep the other"


def test_a_group_that_a_user_names_is_the_users() -> None:
    mine = {"spec": {"schedulingGroup": {"podGroupName": "mine"}}}
    world = SimulatedCluster(manifest(prefill={"podTemplate": mine}))
    world.settle()
    assert "mine" in engines(world).values()
    assert not groups(world)


def test_on_one_machine_there_are_no_groups_and_nobody_waits() -> None:
    """Local mode has no scheduler."""
    role = {"replicas": 2}
    world = SimulatedCluster(manifest(prefill=role, decode=role, scheduling=GANG))
    for one_node, served, sets in ((False, True, 2), (True, True, 4), (True, False, 4)):
        observed = replace(world.observed(), place=Place(one_node=one_node), pod_groups=served)
        steps = make_plan(observed, world.now).steps
        written = Counter(step.manifest["kind"] for step in steps if isinstance(step, Apply))
        assert written["StatefulSet"] == sets
        assert written["PodGroup"] == (not one_node)
