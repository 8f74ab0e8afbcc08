"""What a step that others refuse must not hide: what is missing, and what engines were made of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rough_course import until_at_rest
from rough_hands import OWNER
from rough_world import CLUSTER, NAME, World
from served_truth import lacking
from simulated_cluster import render_other_pods

from pdcluster_operator.api.object_names import ROTATE_TICKET_KEY_ANNOTATION
from pdcluster_operator.runtime import reconcile
from pdcluster_operator.runtime.interfaces import ApiError, Conflict

ACCOUNT = ("ServiceAccount", f"{NAME}-pods")


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: World.monotonic))
    return await until_at_rest(World({}))


def upgrade(world: World, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start an operator with another connector, and perhaps with another builder."""
    world.upgrade()
    if what != "connector":
        render_other_pods(monkeypatch)


@pytest.mark.parametrize("what", ["connector", "connector and builder"])
@pytest.mark.parametrize("how", ["without an owner", "of another owner", "deleted"])
async def test_an_upgrade_replaces_no_engine_of_a_revision_that_is_not_ours_any_more(
    world: World, how: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is in conflict, so the status does not say Complete. It may be the revision's."""
    engines = {one for one in world.objects if one[0] == "StatefulSet"}
    revisions = [one for one in world.objects if one[0] == "ControllerRevision"]
    if how == "deleted":
        budget = world.touch(("PodDisruptionBudget", f"{NAME}-decode"))["metadata"]
        budget["ownerReferences"] = [{**OWNER, "controller": True}]
    else:
        for one in revisions:
            owners = [{**OWNER, "controller": True}] if how == "of another owner" else []
            world.touch(one)["metadata"]["ownerReferences"] = owners
    for _ in range(4):
        await world.reconcile()
        await world.passes(31.0)
    assert world.condition("Progressing")["reason"] == "NameConflict"
    assert world.condition("Ready")["status"] == "False"
    if how == "deleted":
        for one in revisions:
            world.remove(one)
    upgrade(world, what, monkeypatch)
    for _ in range(12):
        await world.reconcile()
        await world.passes(31.0)
    assert {one for one in world.objects if one[0] == "StatefulSet"} == engines
    assert world.condition("Available")["status"] == "True"


@pytest.mark.parametrize("change", [{"renew": "1"}, {}], ids=["renew", "env"])
async def test_a_change_is_not_forgotten_while_its_engines_have_no_stored_revision(
    world: World, change: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of engines says what they were made of, also if the status cannot say it."""
    engines = {one for one in world.objects if one[0] == "StatefulSet"}
    for one in [one for one in world.objects if one[0] == "ControllerRevision"]:
        world.touch(one)["metadata"]["ownerReferences"] = []
    for _ in range(4):
        await world.reconcile()
        await world.passes(31.0)
    env = {"engine": {"env": [{"name": "A", "value": "1"}]}}
    world.edit(rollout=change) if change else world.edit(prefill=env, decode=env)
    for number in range(24):
        if number == 2:
            upgrade(world, "connector", monkeypatch)
        await world.reconcile()
        await world.passes(31.0)
    assert not engines & world.objects.keys()


@pytest.mark.parametrize(
    "refusal", [ApiError("TooManyRequests", "try again"), Conflict("it was modified")]
)
async def test_ready_is_not_true_while_an_object_that_is_missing_cannot_be_created(
    world: World, refusal: ApiError
) -> None:
    """What is refused for a moment leaves Ready as it is, but not if something is known to lack."""
    assert world.condition("Ready")["status"] == "True"
    world.refusals["ServiceAccount"] = refusal
    world.touch(ACCOUNT)["automountServiceAccountToken"] = True
    await world.reconcile()
    assert world.condition("Ready")["status"] == "True", "it is there, and mended in a moment"
    world.remove(ACCOUNT)
    for _ in range(3):
        await world.reconcile()
        assert (world.condition("Ready")["status"], world.condition("Ready")["reason"]) == (
            "False",
            refusal.reason,
        )
        assert world.condition("Available")["status"] == "True"
        await world.passes(1.0)
    world.refusals.clear()
    await until_at_rest(world)
    assert world.condition("Ready")["status"] == "True"
    assert ACCOUNT in world.objects


MOMENTARY = [ApiError("InternalError", "failed calling webhook"), Conflict("it was modified")]


@pytest.mark.parametrize("refusal", MOMENTARY, ids=lambda one: one.reason)
@pytest.mark.parametrize("what", ["rotation", "renewal"])
async def test_a_secret_that_is_there_and_is_written_a_moment_later_leaves_ready(
    world: World, what: str, refusal: ApiError
) -> None:
    world.edit(transfer={"tls": "Enabled"})
    await until_at_rest(world)
    if what == "rotation":
        world.touch(CLUSTER)["metadata"]["annotations"] = {ROTATE_TICKET_KEY_ANNOTATION: "1"}
    else:
        world.seconds += 31 * 86400
    world.refusals["Secret"] = refusal
    await world.reconcile()
    assert world.error.startswith(refusal.reason)
    assert world.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("refusal", MOMENTARY, ids=lambda one: one.reason)
async def test_ready_says_nothing_of_what_was_created_beside_a_refusal(
    world: World, refusal: ApiError
) -> None:
    world.remove(("PodDisruptionBudget", f"{NAME}-decode"))
    service = world.touch(("Service", f"{NAME}-router"))["metadata"]
    service["labels"] = {**service["labels"], "app.kubernetes.io/part-of": "another"}
    world.refusals["Service"] = refusal
    for _ in range(3):
        await world.reconcile()
        assert world.error.startswith(refusal.reason)
        assert ("PodDisruptionBudget", f"{NAME}-decode") in world.objects
        assert world.condition("Ready")["status"] == "True"
        await world.passes(2.0)


@pytest.mark.parametrize("refused", [False, True], ids=["at rest", "while a step is refused"])
async def test_what_somebody_wrote_into_an_engine_is_not_stored_as_what_the_spec_asks_for(
    world: World, refused: bool
) -> None:
    """The name is the hash of the spec, and the content is not."""
    world.edit(decode={"engine": {"env": [{"name": "A", "value": "1"}]}})
    await until_at_rest(world)
    [engine] = [one for one in world.objects if one[0] == "StatefulSet" and "-decode-" in one[1]]
    if refused:
        world.refusals["PodDisruptionBudget"] = ApiError("Forbidden", "no")
        world.remove(("PodDisruptionBudget", f"{NAME}-decode"))
        for _ in range(3):
            await world.reconcile()
            await world.passes(31.0)
        world.remove(("Pod", f"{engine[1]}-0"))
        await world.reconcile()
    for one in [one for one in world.objects if one[0] == "ControllerRevision"]:
        world.remove(one)
    containers = world.touch(engine)["spec"]["template"]["spec"]["containers"]
    [env] = [one for it in containers for one in it.get("env", ()) if one["name"] == "A"]
    env["value"] = "9"
    await world.reconcile()
    world.refusals.clear()
    for _ in range(4):
        await world.reconcile()
        await world.passes(31.0)
    world.remove(("Pod", f"{engine[1]}-0"))
    for _ in range(12):
        await world.reconcile()
        await world.passes(31.0)
    assert world.condition("Ready")["status"] == "True"
    assert not list(lacking(world))
