"""Steps side by side, and no read that is not needed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pdcluster_operator.api.labels import CONNECTOR_LABEL
from pdcluster_operator.api.object_names import connector_name
from pdcluster_operator.plan.model import (
    Apply,
    Delete,
    HeldCertificates,
    RestartPod,
    TicketKey,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
)
from pdcluster_operator.runtime import executor
from pdcluster_operator.runtime.control_loop import RESYNC_SECONDS
from pdcluster_operator.runtime.errors import ApiError
from pdcluster_operator.runtime.executor import SECRET_SECONDS, Executor
from pdcluster_operator.runtime.queue import Key
from pdcluster_operator.runtime.rewrite_notes import RewriteNotes

KEY = Key("ns", "tiny")
CLUSTER = {"metadata": {"uid": "c"}}


class Api:
    """Counts reads, and holds every apply back until it is told to go on."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.begun: list[str] = []
        self.uids: list[str] = []  # of what was applied
        self.most = self.now = 0
        self.go = asyncio.Event()
        self.go.set()
        self.held: TicketKey | None = None
        self.certificates = HeldCertificates("authority")
        self.fail: set[str] = set()
        self.ours = True
        self.lose_after = 1_000

    async def read_uid(self, key: Key) -> str | None:
        self.reads.append("cluster")
        return "c"

    async def read_ticket_key(self, key: Key, uid: str) -> TicketKey | None:
        self.reads.append("secret")
        return self.held

    async def write_ticket_key(self, step: WriteTicketKey) -> None:
        if "Secret" in self.fail:
            raise ApiError("Forbidden", "Secret")
        self.held = TicketKey("1")

    async def read_certificates(self, key: Key, uid: str) -> HeldCertificates:
        self.reads.append("certificates")
        return self.certificates

    async def write_certificates(self, step: WriteCertificates) -> HeldCertificates:
        self.begun.append("certificates")
        if "certificates" in self.fail:
            raise ApiError("Forbidden", "certificates")
        self.certificates = HeldCertificates("authority", "1", frozenset(step.engines))
        return self.certificates

    async def apply(self, manifest: Mapping[str, Any], uid: str = "") -> Mapping[str, Any]:
        self.begun.append(manifest["metadata"]["name"])
        self.uids.append(uid)
        self.ours = len(self.begun) < self.lose_after
        self.now += 1
        self.most = max(self.most, self.now)
        await self.go.wait()
        self.now -= 1
        if manifest["metadata"]["name"] in self.fail:
            raise ApiError("Forbidden", manifest["metadata"]["name"])
        return {**manifest, "metadata": {**manifest["metadata"], "uid": "uid-of-what-was-made"}}

    async def try_out(self, step: TryOut) -> None:
        self.begun.append("try out")
        if "try out" in self.fail:
            raise ApiError("TemplateRefused", "no pod may be privileged")

    async def delete(self, step: Delete | RestartPod) -> None:
        self.begun.append(f"delete {step.name}")

    async def write_status(
        self, key: Key, uid: str, status: Mapping[str, Any], version: str = ""
    ) -> None:
        raise AssertionError("not the executor's")


def executor_of(api: Api, now: list[float] | None = None) -> Executor:
    moment = now or [0.0]
    return Executor(api, RewriteNotes(), lambda _: api.ours, lambda: moment[0])


def apply(name: str, kind: str = "Service", uid: str = "") -> Apply:
    return Apply({"kind": kind, "metadata": {"name": name}}, "a test", uid)


def secret() -> WriteTicketKey:
    metadata = {
        "annotations": {"pdcluster.dev/rotate-ticket-key": "1"},
        "ownerReferences": [{"uid": "c"}],
    }
    return WriteTicketKey({"kind": "Secret", "metadata": metadata}, rotate=False, why="a test")


async def test_a_stage_runs_side_by_side_within_its_bound_and_in_order() -> None:
    api = Api()
    api.go.clear()
    steps = [apply("engine", "StatefulSet"), *(apply(f"s-{number}") for number in range(20))]
    running = asyncio.create_task(executor_of(api).perform(KEY, CLUSTER, steps, []))
    async with asyncio.timeout(60):
        while api.now < 8:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)
    api.go.set()
    assert await running
    assert api.most == 8
    assert len(api.begun) == 21
    assert api.begun[-1] == "engine"
    assert api.reads == ["cluster"], "once for all that is created"


async def test_a_stage_that_failed_ends_and_no_other_begins() -> None:
    api = Api()
    api.fail = {"a"}
    steps = [apply("a"), apply("b"), apply("engine", "StatefulSet")]
    with pytest.raises(ApiError, match="a"):
        await executor_of(api).perform(KEY, CLUSTER, steps, [])
    assert api.begun == ["a", "b"]


async def test_a_change_of_what_is_known_reads_nothing() -> None:
    api = Api()
    gone = Delete("v1", "Service", "ns", "old", "u", "1", "a test")
    assert await executor_of(api).perform(KEY, CLUSTER, [apply("a", uid="u"), gone], [])
    assert api.reads == []
    assert api.begun == ["a", "delete old"]


async def test_a_secret_is_read_again_only_after_a_while_or_for_another_cluster() -> None:
    api, now = Api(), [0.0]
    executor = executor_of(api, now)
    for _ in range(2):
        assert await executor.ticket_key(KEY, "c") is None
    assert len(api.reads) == 2, "what is missing is looked for each time"
    await executor.perform(KEY, CLUSTER, [secret()], [])
    api.reads.clear()
    assert await executor.ticket_key(KEY, "c") == TicketKey("1")
    assert api.reads == [], "it is what we wrote"
    now[0] += 239.0
    assert await executor.ticket_key(KEY, "c") == TicketKey("1")
    assert api.reads == []
    now[0] += 1.0
    assert SECRET_SECONDS < RESYNC_SECONDS, "the next look at all clusters reads it"
    api.held = None
    assert await executor.ticket_key(KEY, "c") is None, "somebody deleted it"
    api.held = TicketKey("1")
    for uid in ("c", "c", "another", "another"):
        await executor.ticket_key(KEY, uid)
    assert len(api.reads) == 3


async def test_a_secret_that_could_not_be_written_is_not_known() -> None:
    api = Api()
    executor = executor_of(api)
    api.held = TicketKey("0")
    assert await executor.ticket_key(KEY, "c") == TicketKey("0")
    api.fail = {"Secret"}
    with pytest.raises(ApiError):
        await executor.perform(KEY, CLUSTER, [secret()], [])
    api.reads.clear()
    await executor.ticket_key(KEY, "c")
    assert api.reads == ["secret"]


def certificates() -> WriteCertificates:
    metadata = {"name": "tiny-certificates"}
    secret = {"kind": "Secret", "metadata": metadata}
    return WriteCertificates(secret, {"prefill-a-0": "ns.tiny.prefill.a.0"}, 0.0, 1.0, "a test")


async def test_certificates_are_read_once_in_a_while_also_where_there_are_none() -> None:
    api, now = Api(), [0.0]
    executor = executor_of(api, now)
    for _ in range(3):
        assert await executor.certificates(KEY, "c") == HeldCertificates("authority")
    assert api.reads == ["certificates"]
    await executor.certificates(KEY, "another")
    now[0] += SECRET_SECONDS
    await executor.certificates(KEY, "another")
    assert len(api.reads) == 3


async def test_certificates_are_read_again_once_they_are_written_or_could_not_be() -> None:
    api = Api()
    executor = executor_of(api)
    await executor.certificates(KEY, "c")
    assert await executor.perform(KEY, CLUSTER, [certificates()], [])
    assert (await executor.certificates(KEY, "c")).engines == {"prefill-a-0"}
    api.certificates, api.fail = HeldCertificates("authority"), {"certificates"}
    with pytest.raises(ApiError):
        await executor.perform(KEY, CLUSTER, [certificates()], [])
    assert (await executor.certificates(KEY, "c")).issue is None


async def test_engines_wait_for_their_certificates_and_both_for_a_cluster_that_is_there() -> None:
    api = Api()
    engine = apply("engine", "StatefulSet", uid="u")
    assert await executor_of(api).perform(KEY, CLUSTER, [engine, certificates()], [])
    assert api.begun == ["certificates", "engine"]
    assert api.reads == ["cluster"], "the Secret of a cluster that is gone would be created again"
    api.begun.clear()
    api.fail = {"certificates"}
    with pytest.raises(ApiError):
        await executor_of(api).perform(KEY, CLUSTER, [engine, certificates()], [])
    assert api.begun == ["certificates"]


def connector() -> Apply:
    name = connector_name("ab" * 32)
    labels = {CONNECTOR_LABEL: "ab" * 32}
    metadata = {"namespace": "ns", "name": name, "labels": labels}
    return Apply({"kind": "ConfigMap", "metadata": metadata}, "a test")


async def test_what_many_clusters_need_at_once_is_created_once() -> None:
    api, there, labels = Api(), "", connector().manifest["metadata"]["labels"]
    api.go.clear()

    def held(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
        metadata = {**manifest["metadata"], "uid": there, "labels": labels}
        return {**manifest, "metadata": metadata} if there else None

    executor = Executor(api, RewriteNotes(), lambda _: True, held=held)
    keys = [Key("ns", f"c-{number}") for number in range(20)]
    running = [
        asyncio.create_task(executor.perform(key, CLUSTER, [connector()], [])) for key in keys
    ]
    async with asyncio.timeout(60):
        while len(api.reads) < len(keys):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)
    api.go.set()
    assert await asyncio.gather(*running) == [True] * len(keys)
    assert len(api.begun) == 1
    there = "uid-of-what-was-made"
    assert await executor.perform(KEY, CLUSTER, [connector()], [])
    assert len(api.begun) == 1, "its plan is older than what another cluster's plan made"
    for number, other in enumerate(("", "uid-of-another"), start=2):
        there = other
        assert await executor.perform(KEY, CLUSTER, [connector()], [])
        assert len(api.begun) == number, "somebody deleted it, or made another"
    there, labels = "uid-of-what-was-made", {}
    assert await executor.perform(KEY, CLUSTER, [connector()], [])
    assert len(api.begun) == 4, "somebody took its labels away"


async def test_a_shared_object_that_is_there_is_put_right_as_any_other() -> None:
    api = Api()
    executor = executor_of(api)
    changed = replace(connector(), uid="u")
    for _ in range(2):
        assert await executor.perform(KEY, CLUSTER, [changed], [])
    assert api.uids == ["u", "u"], "each time, and only the one that was seen"
    assert api.reads == [], "nothing is created"


@pytest.mark.parametrize("refused", [False, True])
async def test_a_revision_is_stored_only_if_the_server_would_take_its_pods(refused: bool) -> None:
    api = Api()
    api.fail = {"try out"} if refused else set()
    stored = {"kind": "ControllerRevision", "metadata": {"name": "revision"}}
    step = TryOut((), stored, True, "a test")
    if refused:
        with pytest.raises(ApiError):
            await executor_of(api).perform(KEY, CLUSTER, [step], [])
    else:
        assert await executor_of(api).perform(KEY, CLUSTER, [step], [])
    assert api.begun == ["try out", *(["revision"] * (not refused))]
    assert api.reads == ["cluster"]


async def test_a_key_is_minted_only_for_a_cluster_that_is_there() -> None:
    api = Api()
    assert await executor_of(api).perform(KEY, CLUSTER, [secret()], [])
    assert api.reads == ["cluster"]
    assert not await executor_of(api).perform(KEY, {"metadata": {"uid": "gone"}}, [secret()], [])


async def test_who_waits_for_a_creation_may_be_cancelled_alone() -> None:
    api = Api()
    api.go.clear()
    executor = executor_of(api)
    first, second = (
        asyncio.create_task(executor.perform(Key("ns", name), CLUSTER, [connector()], []))
        for name in ("a", "b")
    )
    async with asyncio.timeout(60):
        while not api.begun or len(api.reads) < 2:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    first.cancel()
    api.go.set()
    assert await second
    assert len(api.begun) == 1


async def test_all_who_wait_for_a_creation_hear_that_it_failed() -> None:
    api = Api()
    step = connector()
    api.fail = {step.manifest["metadata"]["name"]}
    executor = executor_of(api)
    calls = (executor.perform(KEY, CLUSTER, [step], []) for _ in range(3))
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in ended] == [ApiError] * 3
    api.fail.clear()
    assert await executor.perform(KEY, CLUSTER, [step], [])


async def test_nothing_is_written_without_the_lease() -> None:
    api = Api()
    api.ours = False
    executor = executor_of(api)
    assert not await executor.perform(KEY, CLUSTER, [apply("a")], [])
    assert await executor.perform(KEY, CLUSTER, [], [])
    assert api.begun == api.reads == []


async def test_a_lease_that_is_lost_between_two_steps_stops_the_rest() -> None:
    api = Api()
    api.lose_after = 3
    steps = [*(apply(f"s-{number}") for number in range(20)), apply("engine", "StatefulSet")]
    assert not await executor_of(api).perform(KEY, CLUSTER, steps, [])
    assert len(api.begun) < 20
    assert "engine" not in api.begun


async def test_a_step_that_still_waits_when_the_lease_is_lost_is_not_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An API server that is overloaded asks a call to wait, for up to a minute."""
    monkeypatch.setattr(executor, "LEASE_CHECK_SECONDS", 0.01)
    api = Api()
    api.go.clear()
    running = asyncio.create_task(executor_of(api).perform(KEY, CLUSTER, [apply("a", uid="a")], []))
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


async def test_a_cluster_is_looked_for_before_it_gets_more_unless_it_was_just_reported() -> None:
    api, reported = Api(), 299.0
    executor = Executor(api, RewriteNotes(), lambda _: True, reported_seconds=lambda *_: reported)
    for seconds, uid, reads in (
        (299.0, "c", 0),  # its first children: if it is gone, they are deleted with it
        (299.0, "c", 1),
        (5.0, "c", 1),
        (4.9, "c", 0),
        (299.0, "c", 1),
        (300.0, "another", 1),
    ):
        reported = seconds
        api.reads.clear()
        await executor.perform(KEY, {"metadata": {"uid": uid}}, [apply("a")], [])
        assert len(api.reads) == reads, (seconds, uid)


async def test_after_another_operator_may_have_written_everything_is_read_again() -> None:
    api = Api()
    api.held, api.certificates = TicketKey("1"), HeldCertificates("authority", "1")
    executor = Executor(api, RewriteNotes(), lambda _: True, reported_seconds=lambda *_: 60.0)
    await executor.perform(KEY, CLUSTER, [apply("a")], [])
    assert not executor.knows(KEY, "c")
    await executor.ticket_key(KEY, "c")
    assert not executor.knows(KEY, "c"), "nobody has read the certificates"
    await executor.certificates(KEY, "c")
    assert executor.knows(KEY, "c")
    assert not executor.knows(KEY, "another")
    api.reads.clear()
    executor.forget(KEY)
    assert not executor.knows(KEY, "c")
    await executor.ticket_key(KEY, "c")
    await executor.certificates(KEY, "c")
    await executor.perform(KEY, CLUSTER, [apply("a")], [])
    assert api.reads == ["secret", "certificates"], "the cluster was reported a minute ago"


async def test_nothing_is_read_for_a_new_cluster_once_it_is_known_what_no_secret_means() -> None:
    api = Api()
    executor = executor_of(api)
    api.certificates = HeldCertificates("authority", "1", frozenset({"prefill-a-0"}))
    await executor.certificates(Key("ns", "secured"), "s")
    api.certificates = HeldCertificates("authority")
    assert await executor.certificates(KEY, "c", new=True) == api.certificates
    assert await executor.ticket_key(KEY, "c", new=True) is None
    assert api.reads == ["certificates"] * 2, "those of another cluster say nothing of this one"
    assert await executor.certificates(Key("ns", "next"), "n", new=True) == api.certificates
    assert len(api.reads) == 2


async def test_certificates_that_were_just_written_are_not_read() -> None:
    api = Api()
    executor = executor_of(api)
    await executor.certificates(KEY, "c")
    await executor.perform(KEY, CLUSTER, [certificates()], [])
    api.reads.clear()
    assert (await executor.certificates(KEY, "c")).issue == "1"
    assert api.reads == []
