"""What an API server refuses stops its engine or itself, and nothing else."""

from __future__ import annotations

import pytest
from simulated_cluster import SimulatedCluster, brought_up

from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.plan.types import Apply, Step

SERVICE = ("Service", "llama-router")


def refuse(world: SimulatedCluster, kind: str, name: str = "") -> None:
    def refuses(step: Step) -> bool:
        if not isinstance(step, Apply):
            return False
        found = step.manifest["kind"], step.manifest["metadata"]["name"]
        return found[0] == kind and name in ("", found[1])

    world.refuses = refuses


def engines(world: SimulatedCluster) -> set[str]:
    return {name for kind, name in world.children if kind == "StatefulSet"}


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("PodDisruptionBudget", 3),
        ("Service", 2),
        ("NetworkPolicy", 2),
        ("ServiceAccount", 2),
    ],
)
def test_routers_forget_an_evicted_engine_whatever_child_is_refused(kind: str, made: int) -> None:
    """A new engine needs its address, its identity and its fences, and no budget."""
    world = brought_up(prefill={"replicas": 2}, decode={"replicas": 2}, router={"replicas": 2})
    for name in [one for one in world.children if one[0] == kind and one != SERVICE]:
        del world.children[name]
    world.edit(decode={"replicas": 3})
    refuse(world, kind)
    evicted = world.leaders("decode")[0]
    world.pods[evicted.pod()]["metadata"]["deletionTimestamp"] = timestamp(world.now + 30)
    world.step()
    [router] = [one for (kind, _), one in world.children.items() if kind == "Deployment"]
    assert evicted.api_url not in str(router["spec"]["template"])
    assert len(world.leaders("decode")) == made
    world.refuses = lambda _: False
    world.others_act()
    world.step()
    assert len(world.leaders("decode")) == 3


def test_an_engine_without_an_address_keeps_no_other_from_being_made() -> None:
    """A quota of Services may have place for one more."""
    world = brought_up()
    old = engines(world)
    world.edit(prefill={"replicas": 2}, decode={"replicas": 2})
    new = {step.manifest["metadata"]["name"] for step in world.plan().steps
           if isinstance(step, Apply) and step.manifest["kind"] == "StatefulSet"}  # fmt: skip
    refused, taken = sorted(new)
    refuse(world, "Service", refused)
    world.step()
    assert engines(world) == {*old, taken}
    world.refuses = lambda _: False
    world.step()
    assert engines(world) == {*old, *new}


def test_engines_leave_while_those_of_the_other_role_have_no_address() -> None:
    """Their Services are what a full quota of Services waits for."""
    world = brought_up(prefill={"replicas": 3})
    world.edit(prefill={"replicas": 1}, decode={"replicas": 2})
    refuse(world, "Service")
    for _ in range(8):
        world.step()
        world.others_act()
    assert (len(world.leaders("prefill")), len(world.leaders("decode"))) == (1, 1)


@pytest.mark.parametrize(("kind", "left"), [("Deployment", 2), ("Service", 1)])
def test_an_engine_stays_while_routers_cannot_forget_it(kind: str, left: int) -> None:
    """What clients come through has nothing to do with it."""
    world = brought_up(prefill={"replicas": 2})
    world.edit(prefill={"replicas": 1})
    world.children.pop(SERVICE)
    refuse(world, kind)
    for _ in range(8):
        world.step()
        world.others_act()
    assert len(world.leaders("prefill")) == left


def test_routers_stay_while_the_address_cannot_move_to_others() -> None:
    """The new engines have another pairing key."""
    world = brought_up()
    [old] = [name for name in world.children if name[0] == "Deployment"]
    world.edit(engine={"blockSize": 32})
    refuse(world, "Service", SERVICE[1])
    for _ in range(12):
        world.step()
        world.others_act()
    assert old in world.children
    assert world.condition("Available")["status"] == "True"
    world.refuses = lambda _: False
    for _ in range(12):
        world.step()
        world.others_act()
    assert old not in world.children
    assert world.condition("Ready")["status"] == "True"
