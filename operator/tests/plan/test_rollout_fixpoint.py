"""However often an operator is killed, a changed cluster ends as a fresh one of that spec begins.

Any write may be the last one of an operator, what it sees may be old, and specs change while
engines are replaced.
"""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_cluster import SimulatedCluster, manifest

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
        spec = copy.deepcopy(child.get("spec"))
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
        world.cluster["status"] = copy.deepcopy(dict(plan.status))
    world.now += 1


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_end_is_what_a_fresh_cluster_of_the_last_spec_is(data: st.DataObject) -> None:
    first, last = data.draw(cluster_specs()), data.draw(cluster_specs())
    world = SimulatedCluster(manifest(**first))
    world.bring_up()
    world.edit(**last)
    for _ in range(data.draw(st.integers(0, 6), label="kills")):
        killed_while(world, data)
        if data.draw(st.booleans(), label="others act"):
            world.others_act()
    for _ in range(60):
        before = content(world), set(world.pods)
        plan = world.step()
        world.others_act()
        if not plan.steps and before == (content(world), set(world.pods)):
            break
    said = world.condition("Progressing")
    if said["reason"] == "InsufficientCapacity":
        assert last["rollout"]["type"] == "Replace"
        assert world.condition("Available")["status"] == "True"
        return
    assert world.condition("Ready")["status"] == "True", said
    fresh = SimulatedCluster(manifest(**last))
    fresh.bring_up()
    assert content(world) == content(fresh)
