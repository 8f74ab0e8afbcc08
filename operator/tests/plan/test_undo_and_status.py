"""The step back to the spec before, and how far a rollout is in one line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from simulated_cluster import SimulatedCluster, brought_up, manifest

from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.cli.rollout import announce, undo
from pdcluster_operator.plan.rollout.revisions import spec_of_engines, with_spec_of_engines
from pdcluster_operator.plan.status.progress import with_failure


def env(value: str) -> dict[str, Any]:
    return {"env": [{"name": "A", "value": value}]}


def rolled(world: SimulatedCluster, **spec: Any) -> dict[Role, str]:
    """Edit, let it come to rest, and return the revisions that serve."""
    world.edit(**spec)
    for _ in range(20):
        world.step()
        world.others_act()
    assert world.condition("Ready")["status"] == "True"
    return revisions(world)


def revisions(world: SimulatedCluster) -> dict[Role, str]:
    return {role: world.leaders(role.value)[0].revision for role in Role}


def test_undo_goes_back_one_change_and_forward_again() -> None:
    world = brought_up()
    assert undo(world.observed()) is None, "there is nothing to go back to"
    first = revisions(world)
    second = rolled(world, decode={"engine": env("1")})
    third = rolled(world, engine={"blockSize": 32})
    assert len({first[Role.DECODE], second[Role.DECODE], third[Role.DECODE]}) == 3
    assert first[Role.PREFILL] == second[Role.PREFILL] != third[Role.PREFILL]

    back = undo(world.observed())
    assert back is not None
    assert back.revisions == second
    assert back.fields == ("engine.blockSize",)
    assert back.spec.get("engine") is None
    world.cluster["spec"] = copy.deepcopy(dict(back.spec))
    assert rolled(world) == second

    again = undo(world.observed())
    assert again is not None
    assert again.revisions == third


def test_undo_goes_back_only_to_what_is_stored_for_both_roles() -> None:
    """A revision that is rendered again may be another one: the operator was upgraded since."""
    world = brought_up()
    first = revisions(world)
    rolled(world, engine={"blockSize": 32})
    back = undo(world.observed())
    assert back is not None
    assert back.revisions == first
    [decode] = [
        name
        for kind, name in world.children
        if kind == "ControllerRevision" and first[Role.DECODE] in name
    ]
    del world.children["ControllerRevision", decode]
    assert undo(world.observed()) is None


def test_undo_keeps_what_is_no_part_of_the_engines() -> None:
    world = brought_up(decode={"replicas": 1}, router={"replicas": 1})
    first = revisions(world)
    second = rolled(
        world,
        decode={"replicas": 2, "engine": env("1")},
        router={"replicas": 2},
        rollout={"type": "Surge", "renew": "today"},
    )
    back = undo(world.observed())
    assert back is not None
    assert back.spec["decode"] == {"replicas": 2}
    assert back.spec["router"] == {"replicas": 2}
    assert back.spec["rollout"] == {"type": "Surge"}, "renew would ask for a newer revision"
    world.cluster["spec"] = copy.deepcopy(dict(back.spec))
    assert back.revisions == {
        Role.PREFILL: second[Role.PREFILL],  # nothing but `renew` has changed for it
        Role.DECODE: first[Role.DECODE],
    }
    assert rolled(world) == back.revisions


def test_undo_passes_over_a_spec_that_this_version_cannot_read() -> None:
    """It was stored by another version of the operator. Admission would refuse it."""
    world = brought_up()
    first = revisions(world)
    second = rolled(world, engine={"blockSize": 32})
    rolled(world, engine={"blockSize": 64})
    for (kind, name), child in world.children.items():
        if kind == "ControllerRevision" and second[Role.DECODE] in name:
            child["data"]["spec"] = {**child["data"]["spec"], "engine": {"pageSize": 32}}
        if kind == "ControllerRevision" and second[Role.PREFILL] in name:
            child["data"]["spec"] = {**child["data"]["spec"], "engine": {"pageSize": 32}}
    back = undo(world.observed())
    assert back is not None
    assert back.revisions == first


def test_a_refused_change_is_undone_to_what_runs() -> None:
    world = brought_up()
    running = revisions(world)
    world.refused = "no"
    world.edit(decode={"engine": env("1")})
    world.step()
    back = undo(world.observed())
    assert back is not None
    assert back.revisions == running


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {}, "decode": {"replicas": 3, "engine": env("1")}, "prefill": {"replicas": 2}},
        {"model": {}, "router": {"replicas": 2, "apiKeySecretRef": {"name": "x"}}},
        {"model": {}, "rollout": {"type": "Surge"}, "monitoring": {}, "operatorClass": "blue"},
    ],
)
def test_a_spec_is_its_engines_part_and_the_rest(spec: dict[str, Any]) -> None:
    assert with_spec_of_engines(spec, spec_of_engines({"spec": spec})) == spec


def test_each_state_of_a_rollout_has_its_line() -> None:
    world = SimulatedCluster(manifest())
    assert announce(world.cluster).complete is None
    assert "generation 1" in announce(world.cluster).line
    world.step()
    assert announce(world.cluster).complete is None
    assert "prefill 0/1 ready" in announce(world.cluster).line
    world.bring_up()
    said = announce(world.cluster)
    assert said.complete is True
    assert said.line == "complete: prefill 1/1 ready, decode 1/1 ready, links 1/1"

    world.edit(decode={"engine": env("1")})
    assert "generation 2" in announce(world.cluster).line
    world.step()
    assert announce(world.cluster).complete is None
    assert "decode.engine.env changed" in announce(world.cluster).line


def test_what_waits_for_somebody_ends_the_wait() -> None:
    def said(**spec: Any) -> tuple[bool | None, str]:
        world = brought_up()
        world.edit(**spec)
        for _ in range(5):
            world.step()
            world.others_act()
        found = announce(world.cluster)
        return found.complete, found.line

    complete, line = said(rollout={"paused": True}, decode={"engine": env("1")})
    assert complete is False
    assert "Paused" in line
    complete, line = said(rollout={"type": "Replace"}, decode={"engine": env("1")})
    assert complete is False
    assert "InsufficientCapacity" in line
    complete, line = said(decode={"replicas": -1})
    assert complete is False
    assert "not accepted" in line
    complete, line = said(decode={"replicas": 0})
    assert complete is True
    assert "no decode engine is wanted" in line


def test_a_deadline_that_has_passed_ends_the_wait() -> None:
    world = SimulatedCluster(manifest(rollout={"progressDeadlineSeconds": 10}))
    world.step()
    world.now += 60
    world.step()
    found = announce(world.cluster)
    assert found.complete is False
    assert "ProgressDeadlineExceeded" in found.line


def test_engines_that_are_ready_are_no_success_while_a_step_fails() -> None:
    """A NetworkPolicy, say, that the API server refuses: the change is not in force."""
    world = brought_up()
    status = world.cluster["status"]
    world.cluster["status"] = with_failure(status, world.cluster, "Forbidden", "no", world.now)
    found = announce(world.cluster)
    assert found.complete is None
    assert found.fails
    assert "Forbidden: no" in found.line


def test_the_line_counts_each_role_for_itself() -> None:
    world = brought_up(prefill={"replicas": 2}, decode={"replicas": 3})
    line = "complete: prefill 2/2 ready, decode 3/3 ready, links 6/6"
    assert announce(world.cluster).line == line


@pytest.mark.parametrize(
    ("reason", "complete"),
    [
        ("TemplateRefused", False),
        *((one, None) for one in ("Forbidden", "NameConflict", "Invalid", "Http500")),
        ("ApiServerUnreachable", None),
    ],
)
def test_a_failure_that_needs_somebody_ends_the_wait_and_others_may_pass(
    reason: str, complete: bool | None
) -> None:
    world = brought_up()
    status = world.cluster["status"]
    world.cluster["status"] = with_failure(status, world.cluster, reason, "why", world.now)
    found = announce(world.cluster)
    assert found.complete is complete
    assert found.fails is (complete is None)
    assert found.line.endswith(f"; {reason}: why")


def test_a_cluster_that_nobody_has_seen_waits_for_the_operator() -> None:
    cluster = manifest()
    for status in (None, {}, {"observedGeneration": 0}):
        assert announce({**cluster, "status": status}).complete is None
