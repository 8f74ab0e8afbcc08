"""A new revision is tried out before anything is made of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulated_cluster import SimulatedCluster, brought_up, copied, manifest

from pdcluster_operator.api.object_names import ROLE_LABEL
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.rollout.wanted_children import refusal
from pdcluster_operator.plan.status.progress import with_failure
from pdcluster_operator.plan.types import (
    Apply,
    Delete,
    HeldCertificates,
    Plan,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
    stages,
)
from pdcluster_operator.runtime.cluster_secrets import ClusterSecrets
from pdcluster_operator.runtime.executor import Executor
from pdcluster_operator.runtime.interfaces import ApiError, Key

LONGER = {"maxModelLen": 512}


def engines(world: SimulatedCluster) -> set[str]:
    return {name for kind, name in world.children if kind == "StatefulSet"}


def trials(world: SimulatedCluster) -> list[TryOut]:
    return [step for step in world.plan().steps if isinstance(step, TryOut)]


def test_both_roles_of_a_new_cluster_are_tried_out_before_anything_makes_pods() -> None:
    """One role alone would hold its GPUs, and nothing would be served."""
    world = SimulatedCluster(manifest())
    staged = stages(world.plan().steps)
    [tried] = [stage for stage in staged if any(isinstance(step, TryOut) for step in stage)]
    assert [(step.first, step.beside) for step in trials(world)] == [(True, False)] * 2
    assert len(tried) == 2
    made = [
        {step.manifest["kind"] for step in stage if isinstance(step, Apply)} for stage in staged
    ]
    number = staged.index(tried)
    assert "ServiceAccount" in set().union(*made[:number]), "the API server asks for it"
    assert not {"StatefulSet", "Deployment"} & set().union(*made[:number])
    assert {"StatefulSet", "Deployment"} <= set().union(*made[number:])
    world.bring_up()
    world.edit(decode={"replicas": 3})
    assert trials(world) == []


class Server:
    """Carries out steps in a simulated cluster, and refuses to make pods of some roles."""

    def __init__(self, world: SimulatedCluster, *refused: Role) -> None:
        self.world, self.refused = world, refused

    async def round(self, times: int) -> list[str]:
        """Reconcile and let the others act; return the reasons of what was refused."""
        found = []
        executor = Executor(self, ClusterSecrets(self), lambda _: True)  # type: ignore[arg-type]
        for _ in range(times):
            plan = self.world.plan()
            try:
                await executor.perform(Key("default", "llama"), plan.steps, [])
            except ApiError as error:
                found.append(error.reason)
                plan = replace(plan, status=self.failed(plan, error))
            self.world.cluster["status"] = copied(dict(plan.status))
            self.world.now += 1
            self.world.others_act()
        return found

    def failed(self, plan: Plan, error: ApiError) -> dict[str, Any]:
        """Return the status as the reconciler writes it."""
        world = self.world
        return with_failure(plan.status, world.cluster, error.reason, str(error), world.now)

    async def try_out(self, step: TryOut) -> None:
        if step.manifest["metadata"]["labels"][ROLE_LABEL] in self.refused:
            raise ApiError("TemplateRefused", "Duplicate value")

    async def apply(self, manifest: Any, uid: str = "") -> Any:
        self.world.perform(Apply(manifest, "", uid))
        return manifest

    async def delete(self, step: Delete) -> None:
        self.world.perform(step)

    async def write_ticket_key(self, step: WriteTicketKey) -> None:
        self.world.perform(step)

    async def write_certificates(self, step: WriteCertificates) -> HeldCertificates:
        self.world.perform(step)
        return self.world.certificates


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("role", Role)
async def test_a_role_that_is_refused_keeps_both_from_being_created(
    role: Role, paused: bool
) -> None:
    world = SimulatedCluster(manifest(rollout={"paused": paused}))
    server = Server(world, role)
    assert await server.round(3) == ["TemplateRefused"] * 3
    kinds = {kind for kind, _ in world.children}
    assert not kinds & {"StatefulSet", "Deployment"}
    assert world.pods == {}
    # The role that is taken is stored, and is not asked about again.
    assert [step.manifest["metadata"]["labels"][ROLE_LABEL] for step in trials(world)] == [role]
    server.refused = ()
    assert await server.round(12) == []
    assert world.condition("Ready")["status"] == "True"


async def test_engines_come_and_go_while_a_change_is_refused() -> None:
    """The number of engines is no part of the change that the API server refuses."""
    world = brought_up(decode={"replicas": 3})
    server = Server(world, Role.DECODE)
    changed = {"engine": {"env": [{"name": "A", "value": "b"}]}}
    world.edit(decode={"replicas": 3, **changed})
    assert await server.round(3) == ["TemplateRefused"] * 3
    old = engines(world)
    world.edit(decode={"replicas": 1, **changed})
    assert set(await server.round(8)) == {"TemplateRefused"}
    fewer = engines(world)
    assert len(fewer) == 2
    assert fewer < old
    world.edit(decode={"replicas": 3, **changed})
    assert set(await server.round(8)) == {"TemplateRefused"}
    assert engines(world) == old


def lose(world: SimulatedCluster, role: Role) -> list[str]:
    """Somebody deletes the StatefulSets of a role, and what runs for them."""
    names = [name.stateful_set for name in world.leaders(role)]
    for name in names:
        del world.children["StatefulSet", name]
        del world.pods[f"{name}-0"]
    return names


@pytest.mark.sampled
@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("routers", [0, 1])
@pytest.mark.parametrize("roles", [(Role.DECODE,), (Role.PREFILL,), tuple(Role)])
@pytest.mark.parametrize("part", ["engine", "decode"])
async def test_engines_that_somebody_deletes_come_back_while_a_change_is_refused(
    part: str, roles: tuple[Role, ...], routers: int, paused: bool
) -> None:
    """With the last spec that was taken."""
    world = brought_up(router={"replicas": routers})
    before = engines(world)
    server = Server(world, *Role)
    env = {"env": [{"name": "A", "value": "b"}]}
    world.edit(**({part: env} if part == "engine" else {part: {"engine": env}}))
    if paused:
        world.edit(rollout={"paused": True})
    await server.round(3)
    for role in roles:
        assert lose(world, role)
    await server.round(8)
    assert engines(world) == before
    assert world.condition("Available")["status"] == "True"
    server.refused = ()
    world.edit(rollout={"paused": False})
    await server.round(30)
    assert world.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("reason", ["Forbidden", "NameConflict"])
async def test_they_come_back_although_another_child_is_refused_too(reason: str) -> None:
    """It is the first step that fails, and the status has place for one reason."""
    world = brought_up()
    before = engines(world)
    server = Server(world, *Role)
    apply = server.apply

    async def refusing(manifest: Any, uid: str = "") -> Any:
        if manifest["kind"] == "PodDisruptionBudget":
            raise ApiError(reason, "no budget")
        return await apply(manifest, uid)

    server.apply = refusing  # type: ignore[method-assign]
    world.edit(prefill={"engine": {"env": [{"name": "A", "value": "b"}]}})
    for name in [one for one in world.children if one[0] == "PodDisruptionBudget"]:
        del world.children[name]
    assert set(await server.round(3)) == {"TemplateRefused"}
    assert lose(world, Role.PREFILL)
    await server.round(8)
    assert engines(world) == before
    assert world.condition("Available")["status"] == "True"


async def test_what_nobody_knows_any_more_does_not_come_back_and_the_status_says_why() -> None:
    world = brought_up()
    server = Server(world, Role.DECODE)
    world.edit(decode={"engine": {"env": [{"name": "A", "value": "b"}]}})
    await server.round(2)
    lose(world, Role.DECODE)
    for name in [n for n in world.children if n[0] == "ControllerRevision" and "decode" in n[1]]:
        del world.children[name]
    assert set(await server.round(4)) == {"TemplateRefused"}
    assert len(engines(world)) == 1
    assert world.condition("Available")["status"] == "False"
    assert world.condition("Ready")["reason"] == "TemplateRefused"
    server.refused = ()
    await server.round(12)
    assert world.condition("Ready")["status"] == "True"


async def test_engines_are_made_of_the_new_spec_if_nobody_has_refused_it_yet() -> None:
    """They would be made of the old one, only to be replaced."""
    world = brought_up(decode={"replicas": 0})
    world.edit(decode={"replicas": 1, "engine": {"env": [{"name": "A", "value": "b"}]}})
    server = Server(world)
    old = {name for kind, name in world.children if kind == "ControllerRevision"}
    await server.round(1)
    [made] = world.leaders("decode")
    assert f"llama-decode-{made.revision}" not in old


async def test_the_refusal_of_a_spec_says_nothing_of_the_next_one() -> None:
    """Engines of the stored revision would be made, only to be replaced."""
    world = brought_up(decode={"replicas": 0})
    world.edit(decode={"replicas": 1, "engine": {"env": [{"name": "A", "value": "b"}]}})
    server = Server(world, Role.DECODE)
    old = {name for kind, name in world.children if kind == "ControllerRevision"}
    assert await server.round(1) == ["TemplateRefused"]
    assert world.condition("Progressing")["reason"] == "TemplateRefused"
    world.edit(decode={"replicas": 1, "engine": {"env": [{"name": "A", "value": "c"}]}})
    server.refused = ()
    await server.round(1)
    [made] = world.leaders("decode")
    assert f"llama-decode-{made.revision}" not in old


async def test_engines_leave_while_none_of_the_other_role_can_be_created() -> None:
    world = brought_up(prefill={"replicas": 3})
    server = Server(world, Role.DECODE)
    world.edit(decode={"replicas": 0, "engine": {"env": [{"name": "A", "value": "b"}]}})
    assert set(await server.round(8)) == {"TemplateRefused"}
    assert len(engines(world)) == 3
    world.edit(prefill={"replicas": 1})
    assert set(await server.round(8)) == {"TemplateRefused"}
    assert len(engines(world)) == 1
    world.edit(prefill={"replicas": 0})
    assert set(await server.round(8)) == {"TemplateRefused"}
    assert engines(world) == set()


def test_each_role_is_tried_out_and_stored_before_an_engine_is_deleted() -> None:
    world = brought_up(rollout={"type": "Recreate"})
    old = engines(world)
    world.edit(engine=LONGER)
    plan = world.step()
    assert [type(step) for step in plan.steps] == [TryOut, TryOut]
    assert not any(step.first for step in plan.steps if isinstance(step, TryOut))
    for step in plan.steps:
        if isinstance(step, TryOut):
            engine, pod, address = step.tried
            kinds = engine["kind"], pod["kind"], address["kind"]
            assert kinds == ("StatefulSet", "Pod", "Service")
            assert address["metadata"]["name"] == engine["spec"]["serviceName"]
            assert "name" not in pod["metadata"]
            assert engine["metadata"]["name"] not in old
            assert pod["spec"] == engine["spec"]["template"]["spec"]
    assert any(isinstance(step, Delete) for step in world.step().steps)


@pytest.mark.parametrize("kind", ["StatefulSet", "Pod", "Service"])
@pytest.mark.parametrize("stored", [False, True], ids=["a new one", "one of before"])
def test_recreate_ends_no_engine_for_one_that_is_refused_by_now(kind: str, stored: bool) -> None:
    """What is stored was tried out when it was new, and a policy may have come since."""
    world = brought_up(rollout={"type": "Recreate"})
    before = engines(world)
    world.edit(engine={"blockSize": 32})
    if stored:
        for _ in range(12):
            world.step()
            world.others_act()
        assert not before & engines(world)
        world.edit(engine={})
    else:
        world.step()
    old = engines(world)
    world.refuses = lambda step: (
        isinstance(step, TryOut) and kind in [one["kind"] for one in step.tried]
    )
    for _ in range(3):
        assert len(trials(world)) == 2
        world.step()
        world.others_act()
        assert engines(world) == old
        assert world.condition("Available")["status"] == "True"
    world.refuses = lambda _: False
    for _ in range(12):
        world.step()
        world.others_act()
    assert not old & engines(world)
    assert world.condition("Ready")["status"] == "True"
    assert trials(world) == []


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


def judged(step: TryOut, kind: str, error: ApiError) -> str | None:
    """Return why a revision is refused, as ``KubeApi.try_out`` finds it."""
    return refusal(step, kind, str(error)) if error.refuses else None


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
    found = judged(TryOut((), {}, beside, ""), "Pod", ApiError(reason, message))
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
    error = ApiError(reason, "x: unknown field")
    found = judged(TryOut((), {}, beside=True, why=""), "StatefulSet", error)
    if not refused:
        assert found is None
        return
    assert found is not None
    assert found.endswith("refuses the new StatefulSet, so the old engines serve on: "
                          "x: unknown field")  # fmt: skip


def test_the_refusal_of_a_new_cluster_says_that_nothing_was_created() -> None:
    step = TryOut((), {}, beside=False, why="", first=True)
    found = refusal(step, "StatefulSet", "Duplicate value")
    assert found == (
        "the API server refuses the new StatefulSet, so no engine of either role is created: "
        "Duplicate value"
    )


def test_the_pod_that_is_tried_out_is_as_its_statefulset_would_make_it() -> None:
    world = brought_up()
    world.edit(engine=LONGER)
    for step, role in zip(trials(world), ("prefill", "decode"), strict=True):
        engine, pod, _ = step.tried
        template = engine["spec"]["template"]["metadata"]
        labels = {**template["labels"], "apps.kubernetes.io/pod-index": "0"}
        assert pod["metadata"]["labels"] == labels
        assert pod["metadata"]["namespace"] == "default"
        assert pod["metadata"]["generateName"] == f"{engine['metadata']['name']}-"
        revision = step.manifest["metadata"]["labels"]["pdcluster.dev/revision"]
        assert f"{role} engines of revision {revision}?" in step.why
