"""Steps of one stage run concurrently, stages one after another, and only with the Lease."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pdcluster_operator.api.object_names import EngineName, engine_labels
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.types import (
    Apply,
    Delete,
    HeldCertificates,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
)
from pdcluster_operator.runtime import executor
from pdcluster_operator.runtime.cluster_secrets import ClusterSecrets
from pdcluster_operator.runtime.executor import SIDE_BY_SIDE, Executor
from pdcluster_operator.runtime.interfaces import ApiError, Conflict, Key

KEY = Key("ns", "tiny")


class Api:
    """Records calls, and lets no apply end before ``go`` is set."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.most = self.now = 0
        self.go = asyncio.Event()
        self.go.set()
        self.held: str | None = None
        self.certificates = HeldCertificates("authority")
        self.fail: set[str] = set()
        self.reason = "Forbidden"
        self.errors: dict[str, ApiError] = {}
        self.ours = True
        self.lose_after = 1_000

    async def write_ticket_key(self, step: WriteTicketKey) -> None:
        self.begun.append("ticket key")
        if "ticket key" in self.fail:
            raise ApiError("Immutable", "ticket key")
        self.held = "1"

    async def write_certificates(self, step: WriteCertificates) -> HeldCertificates:
        self.begun.append("certificates")
        if "certificates" in self.fail:
            raise ApiError("Forbidden", "certificates")
        self.certificates = HeldCertificates("authority", "1", frozenset(step.engines))
        return self.certificates

    async def apply(self, manifest: Mapping[str, Any], uid: str = "") -> Mapping[str, Any]:
        self.begun.append(manifest["metadata"]["name"])
        self.ours = len(self.begun) < self.lose_after
        self.now += 1
        self.most = max(self.most, self.now)
        await self.go.wait()
        self.now -= 1
        if (error := self.errors.get(manifest["metadata"]["name"])) is not None:
            raise error
        if manifest["metadata"]["name"] in self.fail:
            raise ApiError(self.reason, manifest["metadata"]["name"])
        return {**manifest, "metadata": {**manifest["metadata"], "uid": "uid-of-what-was-made"}}

    async def try_out(self, step: TryOut) -> None:
        self.begun.append("try out")
        if "try out" in self.fail:
            raise ApiError("TemplateRefused", "no pod may be privileged")

    async def delete(self, step: Delete) -> None:
        self.begun.append(f"delete {step.name}")


def executor_of(api: Api) -> Executor:
    return Executor(api, ClusterSecrets(api), lambda _: api.ours)


def apply(name: str, kind: str = "Service", uid: str = "") -> Apply:
    return Apply({"kind": kind, "metadata": {"name": name}}, "a test", uid)


async def test_a_stage_runs_side_by_side_within_its_bound_and_in_order() -> None:
    api = Api()
    api.go.clear()
    steps = [apply("engine", "StatefulSet"), *(apply(f"s-{number}") for number in range(20))]
    running = asyncio.create_task(executor_of(api).perform(KEY, steps, []))
    async with asyncio.timeout(60):
        while api.now < SIDE_BY_SIDE:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)
    api.go.set()
    assert await running
    assert api.most == SIDE_BY_SIDE
    assert len(api.begun) == 21
    assert api.begun[-1] == "engine"


def engine(name: str, uid: str = "") -> Apply:
    spec = {"serviceName": name, "template": {"spec": {"serviceAccountName": "tiny"}}}
    return Apply({"kind": "StatefulSet", "metadata": {"name": name}, "spec": spec}, "a test", uid)


def address_of(engine: Apply) -> Apply:
    """Return the Service of an engine."""
    name = engine.manifest["metadata"]["name"]
    labels = engine_labels(EngineName("ns", "tiny", Role.DECODE, "a", 0), "key")
    return Apply({"kind": "Service", "metadata": {"name": name, "labels": labels}}, "a test")


async def test_a_refusal_stops_what_needs_it_and_nothing_else() -> None:
    api = Api()
    first, second = engine("decode-a-0"), engine("decode-a-1")
    api.fail = {"decode-a-0"}
    gone = Delete("StatefulSet", "ns", "old", "u", "1", "a test")
    with pytest.raises(ApiError, match="decode-a-0"):
        await executor_of(api).perform(KEY, [address_of(first), first, second, gone], [])
    assert api.begun == ["decode-a-0", "decode-a-1", "delete old"]


@pytest.mark.parametrize(
    ("refused", "kind", "goes"),
    [
        ("Deployment", "StatefulSet", False),
        ("Deployment", "Deployment", False),
        ("Service", "Deployment", False),
        ("Service", "StatefulSet", True),
    ],
)
async def test_an_engine_goes_after_the_routers_and_they_after_the_address_for_clients(
    refused: str, kind: str, goes: bool
) -> None:
    api = Api()
    api.fail = {"tiny-router"}
    gone = Delete(kind, "ns", "old", "u", "1", "a test")
    with pytest.raises(ApiError, match="tiny-router"):
        await executor_of(api).perform(KEY, [apply("tiny-router", refused, uid="u"), gone], [])
    assert api.begun == ["tiny-router", *(["delete old"] * goes)]


@pytest.mark.parametrize(
    "reason", ["ApiServerUnreachable", "NamespaceTerminating", "TooManyRequests"]
)
async def test_nothing_more_is_asked_of_a_server_that_refuses_everything(reason: str) -> None:
    api = Api()
    api.fail, api.reason = {"a"}, reason
    with pytest.raises(ApiError, match="a"):
        await executor_of(api).perform(KEY, [apply("a"), apply("b"), engine("decode-a-0")], [])
    assert api.begun == ["a", "b"], "the steps of one stage begin together"


async def test_what_passes_by_itself_is_not_reported_if_something_else_does_not() -> None:
    api = Api()
    api.errors = {"a": Conflict("it has changed")}
    api.fail = {"decode-a-0"}
    with pytest.raises(ApiError, match="decode-a-0"):
        await executor_of(api).perform(KEY, [apply("a"), engine("decode-a-0")], [])
    with pytest.raises(Conflict):
        await executor_of(api).perform(KEY, [apply("a"), engine("decode-a-1")], [])


async def test_what_needs_a_step_that_was_left_out_is_left_out_too() -> None:
    """The routers go on with the old engines, so these stay."""
    api = Api()
    api.fail = {"tiny"}
    routers = replace(engine("tiny-router"), manifest={**engine("tiny-router").manifest,
                                                       "kind": "Deployment"})  # fmt: skip
    gone = Delete("StatefulSet", "ns", "old", "u", "1", "a test")
    with pytest.raises(ApiError, match="tiny"):
        await executor_of(api).perform(KEY, [apply("tiny", "ServiceAccount"), routers, gone], [])
    assert api.begun == ["tiny"]


@pytest.mark.parametrize("makes_room", [False, True])
async def test_no_engine_makes_room_for_one_without_certificates(makes_room: bool) -> None:
    api = Api()
    api.fail = {"certificates"}
    gone = Delete("StatefulSet", "ns", "old", "u", "1", "a test", makes_room)
    address = replace(apply("tiny-router", uid="u"), makes_room=makes_room)
    with pytest.raises(ApiError, match="certificates"):
        await executor_of(api).perform(KEY, [address, certificates(), gone], [])
    others = [] if makes_room else ["tiny-router", "delete old"]
    assert sorted(api.begun) == sorted(["certificates", *others])


@pytest.mark.parametrize(
    ("kind", "pod"),
    [
        ("PodGroup", {"schedulingGroup": {"podGroupName": "refused"}}),
        ("ConfigMap", {"volumes": [{"name": "connector", "configMap": {"name": "refused"}}]}),
    ],
)
async def test_no_engine_is_made_whose_pods_would_wait_for_what_was_refused(
    kind: str, pod: dict[str, Any]
) -> None:
    api = Api()
    api.fail = {"refused"}
    manifest = engine("decode-a-0").manifest
    spec = {"serviceName": "decode-a-0", "template": {"spec": pod}}
    needy = Apply({**manifest, "spec": spec}, "a test")
    with pytest.raises(ApiError, match="refused"):
        await executor_of(api).perform(
            KEY, [apply("refused", kind), needy, engine("decode-a-1")], []
        )
    assert api.begun == ["refused", "decode-a-1"]


async def test_no_engine_makes_room_for_one_whose_revision_is_not_stored() -> None:
    api = Api()
    api.fail = {"tiny-decode-b"}
    gone = Delete("StatefulSet", "ns", "old", "u", "1", "a test", makes_room=True)
    steps = [apply("tiny-decode-b", "ControllerRevision", uid="u"), gone]
    with pytest.raises(ApiError, match="tiny-decode-b"):
        await executor_of(api).perform(KEY, steps, [])
    assert api.begun == ["tiny-decode-b"]


async def test_a_first_trial_that_is_refused_stops_nothing_that_exists() -> None:
    """Such as routers before engines of the other role, or one of these that is put right."""
    api = Api()
    api.fail = {"try out"}
    trial = TryOut((), {"kind": "ControllerRevision", "metadata": {"name": "new"}}, True, "a test",
                   first=True)  # fmt: skip
    there = [apply("tiny-router", "Deployment", uid="u"), engine("decode-a-0", uid="u")]
    with pytest.raises(ApiError, match="no pod may be privileged"):
        await executor_of(api).perform(KEY, [trial, *there, engine("prefill-b-0")], [])
    assert sorted(api.begun) == ["decode-a-0", "tiny-router", "try out"]


async def test_that_a_revision_is_refused_is_said_whatever_else_is() -> None:
    """The planner reads it in the status: then engines are made of the stored revision."""
    api = Api()
    api.fail = {"try out", "budget"}
    trial = TryOut((), {"kind": "ControllerRevision", "metadata": {"name": "new"}}, True, "a test")
    with pytest.raises(ApiError, match="no pod may be privileged"):
        await executor_of(api).perform(KEY, [apply("budget", "PodDisruptionBudget"), trial], [])


async def test_a_change_and_a_deletion_are_performed_in_order() -> None:
    api = Api()
    gone = Delete("Service", "ns", "old", "u", "1", "a test")
    assert await executor_of(api).perform(KEY, [apply("a", uid="u"), gone], [])
    assert api.begun == ["a", "delete old"]


def certificates() -> WriteCertificates:
    metadata = {"name": "tiny-certificates"}
    secret = {"kind": "Secret", "metadata": metadata}
    return WriteCertificates(secret, {"prefill-a-0": "ns.tiny.prefill.a.0"}, 0.0, 1.0, "a test")


async def test_engines_wait_for_their_certificates() -> None:
    api = Api()
    engine = apply("engine", "StatefulSet", uid="u")
    assert await executor_of(api).perform(KEY, [engine, certificates()], [])
    assert api.begun == ["certificates", "engine"]
    api.begun.clear()
    api.fail = {"certificates"}
    with pytest.raises(ApiError):
        await executor_of(api).perform(KEY, [engine, certificates()], [])
    assert api.begun == ["certificates"]


async def test_routers_wait_for_no_secret_of_the_engines() -> None:
    """An engine that is evicted ends when they have forgotten it."""
    api = Api()
    api.fail = {"certificates", "ticket key"}
    secret = {"kind": "Secret", "metadata": {"name": "tiny-ticket-key"}}
    steps = [WriteTicketKey(secret, rotate=False, why="a test"), certificates()]
    with pytest.raises(ApiError):
        await executor_of(api).perform(KEY, [*steps, apply("router", "Deployment", uid="u")], [])
    assert sorted(api.begun) == ["certificates", "router", "ticket key"]


@pytest.mark.parametrize("rotate", [False, True])
async def test_nothing_waits_for_another_ticket_key_but_for_the_first_one(rotate: bool) -> None:
    api = Api()
    api.fail = {"ticket key"}
    secret = {"kind": "Secret", "metadata": {"name": "tiny-ticket-key"}}
    step = WriteTicketKey(secret, rotate=rotate, why="a test")
    with pytest.raises(ApiError, match="ticket key"):
        await executor_of(api).perform(KEY, [step, apply("engine", "StatefulSet", uid="u")], [])
    assert api.begun == ["ticket key", *(["engine"] * rotate)]


@pytest.mark.parametrize("refused", [False, True])
async def test_a_revision_is_stored_only_if_the_server_would_take_its_pods(refused: bool) -> None:
    api = Api()
    api.fail = {"try out"} if refused else set()
    stored = {"kind": "ControllerRevision", "metadata": {"name": "revision"}}
    step = TryOut((), stored, True, "a test")
    if refused:
        with pytest.raises(ApiError):
            await executor_of(api).perform(KEY, [step], [])
    else:
        assert await executor_of(api).perform(KEY, [step], [])
    assert api.begun == ["try out", *(["revision"] * (not refused))]


async def test_a_revision_that_is_stored_is_tried_out_and_not_written_again() -> None:
    """A Recreate asks each time before it ends old engines, also while something else holds it."""
    api = Api()
    stored = {"kind": "ControllerRevision", "metadata": {"name": "revision"}}
    assert await executor_of(api).perform(KEY, [TryOut((), stored, True, "a test", uid="u")], [])
    assert api.begun == ["try out"]


async def test_nothing_is_written_without_the_lease() -> None:
    api = Api()
    api.ours = False
    executor = executor_of(api)
    assert not await executor.perform(KEY, [apply("a")], [])
    assert await executor.perform(KEY, [], [])
    assert api.begun == []


async def test_a_lease_that_is_lost_between_two_steps_stops_the_rest() -> None:
    api = Api()
    api.lose_after = 3
    steps = [*(apply(f"s-{number}") for number in range(20)), apply("engine", "StatefulSet")]
    assert not await executor_of(api).perform(KEY, steps, [])
    assert len(api.begun) < 20
    assert "engine" not in api.begun


async def test_a_step_that_still_waits_when_the_lease_is_lost_is_not_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An API server that is overloaded asks a call to wait, for up to a minute."""
    monkeypatch.setattr(executor, "LEASE_CHECK_SECONDS", 0.01)
    api = Api()
    api.go.clear()
    running = asyncio.create_task(executor_of(api).perform(KEY, [apply("a", uid="a")], []))
    async with asyncio.timeout(60):
        while not api.begun:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert not running.done(), "it may take as long as the Lease is held"
        api.ours = False
        assert not await running
    api.go.set()
    await asyncio.sleep(0.01)
    assert api.now == 1, "it never got through"
