"""The reconcile loop over the in-memory API, with ports that fail on demand."""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from listing import list_into
from polled_launchers import PolledLaunchers

from authority import Authority
from pdcluster_connector.protocol.engine_id import OPERATOR_NAME
from pdcluster_connector.protocol.launcher_documents import EngineReport, LinksReport, PeersDocument
from pdcluster_operator.adapters.engine_authority import (
    EngineAuthority,
    held_certificates,
    with_certificates,
)
from pdcluster_operator.adapters.engines_http import EnginesHttp
from pdcluster_operator.api.conditions import ConditionType, set_conditions, yes
from pdcluster_operator.api.object_names import (
    API_VERSION,
    ROTATE_TICKET_KEY_ANNOTATION,
    TICKET_KEY_HASH_ANNOTATION,
    certificates_name,
)
from pdcluster_operator.local.api_server import LocalApi
from pdcluster_operator.plan import launchers, planner
from pdcluster_operator.plan.builders.engine_objects import POD_GROUP_KIND
from pdcluster_operator.plan.builders.protection import operator_namespace_in
from pdcluster_operator.plan.launchers import Target, launchers_to_poll
from pdcluster_operator.plan.lifecycle import (
    FIRST_CHILDREN_SECONDS,
    JUST_REPORTED_SECONDS,
    LONGEST_WAIT_SECONDS,
)
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.scaling import follow
from pdcluster_operator.plan.status import pace, progress
from pdcluster_operator.plan.status.events import transitions
from pdcluster_operator.plan.status.pace import LONGEST_SECONDS
from pdcluster_operator.plan.types import (
    ConnectorBundle,
    Delete,
    Event,
    HeldCertificates,
    Observed,
    Place,
    Plan,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
)
from pdcluster_operator.runtime import reconcile
from pdcluster_operator.runtime.cluster_secrets import held_ticket_key, with_a_new_key
from pdcluster_operator.runtime.control_loop import RESYNC_SECONDS, ControlLoop
from pdcluster_operator.runtime.interfaces import ApiError, Conflict, Key, NamespaceTerminating
from pdcluster_operator.runtime.launcher_monitor import LauncherMonitor
from pdcluster_operator.runtime.reconcile import Reconciler
from pdcluster_operator.runtime.store import Store

KEY = Key("ns", "tiny")
MANIFEST: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "PDCluster",
    "metadata": {"name": "tiny", "namespace": "ns"},
    "spec": {"model": {"source": {"huggingFace": {"repo": "org/model"}}}},
}


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may wait (plan.status.pace) also waits on a slow machine."""
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: 1000.0))


class RecordingApi:
    """The in-memory API behind the port, with a log of writes and failures to order."""

    def __init__(self, api: LocalApi) -> None:
        self.api = api
        self.authority, _ = EngineAuthority.new(fixed())
        self.writes: list[str] = []
        self.reads: list[str] = []
        self.fail: dict[str, ApiError] = {}
        self.live: dict[str, Any] = {}  # of the PDCluster's metadata, beside what the store knows
        self.mutate: Callable[[dict[str, Any]], dict[str, Any]] = lambda manifest: manifest

    async def read(self, kind: str, namespace: str, name: str) -> Any:
        live = self.api.get(kind, namespace, name)
        if kind == "PDCluster":
            self.reads.append(kind)
            return live and {**live, "metadata": {**live["metadata"], **self.live}}
        self.reads.append("owner")
        if "read owner" in self.fail:
            raise self.fail["read owner"]
        return live

    async def read_ticket_key(self, key: Key, uid: str) -> str | None:
        self.reads.append("ticket key")
        if "read Secret" in self.fail:
            raise self.fail["read Secret"]
        return held_ticket_key(self.api.get("Secret", key.namespace, f"{key.name}-ticket-key"))

    async def write_ticket_key(self, step: WriteTicketKey) -> None:
        self._write("write Secret")
        metadata = step.manifest["metadata"]
        live = self.api.get("Secret", metadata["namespace"], metadata["name"])
        if held_ticket_key(live) is not None and not step.rotate:
            raise Conflict("the Secret is there already")
        self.api.apply(with_a_new_key(step, live))

    async def read_certificates(self, key: Key, uid: str) -> HeldCertificates:
        self.reads.append("certificates")
        if "read certificates" in self.fail:
            raise self.fail["read certificates"]
        live = self.api.get("Secret", key.namespace, certificates_name(key.name))
        return held_certificates(live, self.authority)

    async def write_certificates(self, step: WriteCertificates) -> HeldCertificates:
        self._write("write certificates")
        return held_certificates(
            self.api.apply(with_certificates(step, self.authority)), self.authority
        )

    async def apply(self, manifest: Mapping[str, Any], uid: str = "") -> Mapping[str, Any]:
        metadata = manifest["metadata"]
        live = self.api.get(manifest["kind"], metadata["namespace"], metadata["name"])
        assert uid == (live["metadata"]["uid"] if live else ""), "what the store knows"
        self._write(f"apply {manifest['kind']}")
        return self.api.apply(self.mutate(copy.deepcopy(dict(manifest))))

    async def try_out(self, step: TryOut) -> None:
        self._write("try out")

    async def delete(self, step: Delete) -> None:
        kind = step.kind if isinstance(step, Delete) else "Pod"
        self._write(f"delete {kind}")
        self.api.delete(
            kind, step.namespace, step.name, uid=step.uid, resource_version=step.resource_version
        )

    async def write_status(
        self,
        key: Key,
        uid: str,
        status: Mapping[str, Any],
        version: str = "",
        kind: str = "PDCluster",
    ) -> None:
        assert version or kind == "PrefillScaler"
        self._write("status" if kind == "PDCluster" else "scaler status")
        self.api.set_status(kind, *key, dict(status), uid)

    def _write(self, what: str) -> None:
        self.writes.append(what)
        if what in self.fail:
            raise self.fail[what]


class Nobody:
    """Launchers that nobody has started, and events that nobody reads."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.refusal: ApiError | None = None

    async def publish(self, cluster: Mapping[str, Any], events: Iterable[Event]) -> None:
        assert cluster["metadata"]["name"] == "tiny"
        if self.refusal is not None:
            raise self.refusal
        self.events += events


class Serving(PolledLaunchers):
    """Launchers of engines that serve, once they are allowed to answer."""

    def __init__(self, engines: Mapping[str, str]) -> None:
        self.engines = engines
        self.may_answer = asyncio.Event()

    async def ready(self, target: Target) -> EngineReport:
        url = target.url
        await self.may_answer.wait()
        return EngineReport(ready=True, engine=self.engines[url], engine_id=f"{url}/1")

    async def links(self, target: Target) -> LinksReport:
        url = target.url
        return LinksReport(self.engines[url], f"{url}/1", ())

    async def put_peers(self, target: Target, document: PeersDocument) -> None:
        assert document

    async def tell_routed(self, target: Target, *, routed: bool) -> None:
        raise AssertionError("these launchers are of a version that cannot be told")


BUNDLE = ConnectorBundle("ab" * 32, b"zip")


def fixed() -> float:
    return 1_700_000_000.0


class World:
    def __init__(self, **spec: Any) -> None:
        self.now, self.pretended = 0.0, itertools.count()
        self.api, self.store, self.events = LocalApi(), Store(lambda: self.now), Nobody()
        self.port = RecordingApi(self.api)
        self.start(self.events)
        self.api.watch(self._see)
        manifest = copy.deepcopy(MANIFEST)
        manifest["spec"] |= spec
        self.api.apply(manifest)

    def start(self, launchers: object, queued: int = 0, **allowed: Any) -> None:
        """A process of the operator, which has not asked anybody yet.

        Args:
            queued: how many other clusters wait to be reconciled.
            allowed: what the Reconciler is told of its place and of its rights.
        """
        self.monitor = LauncherMonitor(launchers, lambda _: None, period=0.01)  # type: ignore[arg-type]
        self.reconciler = Reconciler(
            store=self.store,
            api_server=self.port,
            monitor=self.monitor,
            events=self.events,
            connector=BUNDLE,
            clock=fixed,
            queued=lambda: queued,
            **{"place": Place(), "may_write": lambda _: True, **allowed},
        )

    def _see(self, event: str, manifest: dict[str, Any]) -> None:
        if manifest["kind"] in ("Secret", "ReplicaSet"):
            return  # nobody watches them
        (self.store.drop if event == "DELETED" else self.store.put)(manifest)

    def pretend(self, manifest: dict[str, Any]) -> None:
        """Let the store hold what the API server does not have."""
        metadata = manifest["metadata"]
        version = f"{next(self.pretended)} after {metadata['resourceVersion']}"
        self.store.put({**manifest, "metadata": {**metadata, "resourceVersion": version}})

    async def reconcile(self) -> float | None:
        self.port.writes.clear()
        return await self.reconciler.reconcile(KEY)

    def condition(self, kind: str) -> dict[str, Any]:
        conditions = self.api.get("PDCluster", *KEY)["status"]["conditions"]
        return next(c for c in conditions if c["type"] == kind)


async def test_children_come_first_then_the_status() -> None:
    world = World()
    assert await world.reconcile() is not None
    assert world.port.writes[-1] == "status"
    assert world.port.writes.count("status") == 1
    assert world.port.writes.count("apply StatefulSet") == 2
    assert world.condition("Accepted")["status"] == "True"
    kinds = {child["kind"] for child in world.store.children(KEY)}
    assert kinds >= {"StatefulSet", "Service", "Deployment"}
    assert len(world.store.connectors("ns")) == 1


async def test_a_new_cluster_that_is_refused_says_why_once_and_holds_nothing() -> None:
    world = World()
    world.port.fail["try out"] = ApiError("TemplateRefused", "ports[5].name: Duplicate value")
    for _ in range(3):
        with pytest.raises(ApiError, match="Duplicate value"):
            await world.reconcile()
        for kind in ("Ready", "Progressing"):
            said = world.condition(kind)
            assert (said["status"], said["reason"]) == ("False", "TemplateRefused")
            assert said["message"] == "ports[5].name: Duplicate value"
    kinds = {child["kind"] for child in world.store.children(KEY)}
    assert not kinds & {"StatefulSet", "Deployment"}
    assert [(one.type, one.reason) for one in world.events.events] == [
        ("Warning", "TemplateRefused")
    ]
    del world.port.fail["try out"]
    await world.reconcile()
    assert world.port.writes.count("apply StatefulSet") == 2
    assert world.condition("Ready")["reason"] == "PodsMissing"


async def test_in_a_crowd_children_are_written_and_the_first_status_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.start(world.events, queued=1000)
    wait = await world.reconcile()
    assert wait is not None
    assert wait <= LONGEST_SECONDS
    assert world.port.writes.count("apply StatefulSet") == 2
    assert "status" not in world.port.writes
    assert world.events.events == []
    later = SimpleNamespace(monotonic=lambda: 1000.0 + LONGEST_SECONDS)
    monkeypatch.setattr(reconcile, "time", later)
    await world.reconcile()
    assert world.port.writes == ["status"]


async def test_the_crowd_is_whose_status_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    crowds: list[int] = []
    pause = 4.0

    def waits(*arguments: Any) -> float:
        crowds.append(arguments[3])
        return pause

    monkeypatch.setattr(pace, "wait_before_writing", waits)
    world = World()
    world.start(world.events, queued=2)
    others = {Key("ns", str(number)) for number in range(5)}
    world.reconciler._waiting.update(others)
    for _ in range(2):
        await world.reconcile()
    assert world.reconciler._waiting == {KEY, *others}
    world.api.delete("PDCluster", *KEY)
    await world.reconcile()
    assert world.reconciler._waiting == others
    world.api.apply(copy.deepcopy(MANIFEST))
    await world.reconcile()
    pause = 0.0
    await world.reconcile()
    assert world.reconciler._waiting == others, "it is written"
    assert crowds == [7, 7, 7, 7], "a PDCluster does not wait because of itself"


async def test_a_status_that_is_right_again_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(pace, "wait_before_writing", lambda *_: 0.0)
    for _ in range(3):
        await world.reconcile()
    monkeypatch.setattr(pace, "wait_before_writing", lambda *_: 4.0)
    cluster = world.api.get("PDCluster", *KEY)
    assert cluster is not None
    right = cluster["status"]
    for status, waits in (({**right, "links": "7/7"}, True), (right, False)):
        world.pretend({**cluster, "status": status})
        await world.reconcile()
        assert (KEY in world.reconciler._waiting) is waits


@pytest.mark.parametrize("refused", ["apply Service", "event"])
async def test_nothing_more_is_written_into_a_namespace_that_is_being_deleted(refused: str) -> None:
    world = World()
    await world.reconcile()
    other = copy.deepcopy(MANIFEST)
    other["metadata"]["name"] = "other"
    world.api.apply(other)
    error = NamespaceTerminating("unable to create: it is being terminated")
    if refused == "event":
        world.events.refusal = error
    else:
        world.port.fail[refused] = error
    router = next(c for c in world.store.children(KEY) if c["kind"] == "Service")
    world.api.delete("Service", "ns", router["metadata"]["name"])
    assert await world.reconcile() is None
    assert world.port.writes == ["apply Service"]
    world.port.fail.clear()
    world.events.refusal = None
    assert await world.reconcile() is None
    assert world.port.writes == []
    assert await world.reconciler.reconcile(Key("ns", "other")) is None
    assert world.port.writes == [], "it goes with the namespace, too"
    assert not world.monitor.engines(KEY)

    world.api.delete("PDCluster", *KEY)
    world.api.apply(copy.deepcopy(MANIFEST))
    await world.reconcile()
    assert "status" in world.port.writes, "a namespace of that name was created again"


async def test_a_refusal_that_came_too_late_leaves_no_cluster_alone_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cluster is in a new namespace, into which something can be written again."""
    now = [1000.0]
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: now[0]))
    world = World()
    world.port.fail["apply Service"] = NamespaceTerminating("it is being terminated")
    await world.reconcile()
    world.port.fail.clear()
    now[0] += reconcile.BELIEVED_SECONDS - 1
    await world.reconcile()
    assert world.port.writes == []
    now[0] += 1
    await world.reconcile()
    assert "apply Service" in world.port.writes
    assert reconcile.BELIEVED_SECONDS < RESYNC_SECONDS, "the next look at all of them finds it"


def keys(world: World) -> list[str]:
    secret = world.api.get("Secret", "ns", "tiny-ticket-key")
    assert secret is not None
    return base64.b64decode(secret["data"]["ticket"]).decode().split()


async def test_the_ticket_key_is_minted_once_and_rotated_on_demand() -> None:
    world = World()
    await world.reconcile()
    secret, engine = map(world.port.writes.index, ("write Secret", "apply StatefulSet"))
    assert secret < engine, "before the first pod mounts it"
    [first] = keys(world)
    assert len(bytes.fromhex(first)) == 32
    for _ in range(3):
        await world.reconcile()
    assert keys(world) == [first]
    for value in ("1", "2"):
        before = keys(world)[0]
        cluster = world.api.get("PDCluster", *KEY)
        assert cluster is not None
        cluster["metadata"]["annotations"] = {ROTATE_TICKET_KEY_ANNOTATION: value}
        world.api.apply(cluster)
        await world.reconcile()
        assert world.port.writes == ["write Secret"], "no pod restarts for it"
        new, old = keys(world)
        assert old == before != new
        await world.reconcile()
        assert world.port.writes == []
    cluster = world.api.get("PDCluster", *KEY)
    assert cluster is not None
    del cluster["metadata"]["annotations"]
    world.api.apply(cluster)
    await world.reconcile()
    assert world.port.writes == []
    world.api.delete("PDCluster", *KEY)
    assert world.api.get("Secret", "ns", "tiny-ticket-key") is None, "it goes with its owner"


@pytest.mark.parametrize("why", ["another class", "no Lease"])
async def test_what_another_operator_did_meanwhile_is_not_done_again(why: str) -> None:
    """A second rotation would end the key that requests under way still have."""
    world, leases = World(), SimpleNamespace(holds=lambda _: True)
    parts: dict[str, Any] = {
        "api_server": world.port,
        "launchers": world.events,
        "events": world.events,
    }
    one = ControlLoop(
        **parts,
        connector=BUNDLE,
        clock=fixed,
        place=Place(operator_class=""),
        holds=lambda namespace: leases.holds(namespace),  # noqa: PLW0108 - it changes
    )
    one.store, one._reconciler.store = world.store, world.store
    await one._work(KEY)
    cluster = world.api.get("PDCluster", *KEY)
    assert cluster is not None
    cluster["metadata"]["annotations"] = {ROTATE_TICKET_KEY_ANNOTATION: "today"}
    theirs = copy.deepcopy(cluster)
    if why == "another class":
        theirs["spec"]["operatorClass"] = "blue"
    leases.holds = lambda _: why == "another class"
    world.api.apply(theirs)
    world.port.writes.clear()
    await one._work(KEY)
    assert world.port.writes == []
    await world.reconcile()
    assert "write Secret" in world.port.writes
    rotated = keys(world)
    leases.holds = lambda _: True
    ours = copy.deepcopy(world.api.get("PDCluster", *KEY))
    assert ours is not None
    ours["spec"].pop("operatorClass", None)
    world.api.apply(ours)
    world.port.writes.clear()
    await one._work(KEY)
    assert keys(world) == rotated
    assert "write Secret" not in world.port.writes
    await one.stop()


async def test_a_key_is_in_no_status_no_log_and_no_step(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    steps: list[WriteTicketKey] = []
    write = world.port.write_ticket_key

    async def noting(step: WriteTicketKey) -> None:
        steps.append(step)
        await write(step)

    world.port.write_ticket_key = noting  # type: ignore[method-assign]
    with caplog.at_level(logging.DEBUG):
        await world.reconcile()
        cluster = world.api.get("PDCluster", *KEY)
        assert cluster is not None
        cluster["metadata"]["annotations"] = {ROTATE_TICKET_KEY_ANNOTATION: "1"}
        world.api.apply(cluster)
        await world.reconcile()
    shown = f"{world.api.get('PDCluster', *KEY)} {caplog.text} {steps}"
    assert len(steps) == 2
    assert "data" not in steps[0].manifest
    for key in keys(world):
        assert key not in shown
        assert base64.b64encode(key.encode()).decode() not in shown


@pytest.mark.parametrize(
    "spoilt",
    [None, {}, {"ticket": ""}, {"ticket": "bm90IGEga2V5"}, {"ticket": "b" * 88}, {"other": "Yg=="}],
)
async def test_a_ticket_key_that_somebody_emptied_or_changed_is_made_again(
    spoilt: dict[str, str] | None,
) -> None:
    world = World()
    await world.reconcile()
    [first] = keys(world)
    secret = copy.deepcopy(world.api.get("Secret", "ns", "tiny-ticket-key"))
    assert secret is not None
    world.api.apply({**secret, "data": spoilt})
    world.start(world.events)  # as after the time for which a Secret is remembered
    await world.reconcile()
    [made] = keys(world)
    assert made != first
    world.start(world.events)
    world.port.writes.clear()
    await world.reconcile()
    assert "write Secret" not in world.port.writes, "it is written once"


async def test_a_foreign_key_becomes_the_second_one() -> None:
    world = World()
    await world.reconcile()
    secret = copy.deepcopy(world.api.get("Secret", "ns", "tiny-ticket-key"))
    assert secret is not None
    theirs = "ab" * 32
    world.api.apply({**secret, "data": {"ticket": base64.b64encode(theirs.encode()).decode()}})
    world.start(world.events)
    await world.reconcile()
    assert keys(world)[1:] == [theirs]


async def test_the_secret_of_an_operator_that_noted_no_hash_keeps_its_key() -> None:
    world = World()
    await world.reconcile()
    before = keys(world)
    secret = copy.deepcopy(world.api.get("Secret", "ns", "tiny-ticket-key"))
    assert secret is not None
    del secret["metadata"]["annotations"][TICKET_KEY_HASH_ANNOTATION]
    world.api.apply(secret)
    world.start(world.events)
    await world.reconcile()
    assert keys(world) == before


async def test_a_secret_that_cannot_be_read_stands_in_the_status() -> None:
    world = World()
    await world.reconcile()
    world.start(world.events)
    world.port.fail["read Secret"] = ApiError("Forbidden", "secrets is forbidden")
    with pytest.raises(ApiError, match="forbidden"):
        await world.reconcile()
    progressing = world.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", "Forbidden")
    assert "secrets is forbidden" in progressing["message"]
    reads = len(world.port.reads)
    with pytest.raises(ApiError, match="forbidden"):
        await world.reconcile()
    assert len(world.port.reads) > reads, "it is tried again"
    world.port.fail.clear()
    await world.reconcile()
    assert len(keys(world)) == 1


def strangers_pods(world: World) -> None:
    """Create a ReplicaSet with a name like those of the routers' Deployment, and pods of it."""
    (deployment,) = world.api.list("Deployment")
    name = f"{deployment['metadata']['name']}-5d4f"
    metadata: dict[str, Any] = {"name": name, "namespace": "ns"}
    owner = world.api.apply({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": metadata})
    reference = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": name, "controller": True}
    reference["uid"] = owner["metadata"]["uid"]
    engine = {"role": "prefill", "revision": "zzzzz", "engine": "tiny-prefill-zzzzz-0"}
    router = {"app.kubernetes.io/component": "router", "pdcluster.dev/pairing-key": "another"}
    for number, labels in enumerate(({f"pdcluster.dev/{k}": engine[k] for k in engine}, router)):
        metadata = {
            "name": f"{name}-{number}",
            "namespace": "ns",
            "labels": {"pdcluster.dev/cluster": "tiny", **labels},
            "ownerReferences": [reference],
        }
        world.api.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}})


async def test_a_strangers_pods_with_our_labels_hold_up_no_change() -> None:
    """Only UIDs say that the ReplicaSet is a stranger's. With Recreate, no new engine came."""
    world = World(rollout={"type": "Recreate"})
    for _ in range(3):
        await world.reconcile()
    strangers_pods(world)
    before = {one["metadata"]["name"] for one in world.api.list("StatefulSet")}
    changed = world.api.get("PDCluster", *KEY)
    assert changed is not None
    changed["spec"]["engine"] = {"env": [{"name": "A", "value": "1"}]}
    world.api.apply(changed)
    for _ in range(8):
        await world.reconcile()
    after = {one["metadata"]["name"] for one in world.api.list("StatefulSet")}
    assert len(after) == len(before) == 2
    assert not after & before
    assert world.port.writes == [], "the cluster is at rest"
    assert len(world.api.list("Pod")) == 2, "they are not ours to delete"
    assert world.port.reads.count("owner") == 1


async def test_who_may_not_ask_for_owners_says_so_and_removes_nothing() -> None:
    world = World(rollout={"type": "Recreate"})
    for _ in range(3):
        await world.reconcile()
    strangers_pods(world)
    before = world.api.list("StatefulSet")
    changed = world.api.get("PDCluster", *KEY)
    assert changed is not None
    changed["spec"]["engine"] = {"env": [{"name": "A", "value": "1"}]}
    world.api.apply(changed)
    world.port.fail["read owner"] = ApiError("Forbidden", "replicasets is forbidden")
    for _ in range(3):
        with pytest.raises(ApiError, match="replicasets"):
            await world.reconcile()
    assert world.condition("Progressing")["reason"] == "Forbidden"
    assert world.api.list("StatefulSet") == before


async def test_a_new_cluster_whose_secrets_cannot_be_read_says_so() -> None:
    world = World()
    world.port.fail["read certificates"] = ApiError("Forbidden", "secrets is forbidden")
    with pytest.raises(ApiError, match="forbidden"):
        await world.reconcile()
    assert world.port.writes == ["status"]
    progressing = world.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", "Forbidden")


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"ticket": "%%%"},
        {"ticket": "/w=="},
        {"other": "AA=="},
        {"ticket": None},
        {"ticket": "YWJj%ZGVm"},
    ],
)
async def test_a_rotation_of_a_secret_that_somebody_emptied_holds_one_key(
    data: dict[str, str | None] | None,
) -> None:
    world = World()
    await world.reconcile()
    secret = world.api.get("Secret", "ns", "tiny-ticket-key")
    assert secret is not None
    world.api.apply({**secret, "data": data})
    cluster = world.api.get("PDCluster", *KEY)
    assert cluster is not None
    cluster["metadata"]["annotations"] = {ROTATE_TICKET_KEY_ANNOTATION: "1"}
    world.api.apply(cluster)
    await world.reconcile()
    assert len(keys(world)) == 1


async def test_a_second_look_at_the_same_world_writes_nothing() -> None:
    world = World()
    await world.reconcile()
    await world.reconcile()  # the first status comes back as part of what is observed
    await world.reconcile()
    assert world.port.writes == []
    events = list(world.events.events)
    await world.reconcile()
    assert world.events.events == events


async def test_plans_of_few_clusters_are_remembered_and_nobody_notices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconcile, "MOST_MEMOS", 1)
    monkeypatch.setattr(Nobody, "publish", AsyncMock())
    world = World()
    other = copy.deepcopy(MANIFEST)
    other["metadata"] |= {"name": "other", "uid": "another"}
    world.api.apply(other)
    for name in ("tiny", "other") * 3:
        world.port.writes.clear()
        await world.reconciler.reconcile(Key("ns", name))
        assert [key.name for key in world.reconciler._memos] == [name]
    assert world.port.writes == []
    assert await world.reconcile() is not None
    assert world.port.writes == []


async def test_the_plans_of_the_clusters_that_were_looked_at_last_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    memo = world.reconciler._memo
    for number in range(1000):
        memo(Key("ns", str(number)))
    assert len(world.reconciler._memos) == 256
    monkeypatch.setattr(reconcile, "MOST_MEMOS", 2)
    world.start(world.events)
    for name in ("a", "b", "a", "c"):
        world.reconciler._memo(Key("ns", name))
    assert {key.name for key in world.reconciler._memos} == {"a", "c"}


async def test_events_come_with_the_status_that_they_are_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    told = Event("Normal", "Told", "Ready is True")
    plan = planner.make_plan

    def with_event(*arguments: Any) -> Any:
        return replace(plan(*arguments), events=(told,))

    monkeypatch.setattr(planner, "make_plan", with_event)
    monkeypatch.setattr(pace, "wait_before_writing", lambda *_: 4.0)
    await world.reconcile()
    await world.reconcile()
    assert told not in world.events.events, "the status waits, so each plan until then says it"
    monkeypatch.setattr(pace, "wait_before_writing", lambda *_: 0.0)
    await world.reconcile()
    assert world.events.events.count(told) == 1


@pytest.mark.parametrize(("plan_asks", "expected"), [(2.0, 2.0), (60.0, 4.0), (None, 4.0)])
async def test_a_cluster_is_looked_at_again_when_the_first_thing_is_due(
    monkeypatch: pytest.MonkeyPatch, plan_asks: float | None, expected: float
) -> None:
    """The plan asks for a time, and a status that was held back asks for 4 seconds."""
    plan = planner.make_plan
    monkeypatch.setattr(
        planner, "make_plan", lambda *found: replace(plan(*found), requeue_after=plan_asks)
    )
    monkeypatch.setattr(pace, "wait_before_writing", lambda *_: 4.0)
    world = World()
    assert await world.reconcile() == 0.5, "what was written is looked at"
    assert await world.reconcile() == expected


async def test_a_failed_step_stops_the_rest_and_stands_in_the_status() -> None:
    world = World()
    world.port.fail["apply StatefulSet"] = ApiError("Forbidden", "statefulsets is forbidden")
    with pytest.raises(ApiError, match="forbidden"):
        await world.reconcile()
    assert world.port.writes[-1] == "status"
    assert world.port.writes.count("apply StatefulSet") == 2, "they do not need each other"
    progressing = world.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", "Forbidden")
    assert "statefulsets is forbidden" in progressing["message"]
    with pytest.raises(ApiError):
        await world.reconcile()
    assert "status" not in world.port.writes, "the same failure is not written twice"
    world.port.fail.clear()
    await world.reconcile()
    assert world.condition("Progressing")["status"] == "True"


@pytest.fixture
def all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a plan sees is well."""
    make_plan, well = planner.make_plan, [(kind, yes("Fine")) for kind in ConditionType]

    def plan_well(observed: Observed, now: float, memo: Memo) -> Plan:
        plan, before = make_plan(observed, now, memo), observed.cluster.get("status")
        status = {**plan.status, "conditions": set_conditions(before, well, 1, now)}
        return replace(plan, status=status, events=transitions(before, status, secured=True))

    monkeypatch.setattr(planner, "make_plan", plan_well)


@pytest.mark.usefixtures("all_is_well")
async def test_a_cluster_whose_step_fails_is_not_ready_and_says_so_once() -> None:
    """All that a plan sees is well but for one object, which somebody deleted."""
    world = World()
    await world.reconcile()
    assert world.condition("Ready")["status"] == "True"
    world.events.events.clear()
    policy = next(c for c in world.store.children(KEY) if c["kind"] == "NetworkPolicy")
    world.api.delete("NetworkPolicy", "ns", policy["metadata"]["name"])
    world.port.fail["apply NetworkPolicy"] = ApiError("Forbidden", "exceeded quota")
    for _ in range(3):
        with pytest.raises(ApiError):
            await world.reconcile()
        for kind in ("Ready", "Progressing"):
            assert world.condition(kind)["reason"] == "Forbidden"
            assert world.condition(kind)["status"] == "False"
        assert world.condition("Available")["status"] == "True"
    world.port.fail.clear()
    await world.reconcile()
    assert world.condition("Ready")["status"] == "True"
    said = [(one.type, one.message.partition(":")[0]) for one in world.events.events]
    assert said == [("Warning", "Ready is False"), ("Normal", "Ready is True")]

    world.events.events.clear()
    world.port.fail["apply NetworkPolicy"] = ApiError("TooManyRequests", "try again later")
    world.api.delete("NetworkPolicy", "ns", policy["metadata"]["name"])
    with pytest.raises(ApiError):
        await world.reconcile()
    assert world.condition("Ready")["status"] == "False", "it is known to be missing"
    world.port.fail.clear()
    await world.reconcile()
    assert world.condition("Ready")["status"] == "True"

    world.events.events.clear()
    world.port.fail["apply NetworkPolicy"] = ApiError("TooManyRequests", "try again later")
    policy = next(c for c in world.store.children(KEY) if c["kind"] == "NetworkPolicy")
    world.api.apply({**policy, "spec": {**policy["spec"], "policyTypes": ["Egress"]}})
    for failing, ready in ((0.0, "True"), (0.0, "True"), (progress.FAILING_SECONDS, "False")):
        if failing:
            world.reconciler._failing[KEY] -= failing
        with pytest.raises(ApiError):
            await world.reconcile()
        assert world.condition("Progressing")["reason"] == "TooManyRequests"
        assert world.condition("Ready")["status"] == ready
    world.port.fail.clear()
    await world.reconcile()
    assert not world.reconciler._failing

    world.events.events.clear()
    world.api.delete("NetworkPolicy", "ns", policy["metadata"]["name"])
    world.port.fail["apply NetworkPolicy"] = ApiError("Forbidden", "exceeded quota")
    for number in range(4):
        world.api.delete("ServiceAccount", "ns", "tiny-engine")
        if number % 2:
            world.port.fail["apply ServiceAccount"] = Conflict("the object has been modified")
        else:
            world.port.fail.pop("apply ServiceAccount", None)
        with pytest.raises(ApiError):
            await world.reconcile()
        assert world.condition("Ready")["status"] == "False"
    assert [one.message.partition(":")[0] for one in world.events.events] == ["Ready is False"]


async def test_a_server_that_has_no_time_for_a_moment_is_no_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each cluster at rest would have one, and nobody refused anything."""
    world = World()
    idle = copy.deepcopy(MANIFEST)
    idle["spec"] |= {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}
    world.api.apply(idle)
    for _ in range(3):
        await world.reconcile()
    assert world.condition("Progressing")["reason"] == "Complete"
    world.events.events.clear()
    policy = next(c for c in world.store.children(KEY) if c["kind"] == "NetworkPolicy")
    world.api.delete("NetworkPolicy", "ns", policy["metadata"]["name"])
    world.port.fail["apply NetworkPolicy"] = ApiError("TooManyRequests", "try again later")
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: 2000.0))
    with pytest.raises(ApiError):
        await world.reconcile()
    assert world.condition("Progressing")["reason"] == "TooManyRequests"
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: 2010.0))
    world.port.fail.clear()
    await world.reconcile()
    assert world.condition("Progressing")["reason"] == "Complete"
    assert world.events.events == []


@pytest.mark.usefixtures("all_is_well")
async def test_ready_is_not_true_for_long_while_the_secrets_cannot_be_read() -> None:
    world = World()
    await world.reconcile()
    world.start(world.events)
    world.port.fail["read Secret"] = ApiError("InternalError", "the key store is down")
    for failing, ready in ((0.0, "True"), (progress.FAILING_SECONDS, "False")):
        if failing:
            world.reconciler._failing[KEY] -= failing
        with pytest.raises(ApiError):
            await world.reconcile()
        assert world.condition("Progressing")["reason"] == "InternalError"
        assert world.condition("Ready")["status"] == ready


async def test_a_conflict_is_tried_again_and_is_no_news() -> None:
    world = World()
    await world.reconcile()
    before = world.condition("Progressing")
    world.api.delete("Service", "ns", "tiny-router")
    world.port.fail["apply Service"] = Conflict("the object has been modified")
    with pytest.raises(Conflict):
        await world.reconcile()
    assert world.condition("Progressing") == before
    world.port.fail.clear()
    await world.reconcile()
    assert world.condition("Progressing") == before


def with_a_sidecar(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a mutating webhook makes of each StatefulSet."""
    if manifest["kind"] == "StatefulSet":
        pod = manifest["spec"]["template"]["spec"]
        pod["containers"] = [{"name": "mesh", "image": "mesh:1"}, *pod["containers"]]
    return manifest


async def test_what_a_webhook_rewrites_is_applied_once_told_once_and_left_so() -> None:
    world = World()
    world.port.mutate = with_a_sidecar
    await world.reconcile()
    assert world.port.writes.count("apply StatefulSet") == 2
    told = [event for event in world.events.events if event.reason == "Rewritten"]
    assert len(told) == 2
    assert all("spec.template.spec.containers[mesh]" in event.message for event in told)
    for _ in range(3):
        await world.reconcile()
        assert "apply StatefulSet" not in world.port.writes
    assert [event for event in world.events.events if event.reason == "Rewritten"] == told
    # Another change of the same object is still put right, and is no news.
    engines = [child for child in world.store.children(KEY) if child["kind"] == "StatefulSet"]
    name = engines[0]["metadata"]["name"]
    changed = world.api.get("StatefulSet", "ns", name)
    changed["spec"]["replicas"] = 7
    world.api.apply(changed)
    await world.reconcile()
    assert world.port.writes.count("apply StatefulSet") == 1
    assert world.api.get("StatefulSet", "ns", name)["spec"]["replicas"] == 1
    await world.reconcile()
    assert "apply StatefulSet" not in world.port.writes
    assert [event for event in world.events.events if event.reason == "Rewritten"] == told
    # Once the webhook is gone, a new process sets the object right.
    world.port.mutate = lambda manifest: manifest
    world.start(world.events)
    await world.reconcile()
    assert world.port.writes.count("apply StatefulSet") == 2
    live = world.api.get("StatefulSet", "ns", name)
    assert [one["name"] for one in live["spec"]["template"]["spec"]["containers"]] == ["engine"]


async def test_a_status_that_cannot_be_written_is_an_error_for_the_queue() -> None:
    world = World()
    world.port.fail["status"] = ApiError("Timeout", "the server did not answer")
    with pytest.raises(ApiError):
        await world.reconcile()


async def test_a_bug_in_the_planner_stands_in_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    with monkeypatch.context() as broken:
        broken.setattr(planner, "make_plan", lambda *_: list[int]().pop())
        with pytest.raises(ApiError, match="IndexError"):
            await world.reconcile()
        progressing = world.condition("Progressing")
        assert (progressing["status"], progressing["reason"]) == ("False", "PlanFailed")
        for kind in ("Accepted", "Available", "Ready"):
            assert world.condition(kind)["status"] == "Unknown", "nothing is known any more"
    await world.reconcile()
    assert world.condition("Progressing")["status"] == "True"


async def test_a_bug_of_the_advice_is_logged_once_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(autoscaling={"prefill": {"max": 2}, "decode": {"max": 2}, "itlMs": 40})
    monkeypatch.setattr(follow, "advise", lambda *_: list[int]().pop())
    for _ in range(3):
        await world.reconcile()
    assert world.store.children(KEY)
    assert world.condition("ScalingTargetsMet")["reason"] == "AdviceFailed"
    [record] = [one for one in caplog.records if one.exc_info]
    assert record.exc_info is not None
    assert record.exc_info[0] is IndexError


@pytest.mark.parametrize(
    "live", [{"uid": "made-anew-meanwhile"}, {"deletionTimestamp": "2026-11-26T10:00:00Z"}]
)
async def test_a_ghost_in_the_store_has_no_children(live: dict[str, str]) -> None:
    world = World()
    world.now += FIRST_CHILDREN_SECONDS
    world.port.live = live
    assert await world.reconcile() == 2.0, "by then the store may know"
    assert world.port.writes == []
    assert world.store.children(KEY) == ()


async def test_a_ghost_has_first_children_at_most_once() -> None:
    """Kubernetes' garbage collector deletes them, and the store may hold the ghost for minutes."""
    world = World()
    world.port.fail["status"] = ApiError("NotFound", "it is gone")
    with pytest.raises(ApiError):
        await world.reconcile()
    for child in world.store.children(KEY):
        world.store.drop(child)
    world.now += JUST_REPORTED_SECONDS
    world.port.live = {"uid": "made-anew-meanwhile"}
    world.port.writes.clear()
    assert await world.reconcile() == 2.0
    assert world.port.writes == []


async def test_a_new_cluster_is_written_without_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nobody, "publish", AsyncMock())
    world = World()
    other = copy.deepcopy(MANIFEST)
    other["metadata"] |= {"name": "other", "uid": "another"}
    world.api.apply(other)
    await world.reconciler.reconcile(Key("ns", "other"))
    assert world.port.reads == ["certificates"], "once, to learn what it is to have none"
    world.port.reads.clear()
    world.now += FIRST_CHILDREN_SECONDS - 1
    await world.reconcile()
    await world.reconcile()
    assert world.port.reads == []


async def test_children_that_come_later_are_made_only_for_a_cluster_that_is_there() -> None:
    world = World()
    await world.reconcile()
    world.now += JUST_REPORTED_SECONDS
    engine = world.api.list("StatefulSet")[0]
    world.api.delete("StatefulSet", "ns", engine["metadata"]["name"])
    world.port.reads.clear()
    await world.reconcile()
    assert world.port.reads == ["PDCluster"]
    assert "apply StatefulSet" in world.port.writes


async def test_the_secret_of_a_cluster_that_seemed_new_keeps_its_key() -> None:
    """An operator was killed after its first write, and nobody has seen a child yet."""
    world = World()
    await world.reconcile()
    before = keys(world)
    for child in world.store.children(KEY):
        world.api.delete(child["kind"], "ns", child["metadata"]["name"])
    cluster = world.api.get("PDCluster", *KEY)
    assert cluster is not None
    world.api.set_status("PDCluster", *KEY, {}, cluster["metadata"]["uid"])
    world.start(world.events)
    assert world.store.children(KEY) == ()
    with pytest.raises(Conflict):
        await world.reconcile()
    await world.reconcile()
    assert keys(world) == before
    assert world.port.writes.count("apply StatefulSet") == 2


@pytest.mark.parametrize("gone", ["children", "status"])
async def test_a_cluster_of_which_something_is_there_is_not_new(gone: str) -> None:
    """An operator is killed before it has written a status."""
    world = World()
    await world.reconcile()
    before = keys(world)
    cluster = world.api.get("PDCluster", *KEY)
    assert cluster is not None
    if gone == "status":
        world.api.set_status("PDCluster", *KEY, {}, cluster["metadata"]["uid"])
    else:
        for child in world.store.children(KEY):
            world.api.delete(child["kind"], "ns", child["metadata"]["name"])
    world.start(world.events)
    await world.reconcile()
    assert "write Secret" not in world.port.writes
    assert keys(world) == before


async def test_a_deleted_cluster_is_left_to_the_garbage_collector() -> None:
    world = World()
    await world.reconcile()
    world.api.delete("PDCluster", *KEY)
    assert await world.reconcile() is None
    assert world.port.writes == []


async def test_a_cluster_that_is_being_deleted_gets_nothing_any_more() -> None:
    world = World()
    cluster = world.api.get("PDCluster", *KEY)
    assert cluster is not None
    cluster["metadata"]["deletionTimestamp"] = "2026-11-24T00:00:00Z"
    world.pretend(cluster)
    assert await world.reconcile() is None
    assert world.port.writes == []


async def test_the_launchers_of_a_cluster_that_is_gone_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    await world.reconcile()
    dismissed: list[Key] = []
    monkeypatch.setattr(world.monitor, "dismiss", dismissed.append)
    world.api.delete("PDCluster", *KEY)
    await world.reconcile()
    assert dismissed == [KEY]


async def test_a_cluster_that_is_made_anew_is_told_of_its_rewrites() -> None:
    world = World()
    world.port.mutate = with_a_sidecar
    for _ in range(2):
        world.events.events.clear()
        await world.reconcile()
        assert [event.reason for event in world.events.events].count("Rewritten") == 2
        world.api.delete("PDCluster", *KEY)
        await world.reconcile()
        world.api.apply(copy.deepcopy(MANIFEST))


async def test_without_the_lease_no_status_is_written() -> None:
    world, ours = World(), True
    world.start(world.events, may_write=lambda _: ours)
    for _ in range(3):
        await world.reconcile()
    scaler = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PrefillScaler",
        "metadata": {"name": KEY.name, "namespace": KEY.namespace},
        "spec": {"replicas": 1},
    }
    world.api.apply(scaler)
    cluster = world.api.get("PDCluster", *KEY)
    assert cluster is not None
    world.pretend({**cluster, "status": {**cluster["status"], "observedGeneration": 99}})
    ours = False
    await world.reconcile()
    assert world.port.writes == []
    ours = True
    await world.reconcile()
    assert world.port.writes == ["status", "scaler status"]


async def test_a_status_that_nobody_waits_for_is_written_five_seconds_after_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    for _ in range(3):
        await world.reconcile()
    cluster = world.api.get("PDCluster", *KEY)
    assert cluster is not None
    world.pretend({**cluster, "status": {**cluster["status"], "replicas": 7}})
    assert await world.reconcile() == 5.0
    assert world.port.writes == []
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: 1004.5))
    assert await world.reconcile() == 0.5
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: 1005.0))
    await world.reconcile()
    assert world.port.writes == ["status"]
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: 1006.0))
    cluster = world.api.get("PDCluster", *KEY)
    assert cluster is not None
    world.pretend({**cluster, "status": {**cluster["status"], "replicas": 8}})
    assert await world.reconcile() == 4.0


async def test_launchers_are_told_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, told, seen = planner.make_plan, [], []
    peers = {"ns.tiny.decode.aaaaa.0": {"peers": []}}
    links = {"ns.tiny.decode.aaaaa.0": LinksReport("ns.tiny.decode.aaaaa.0", "d/1", ())}

    def made(observed: Any, *more: Any) -> Any:
        seen.append(observed)
        return replace(plan(observed, *more), peers=peers, routed=frozenset({"an engine"}))

    monkeypatch.setattr(planner, "make_plan", made)
    world = World()
    monkeypatch.setattr(world.monitor, "links", {KEY: links}.get)
    monkeypatch.setattr(world.monitor, "assign", lambda *said: told.append(said))
    await world.reconcile()
    assert told == [(KEY, peers, frozenset({"an engine"}))]
    assert seen[0].links == links


async def test_a_scaler_is_told_how_many_engines_there_are() -> None:
    world = World()
    scaler = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PrefillScaler",
        "metadata": {"name": KEY.name, "namespace": KEY.namespace},
        "spec": {"replicas": 2},
    }
    world.api.apply(scaler)
    for _ in range(3):
        await world.reconcile()
    status = world.api.get("PrefillScaler", *KEY)["status"]
    assert status["replicas"] == 2
    assert "role=prefill" in status["selector"]
    await world.reconcile()
    assert "scaler status" not in world.port.writes, "it knows already"


async def test_events_of_a_transition_are_told_although_a_scalers_status_is_refused() -> None:
    """The next plan finds the new status, and so no transition."""
    world = World()
    await world.reconcile()
    world.events.events.clear()
    world.api.apply(
        {
            "apiVersion": "pdcluster.dev/v1alpha1",
            "kind": "PrefillScaler",
            "metadata": {"name": KEY.name, "namespace": KEY.namespace},
            "spec": {"replicas": 1},
        }
    )
    bad = copy.deepcopy(MANIFEST)
    bad["spec"]["prefill"] = {"parallelism": {"tensor": 0}}
    world.api.apply(bad)
    world.port.fail["scaler status"] = Conflict("an autoscaler has written it meanwhile")
    with pytest.raises(Conflict):
        await world.reconcile()
    assert "status" in world.port.writes
    told = [event.reason for event in world.events.events]
    assert "NotAccepted" in told
    world.port.fail.clear()
    await world.reconcile()
    assert "scaler status" in world.port.writes
    assert [event.reason for event in world.events.events] == told


async def test_a_refusal_that_comes_late_leaves_the_next_cluster_of_that_name_alone() -> None:
    """The namespace was deleted and made again, while a call of the look before it was hanging."""
    world = World()
    before = world.port.apply

    async def late(manifest: Mapping[str, Any], uid: str = "") -> Mapping[str, Any]:
        world.api.delete("PDCluster", *KEY)
        world.api.apply(copy.deepcopy(MANIFEST))
        raise NamespaceTerminating("unable to create: it is being terminated")

    world.port.apply = late  # type: ignore[method-assign]
    assert await world.reconcile() is None
    world.port.apply = before  # type: ignore[method-assign]
    await world.reconcile()
    assert "status" in world.port.writes


async def test_an_api_server_without_pod_groups_makes_no_gang() -> None:
    world = World(scheduling={"gang": "Enabled"})
    world.store.set_served(POD_GROUP_KIND, served=False)
    await world.reconcile()
    assert world.condition("Accepted")["reason"] == "PodGroupsNotServed"
    world.store.set_served(POD_GROUP_KIND, served=True)
    await world.reconcile()
    assert world.condition("Accepted")["status"] == "True"


async def test_a_child_that_somebody_changed_is_put_right() -> None:
    world = World()
    await world.reconcile()
    await world.reconcile()
    [deployment] = world.api.list("Deployment")
    deployment["spec"]["replicas"] = 7
    world.api.apply(deployment)
    await world.reconcile()
    assert world.port.writes == ["apply Deployment"]
    assert world.api.list("Deployment")[0]["spec"]["replicas"] == 1


async def test_an_operator_that_has_just_started_asks_before_it_judges() -> None:
    world = World()
    await world.reconcile()
    for number, child in enumerate(world.store.children(KEY)):
        if child["kind"] == "StatefulSet":
            world.store.put(ready_pod(child, f"10.0.0.{number}"))
    targets = launchers_to_poll(world.store.pods(KEY), world.store.children(KEY))
    engines = {target.url: target.engine for target in targets}
    assert len(engines) == 2
    world.start(Serving(engines))
    await world.reconcile()
    reason = world.condition("DecodeReady")["reason"]
    assert reason == "LauncherUnreachable", "nobody was ever heard: nothing to wait for"
    await world.monitor.stop()
    for writes in (["status"], []):  # of the first that hears the engines, of its successor
        launchers = Serving(engines)
        world.start(launchers)
        wait = await world.reconcile()
        assert world.port.writes == []
        launchers.may_answer.set()
        async with asyncio.timeout(60):
            while not world.monitor.all_heard(KEY):  # noqa: ASYNC110 - nothing announces it here
                await asyncio.sleep(0.01)
        await world.reconcile()
        assert world.port.writes == writes
        assert world.condition("DecodeReady")["status"] == "True"
        await world.monitor.stop()
    assert wait is not None
    assert 0 < wait <= LONGEST_WAIT_SECONDS


MOUNTED = {
    "podTemplate": {
        "spec": {
            "containers": [
                {"name": "engine", "volumeMounts": [{"name": "own", "mountPath": "/pdcluster-tls"}]}
            ],
            "volumes": [{"name": "own", "secret": {"secretName": "of-the-user"}}],
        }
    }
}


@pytest.mark.parametrize(
    ("place", "spec", "rule"),
    [
        (
            Place(host_path_models=False),
            {"model": {"source": {"hostPath": {"path": "/models/x"}}}},
            "HostPathNotAdmitted",
        ),
        (
            Place(mounted_certificates=False),
            {"transfer": {"tls": "Mounted"}, "prefill": MOUNTED, "decode": MOUNTED},
            "MountedNotSupported",
        ),
        (
            Place(one_node=True),
            {"transfer": {"tls": "Mounted"}, "prefill": MOUNTED, "decode": MOUNTED},
            "MountedNotSupported",
        ),
    ],
)
async def test_what_an_operator_does_not_admit_is_not_accepted(
    place: Place, spec: dict[str, Any], rule: str
) -> None:
    world = World(**spec)
    await world.reconcile()
    assert world.condition("Accepted")["status"] == "True", "others admit it"
    world.start(world.events, place=place)
    await world.reconcile()
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", rule)


@pytest.mark.parametrize("namespace", ["operators", None])
async def test_engines_take_orders_from_the_operators_namespace(namespace: str | None) -> None:
    world = World()
    world.start(world.events, place=Place(namespace))
    await world.reconcile()
    policies = {
        policy["metadata"]["name"]: operator_namespace_in(policy)
        for policy in world.api.list("NetworkPolicy")
    }
    assert policies["tiny-engines"] == namespace


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_routers_listen_on_the_addresses_that_pods_have(host: str) -> None:
    world = World()
    world.start(world.events, place=Place(every_address=host))
    await world.reconcile()
    (router,) = world.api.list("Deployment")
    words = router["spec"]["template"]["spec"]["containers"][0]["args"]
    named = [words[n + 1] for n, word in enumerate(words) if word.endswith("-host")]
    assert named == [host, host]


@pytest.mark.parametrize(("tls", "role"), [("Mounted", MOUNTED), ("Enabled", {})])
async def test_who_changes_the_labels_of_a_pod_gets_no_request_without_tls(
    tls: str, role: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if data := await reader.read(1 << 16):
            heard.append(data)
        writer.close()

    Authority("the user's CA").files(tmp_path, "operator", name=OPERATOR_NAME)
    stranger = await asyncio.start_server(take, "127.0.0.1", 0)
    monkeypatch.setattr(
        launchers.object_names, "LAUNCHER_PORT", stranger.sockets[0].getsockname()[1]
    )
    world = World(transfer={"tls": tls}, prefill=role, decode=role)
    await world.reconcile()
    for child in world.store.children(KEY):
        if child["kind"] == "StatefulSet":
            pod = ready_pod(child, "127.0.0.1")
            pod["metadata"]["labels"] |= {"pdcluster.dev/tls": "Disabled"}
            world.store.put(pod)
    async with stranger, EnginesHttp(world.port.authority, identity=tmp_path) as c:
        world.start(c)
        await world.reconcile()
        async with asyncio.timeout(120):
            while len(heard) < 6 or not world.monitor.all_heard(KEY):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await world.reconcile()
        await world.monitor.stop()
    assert {data[:2] for data in heard} == {b"\x16\x03"}, "a TLS handshake, and no more"
    status = world.api.get("PDCluster", *KEY)["status"]
    assert status["transfer"]["certificates"] == {"Mounted": "Mounted", "Enabled": "Operator"}[tls]
    assert world.condition("DecodeReady")["reason"] == "LauncherUnreachable"


def ready_pod(stateful_set: Mapping[str, Any], address: str) -> dict[str, Any]:
    labels = stateful_set["spec"]["template"]["metadata"]["labels"]
    return {
        "kind": "Pod",
        "metadata": {
            "name": f"{stateful_set['metadata']['name']}-0",
            "namespace": "ns",
            "uid": address,
            "labels": {**labels, "apps.kubernetes.io/pod-index": "0"},
            "ownerReferences": [
                {
                    "kind": "StatefulSet",
                    "name": stateful_set["metadata"]["name"],
                    "uid": stateful_set["metadata"]["uid"],
                    "controller": True,
                }
            ],
        },
        "status": {
            "phase": "Running",
            "podIP": address,
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "engine", "state": {"running": {}}}],
        },
    }


def test_the_store_trusts_owners_by_uid_and_a_list_removes_ghosts() -> None:
    store = Store()
    metadata = {"name": "tiny", "namespace": "ns", "uid": "1", "resourceVersion": "4"}
    cluster = {"kind": "PDCluster", "metadata": metadata}
    child = {
        "kind": "Service",
        "metadata": {
            "name": "s",
            "namespace": "ns",
            "uid": "2",
            "resourceVersion": "5",
            "ownerReferences": [
                {"kind": "PDCluster", "name": "tiny", "uid": "1", "controller": True}
            ],
        },
    }
    stranger = {
        "kind": "Service",
        "metadata": {
            "name": "t",
            "namespace": "ns",
            "uid": "3",
            "resourceVersion": "6",
            "labels": {"pdcluster.dev/cluster": "tiny"},
            "ownerReferences": [
                {"kind": "PDCluster", "name": "tiny", "uid": "another", "controller": True}
            ],
        },
    }
    assert [store.put(m) for m in (cluster, child, stranger)] == [KEY, KEY, KEY]
    assert store.children(KEY) == (child,)
    assert list_into(store, "Service", [child]) == {KEY}
    assert list_into(store, "Service", [child]) == set()
    assert list_into(store, "Service", []) == {KEY}
    assert store.children(KEY) == ()
    assert list_into(store, "PDCluster", []) == {KEY}
    assert store.keys() == []


def test_a_late_deletion_does_not_remove_the_object_made_anew() -> None:
    store = Store()
    fresh = {"kind": "PDCluster", "metadata": {"name": "tiny", "namespace": "ns", "uid": "2"}}
    store.put(fresh)
    store.drop({"kind": "PDCluster", "metadata": {"name": "tiny", "namespace": "ns", "uid": "1"}})
    assert store.cluster(KEY) == fresh


THEIRS = {
    "type": "example.com/Checked",
    "status": "True",
    "reason": "Checked",
    "message": "somebody else's condition",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


async def test_a_condition_of_somebody_else_is_no_reason_to_write_a_status() -> None:
    world = World()
    for _ in range(3):
        await world.reconcile()
    assert world.port.writes == []
    status = world.api.get("PDCluster", *KEY)["status"]
    for conditions in ([THEIRS, *status["conditions"]], [*status["conditions"], THEIRS]):
        world.api.set_status("PDCluster", *KEY, {**status, "conditions": conditions})
        await world.reconcile()
        assert world.port.writes == []


async def test_beside_a_condition_of_somebody_else_a_failure_is_told() -> None:
    world = World()
    await world.reconcile()
    status = world.api.get("PDCluster", *KEY)["status"]
    conditions = [THEIRS, *status["conditions"]]
    world.api.set_status("PDCluster", *KEY, {**status, "conditions": conditions})
    world.port.fail["read Secret"] = ApiError("Forbidden", "secrets is forbidden")
    world.start(world.events)
    with pytest.raises(ApiError, match="forbidden"):
        await world.reconcile()
    assert world.port.writes == ["status"]
    assert world.condition("Progressing")["reason"] == "Forbidden"
