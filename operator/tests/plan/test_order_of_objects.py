"""The order in which an API server lists objects decides nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulated_cluster import SimulatedCluster, copied, manifest

from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.types import Plan

TWO = {"replicas": 2, "parallelism": {"tensor": 2, "nodes": 2}}


class Relisted(SimulatedCluster):
    """Compares each plan with the plans of the same objects in other orders."""

    def plan(self) -> Plan:
        plan = super().plan()
        observed = self.observed()
        for order in (slice(None, None, -1), slice(None)):
            found = replace(
                observed,
                children=_turned(observed.children, order),
                pods=_turned(observed.pods, order),
                links=dict(_turned(tuple(observed.links.items()), order)),
                engines=dict(_turned(tuple(observed.engines.items()), order)),
            )
            other = make_plan(found, self.now)
            assert sorted(map(repr, other.steps)) == sorted(map(repr, plan.steps))
            assert other.status == plan.status
            assert (other.peers, other.routed) == (plan.peers, plan.routed)
        return plan


def _turned(objects: tuple[Any, ...], order: slice) -> tuple[Any, ...]:
    """Return the objects in an order, and the last third of them first."""
    turned, third = objects[order], len(objects) // 3
    return (*turned[-third:], *turned[:-third]) if third else turned


def up(**spec: Any) -> Relisted:
    world = Relisted(manifest(**spec))
    world.bring_up()
    return world


@pytest.mark.parametrize("how", ["Surge", "Replace", "Recreate"])
def test_of_a_rollout(how: str) -> None:
    world = up(rollout={"type": how}, prefill=copied(TWO), decode={"replicas": 3})
    world.edit(engine={"env": [{"name": "A", "value": "1"}]})
    for turn in range(8):
        world.step()
        if turn % 2:
            world.others_act()
    world.edit(prefill={**TWO, "replicas": 1}, decode={"replicas": 1})
    for _ in range(6):
        world.step()
        world.others_act()
    assert world.condition("Ready")["status"] == "True"


def test_of_what_is_left_over() -> None:
    """Kept objects stand before and behind those that are deleted."""
    world = up(decode={"replicas": 3})
    world.edit(decode={"replicas": 1}, router={"replicas": 0})
    stray = copied(world.children["StatefulSet", world.leaders("decode")[0].stateful_set])
    for name in ("a-stray", "z-stray"):
        service = {**copied(stray), "kind": "Service"}
        service["metadata"] |= {"name": name, "uid": name, "labels": {}}
        world.children["Service", name] = service
    plan = world.step()
    gone = {step.name for step in plan.steps if type(step).__name__ == "Delete"}
    assert {"a-stray", "z-stray"} <= gone
    for _ in range(3):
        world.step()
        world.others_act()


def test_of_pods_in_trouble() -> None:
    world = up(prefill=copied(TWO), decode=copied(TWO))
    waits = {"name": "engine", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    unready = [{"type": "Ready", "status": "False"}]
    names = list(world.pods)
    for name in (names[1], names[-1]):
        world.pods[name]["status"] |= {"conditions": unready, "containerStatuses": [waits]}
        world.step()
    for name in names:
        world.pods[name]["status"] |= {"conditions": unready, "containerStatuses": []}
    world.step()
    for engine in list(world.engines)[1:]:
        del world.engines[engine]
        world.step()
    world.links.clear()
    world.step()
    for name in names[::2]:
        del world.pods[name]
        world.step()
