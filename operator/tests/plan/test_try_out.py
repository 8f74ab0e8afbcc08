"""A new revision is tried out before anything is deleted."""

from __future__ import annotations

import pytest
from simulated_cluster import SimulatedCluster, brought_up, manifest

from pdcluster_operator.plan.rollout.wanted_children import refusal
from pdcluster_operator.plan.types import Delete, TryOut

LONGER = {"maxModelLen": 512}


def engines(world: SimulatedCluster) -> set[str]:
    return {name for kind, name in world.children if kind == "StatefulSet"}


def trials(world: SimulatedCluster) -> list[TryOut]:
    return [step for step in world.plan().steps if isinstance(step, TryOut)]


def test_a_new_cluster_has_nothing_to_lose_and_tries_nothing_out() -> None:
    world = SimulatedCluster(manifest())
    assert trials(world) == []
    world.bring_up()
    world.edit(decode={"replicas": 3})
    assert trials(world) == []


def test_each_role_is_tried_out_and_stored_before_an_engine_is_deleted() -> None:
    world = brought_up(rollout={"type": "Recreate"})
    old = engines(world)
    world.edit(engine=LONGER)
    plan = world.step()
    assert [type(step) for step in plan.steps] == [TryOut, TryOut]
    for step in plan.steps:
        if isinstance(step, TryOut):
            engine, pod = step.manifests
            assert (engine["kind"], pod["kind"]) == ("StatefulSet", "Pod")
            assert "name" not in pod["metadata"]
            assert engine["metadata"]["name"] not in old
            assert pod["spec"] == engine["spec"]["template"]["spec"]
    assert any(isinstance(step, Delete) for step in world.step().steps)


@pytest.mark.parametrize(
    ("how", "beside"), [("Surge", True), ("Replace", False), ("Recreate", False)]
)
def test_only_pods_of_a_surge_run_beside_the_old_ones(how: str, beside: bool) -> None:
    """A quota that is used up refuses them. It does not refuse a pod that takes another's place."""
    world = brought_up(rollout={"type": how})
    world.edit(engine=LONGER)
    assert [step.beside for step in trials(world)] == [beside, beside]


def test_what_is_refused_changes_nothing_and_the_old_engines_serve() -> None:
    world = brought_up()
    old = set(world.children)
    world.refused = "no"
    world.edit(engine={"blockSize": 32})
    for _ in range(3):
        plan = world.step()
        assert not any(isinstance(step, Delete) for step in plan.steps)
    assert set(world.children) == old
    assert world.condition("Available")["status"] == "True"
    assert world.condition("Ready")["reason"] == "Replacing"
    # The user takes it back. Nothing has to be undone.
    world.edit(engine={})
    assert world.settle().steps == ()
    assert set(world.children) == old
    assert world.condition("Ready")["status"] == "True"


def test_a_role_that_is_taken_waits_for_the_one_that_is_refused() -> None:
    world = brought_up()
    old = engines(world)
    world.edit(engine={"blockSize": 32})
    world.perform(trials(world)[0])
    world.refused = "no"
    assert len(trials(world)) == 1
    world.step()
    assert engines(world) == old


@pytest.mark.parametrize(
    ("beside", "reason", "message", "refused"),
    [
        (False, "Invalid", "spec.x: Unsupported value", True),
        (False, "Forbidden", "violates PodSecurity", True),
        (False, "Forbidden", "failed quota: q: must specify limits.cpu", True),
        (False, "Forbidden", "exceeded quota: q, requested: pods=1", False),
        (True, "Forbidden", "exceeded quota: q, requested: pods=1", True),
        (True, "ApiServerUnreachable", "no answer", False),
        (True, "InternalError", "a webhook does not answer", False),
    ],
)
def test_which_answers_refuse(beside: bool, reason: str, message: str, refused: bool) -> None:
    found = refusal(TryOut((), {}, beside, ""), "Pod", reason, message)
    assert (found is not None) is refused
    if found is not None:
        assert message in found
        assert ("rollout.type to Replace" in found) is beside, "a quota is met only beside others"


@pytest.mark.parametrize(
    ("reason", "refused"),
    [("BadRequest", True), ("Conflict", False), ("TooManyRequests", False), ("", False)],
)
def test_an_answer_refuses_only_if_the_objects_themselves_are_at_fault(
    reason: str, refused: bool
) -> None:
    """Another attempt may go well otherwise."""
    found = refusal(TryOut((), {}, beside=True, why=""), "StatefulSet", reason, "x: unknown field")
    if not refused:
        assert found is None
        return
    assert found is not None
    assert found.endswith("refuses the new StatefulSet, so the old engines serve on: "
                          "x: unknown field")  # fmt: skip


def test_the_pod_that_is_tried_out_is_as_its_statefulset_would_make_it() -> None:
    world = brought_up()
    world.edit(engine=LONGER)
    for step, role in zip(trials(world), ("prefill", "decode"), strict=True):
        engine, pod = step.manifests
        template = engine["spec"]["template"]["metadata"]
        labels = {**template["labels"], "apps.kubernetes.io/pod-index": "0"}
        assert pod["metadata"]["labels"] == labels
        assert pod["metadata"]["namespace"] == "default"
        assert pod["metadata"]["generateName"] == f"{engine['metadata']['name']}-"
        revision = step.stored["metadata"]["labels"]["pdcluster.dev/revision"]
        assert f"{role} engines of revision {revision}?" in step.why
