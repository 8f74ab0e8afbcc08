"""However often an operator is killed, a changed cluster ends as a fresh one of that spec begins.

Any write may be the last one of an operator, what it sees may be old, and events of its watches get
lost, come late or twice. Specs change while engines are replaced, to wrong ones and back.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from lossy_watch import LossyWatch
from simulated_cluster import SimulatedCluster, copied, manifest

from pdcluster_operator.plan.planner import make_plan

TYPES = st.sampled_from(["Recreate", "Surge", "Replace"])
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "blockSize": st.sampled_from([16, 32]),
        "maxModelLen": st.sampled_from([256, 512]),
        "env": st.sampled_from([[], [{"name": "A", "value": "1"}], [{"name": "A", "value": "2"}]]),
    },
)
WRONG = st.sampled_from(
    [
        {"decode": {"replicas": -1}},
        {"engine": {"blockSize": 0}},
        {"prefill": {"engine": {"blockSize": "many"}}},
        {"nonsense": True},
        {"decode": {"engine": {"extraArgs": ["--kv-transfer-config={}"]}}},
    ]
)


@st.composite
def cluster_specs(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "engine": draw(CHANGES),
        "prefill": {"replicas": draw(st.integers(1, 2))},
        "decode": {
            "replicas": draw(st.integers(1, 2)),
            "engine": {"env": draw(CHANGES).get("env", [])},
        },
        "rollout": {"type": draw(TYPES)},
    }


def content(world: SimulatedCluster) -> dict[str, Any]:
    """Every child by kind and name, but the stored revisions: they remember the past."""
    found: dict[str, Any] = {}
    for (kind, name), child in world.children.items():
        if kind == "ControllerRevision":
            continue
        spec = copied(child.get("spec"))
        found[f"{kind}/{name}"] = spec
    return found


def killed_while(world: SimulatedCluster, data: st.DataObject) -> None:
    """Let an operator do some of its steps, from what it sees now or saw before."""
    stale = data.draw(st.booleans(), label="stale")
    plan = make_plan(world.observed(), world.now)
    if stale and data.draw(st.booleans(), label="others first"):
        world.others_act()
    done = data.draw(st.integers(0, len(plan.steps)), label="steps done")
    for step in plan.steps[:done]:
        try:
            world.perform(step)
        except (KeyError, AssertionError):
            break  # a precondition: the object is another one, or gone
    if data.draw(st.booleans(), label="status written"):
        world.cluster["status"] = copied(dict(plan.status))
    world.now += 1


def until_at_rest(world: SimulatedCluster) -> None:
    """Let an operator that sees well work for as long as anything changes."""

    def seen() -> Any:
        return copied((world.children, world.pods, world.engines, world.links))

    for _ in range(60):
        before = seen()
        plan = world.step()
        world.others_act()
        if not plan.steps and before == seen():
            break


def assert_as_fresh(world: SimulatedCluster, last: dict[str, Any]) -> None:
    """The cluster is what a fresh one of this spec is, or holds for a good reason."""
    said = world.condition("Progressing")
    if said["reason"] == "InsufficientCapacity":
        assert last["rollout"]["type"] == "Replace"
        assert world.condition("Available")["status"] == "True"
        return
    assert world.condition("Ready")["status"] == "True", said
    fresh = SimulatedCluster(manifest(**last))
    fresh.bring_up()
    assert content(world) == content(fresh)


def ends_as_a_fresh_one(data: st.DataObject) -> None:
    first, last = data.draw(cluster_specs()), data.draw(cluster_specs())
    world = SimulatedCluster(manifest(**first))
    world.bring_up()
    world.edit(**last)
    for _ in range(data.draw(st.integers(0, 6), label="kills")):
        killed_while(world, data)
        if data.draw(st.booleans(), label="others act"):
            world.others_act()
    until_at_rest(world)
    assert_as_fresh(world, last)


def ends_as_a_fresh_one_although_events_get_lost(data: st.DataObject) -> None:
    first, last = data.draw(cluster_specs()), data.draw(cluster_specs())
    world = SimulatedCluster(manifest(**first))
    world.bring_up()
    watch = LossyWatch(world)
    world.edit(**last)
    for _ in range(data.draw(st.integers(1, 12), label="looks")):
        watch.report(data)
        if data.draw(st.booleans(), label="sweep"):
            watch.sweep()
        plan = make_plan(watch.observed(), world.now)
        for step in plan.steps:
            try:
                world.perform(step)
            except (KeyError, AssertionError):
                break  # a precondition: the object is another one, or gone
        world.cluster["status"] = copied(dict(plan.status))
        world.now += 1
        if data.draw(st.booleans(), label="others act"):
            world.others_act()
    until_at_rest(world)
    assert_as_fresh(world, last)


def a_wrong_spec_does_no_harm(data: st.DataObject) -> None:
    first, last = data.draw(cluster_specs()), data.draw(cluster_specs())
    world = SimulatedCluster(manifest(**first))
    world.bring_up()
    for _ in range(data.draw(st.integers(1, 3), label="wrong specs")):
        engines = {name for kind, name in world.children if kind == "StatefulSet"}
        refused = data.draw(st.booleans(), label="refused by the server")
        # A server that refuses pods does so with templates that it has not seen yet.
        world.refused = "the server says no" if refused else ""
        world.edit(**(data.draw(WRONG) if not refused else {"engine": {"maxModelLen": 77}}))
        for _ in range(data.draw(st.integers(1, 3), label="steps")):
            world.step()
            world.others_act()
        assert refused or world.condition("Accepted")["status"] == "False"
        kept = {name for kind, name in world.children if kind == "StatefulSet"}
        assert kept == engines, "the old engines serve on"
        assert world.condition("Available")["status"] == "True"
        world.refused = ""
        if data.draw(st.booleans(), label="mended at once"):
            break
        restored = {"prefill": {}, "decode": {}, "engine": {}, "rollout": {}} | first
        world.edit(**restored)
        until_at_rest(world)
    world.cluster["spec"] = manifest(**last)["spec"]
    world.edit()
    until_at_rest(world)
    assert_as_fresh(world, last)


COURSES = [
    ends_as_a_fresh_one,
    ends_as_a_fresh_one_although_events_get_lost,
    a_wrong_spec_does_no_harm,
]


def run(course: Any, examples: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    limits = settings(max_examples=examples, deadline=None, suppress_health_check=checks)
    limits(given(data=st.data())(course))()


@pytest.mark.parametrize("course", COURSES)
def test_the_end_is_what_a_fresh_cluster_of_the_last_spec_is(course: Any) -> None:
    run(course, 12)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("course", COURSES)
def test_thousands_of_changes_end_as_fresh_clusters_do(course: Any) -> None:
    run(course, 2000)
