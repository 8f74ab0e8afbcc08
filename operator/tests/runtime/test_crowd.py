"""Many PDClusters that are created at once: what each of them costs, in virtual time.

The API server takes 200 requests a second. Pods get nodes and addresses and become ready as in a
cluster, and launchers answer polls. Each PDCluster becomes Ready some seconds after its creation.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from late_server import CONNECTOR, KINDS, NAMESPACE, Manifest, Port, Server
from polled_launchers import PolledLaunchers

import virtual_time
from pdcluster_connector.protocol.launcher_documents import (
    CanaryReport,
    CanaryState,
    EngineReport,
    EngineState,
    LinkReport,
    LinksReport,
    LinkState,
    PeersDocument,
)
from pdcluster_operator.adapters.api_server.kinds import BY_NAME, slim
from pdcluster_operator.api.object_names import API_VERSION, engine_of
from pdcluster_operator.local.cluster import Workloads
from pdcluster_operator.plan import planner
from pdcluster_operator.plan.forecast.world import running
from pdcluster_operator.plan.launchers import Target
from pdcluster_operator.runtime import reconcile
from pdcluster_operator.runtime.control_loop import RESYNC_SECONDS, ControlLoop
from pdcluster_operator.runtime.interfaces import Key, LauncherError
from pdcluster_operator.runtime.queue import WORKERS

COUNT = 36
CALL_SECONDS = 0.005
CHILDREN = 14
LIMIT_SECONDS = 60.0


class BusyPort(Port):
    """Takes one call at a time, and counts the calls."""

    def __init__(self, server: Server, counts: Counter[str]) -> None:
        super().__init__(server, Random(1))
        self._counts = counts
        self._lock = asyncio.Lock()

    async def _travel(self) -> None:
        async with self._lock:
            await asyncio.sleep(CALL_SECONDS / 3)  # a call of Port travels about three times

    async def apply(self, manifest: Mapping[str, Any], uid: str = "") -> Mapping[str, Any]:
        self._counts["children"] += 1
        return await super().apply(manifest, uid)

    async def write_ticket_key(self, step: Any) -> None:
        self._counts["children"] += 1
        await super().write_ticket_key(step)

    async def write_status(self, key: Key, *rest: Any) -> None:
        self._counts["statuses"] += 1
        await super().write_status(key, *rest)

    async def publish(self, _: object, events: Iterable[object]) -> None:
        self._counts["events"] += len(list(events))


class Engines(PolledLaunchers):
    """Launchers without a long poll. An engine answers once it is up, and its links are good."""

    def __init__(self) -> None:
        self.up: set[str] = set()
        self._peers: dict[str, PeersDocument] = {}

    async def ready(self, target: Target) -> EngineReport:
        await asyncio.sleep(0.002)
        if target.url.rpartition("/")[2].partition(":")[0] not in self.up:
            raise LauncherError("connection refused")
        name = target.engine
        return EngineReport(
            ready=True,
            engine=name,
            engine_id=f"{name}/1",
            role=target.role.value,
            state=EngineState.READY,
        )

    async def links(self, target: Target) -> LinksReport:
        document = self._peers.get(target.engine)
        links = tuple(
            LinkReport(
                one.engine,
                one.engine_id,
                LinkState.ESTABLISHED,
                shards="1/1",
                bytes_per_second=5e9,
                canary=CanaryReport(CanaryState.PASSED, 1),
            )
            for one in (document.peers if document else ())
        )
        return LinksReport(target.engine, f"{target.engine}/1", links)

    async def put_peers(self, target: Target, document: PeersDocument) -> None:
        self._peers[target.engine] = document

    async def tell_routed(self, target: Target, *, routed: bool) -> None:
        return


class OwnPods:
    """The server as a controller sees it that has an index: it lists the pods of one owner."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.pods: list[Manifest] = []

    def list(self, *_: str) -> list[Manifest]:
        return self.pods

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


class Nodes:
    """Plays controllers and kubelets: pods are made, run and become ready."""

    def __init__(self, server: Server, engines: Engines) -> None:
        self._server, self._engines = server, engines
        self._own = OwnPods(server)
        self._workloads = Workloads(self._own)  # type: ignore[arg-type]
        self._changed: set[tuple[str, str]] = set()
        self._pods: dict[str, set[str]] = {}
        self._tasks = [asyncio.create_task(self._control())]
        server.watch(self._happened)

    def _happened(self, event: str, manifest: Manifest) -> None:
        kind, metadata = manifest["kind"], manifest["metadata"]
        if kind == "Pod":
            owner = metadata["ownerReferences"][0]
            self._changed.add((owner["kind"], owner["name"]))
            self._pods.setdefault(owner["uid"], set()).add(metadata["name"])
            if event == "ADDED":
                self._tasks.append(asyncio.create_task(self._run(metadata["name"])))
        elif kind in ("StatefulSet", "Deployment"):
            self._changed.add((kind, metadata["name"]))

    async def _control(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            changed, self._changed = self._changed, set()
            for kind, name in sorted(changed):
                if (live := self._server.get(kind, NAMESPACE, name)) is not None:
                    names = self._pods.get(live["metadata"]["uid"], ())
                    self._own.pods = [self._pod(one) for one in names]
                    self._workloads._sync(live)

    async def _run(self, name: str) -> None:
        number = len(self._tasks)
        address = f"10.0.{number // 256}.{number % 256}"
        await asyncio.sleep(0.3)
        self._report(name, {"phase": "Pending"})
        await asyncio.sleep(0.7)
        not_ready = {"conditions": [{"type": "Ready", "status": "False"}]}
        self._report(name, running(address) | not_ready)
        await asyncio.sleep(2.0 * Random(number).uniform(0.8, 1.2))
        if engine_of(self._pod(name)):
            self._engines.up.add(address)
        self._report(name, running(address))

    def _pod(self, name: str) -> Manifest:
        pod = self._server.get("Pod", NAMESPACE, name)
        assert pod is not None
        return pod

    def _report(self, name: str, status: Manifest) -> None:
        uid = self._pod(name)["metadata"]["uid"]
        self._server.set_status("Pod", NAMESPACE, name, status, uid)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def crowd(counts: Counter[str]) -> AsyncIterator[tuple[Server, ControlLoop]]:
    """Create PDClusters, whose control loop runs."""
    server, engines = Server(), Engines()
    port = BusyPort(server, counts)
    loop = ControlLoop(
        api_server=port,  # type: ignore[arg-type]
        launchers=engines,
        events=port,
        connector=CONNECTOR,
        clock=lambda: 1.8e9 + now(),
    )
    port.loop_of = lambda: loop
    loop.store._clock = loop._reconciler._secrets._clock = now
    watched = {kind.name for kind in KINDS}

    def see(event: str, manifest: Manifest) -> None:
        loop.see(event, slim(manifest, BY_NAME[manifest["kind"]]))

    def happened(event: str, manifest: Manifest) -> None:
        if manifest["kind"] in watched:
            asyncio.get_running_loop().call_later(0.02, see, event, manifest)

    server.watch(happened)
    nodes = Nodes(server, engines)
    loop.start()
    for number in range(COUNT):
        spec = {
            "model": {"source": {"huggingFace": {"repo": "org/model"}}},
            "transfer": {"device": "CPU", "tls": "Disabled"},
        }
        metadata = {"name": f"c-{number}", "namespace": NAMESPACE}
        server.apply(
            {"apiVersion": API_VERSION, "kind": "PDCluster", "metadata": metadata, "spec": spec}
        )
    await asyncio.sleep(1.0)
    yield server, loop
    await loop.stop()
    await nodes.stop()


async def create_many(counts: Counter[str]) -> float:
    """Create PDClusters; return after how many seconds all are Ready."""
    async with crowd(counts) as (_, loop):
        while (not_ready := loop.not_ready()) and now() < LIMIT_SECONDS:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.5)
        took = now()
        assert not not_ready
        await asyncio.sleep(10.0)
    return took


async def come_to_rest(loop: ControlLoop) -> None:
    while loop.not_ready():  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.5)
    await asyncio.sleep(10.0)


async def change_one() -> float:
    """Change the spec of a PDCluster that is Ready; return after how long new engines exist."""
    async with crowd(Counter()) as (server, loop):
        await come_to_rest(loop)
        began, engines = now(), len(server.list("StatefulSet", NAMESPACE))
        live = server.get("PDCluster", NAMESPACE, "c-0")
        assert live is not None
        live["spec"]["engine"] = {"maxModelLen": 1024}
        server.apply(live)
        while len(server.list("StatefulSet", NAMESPACE)) == engines:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.1)
        return now() - began


def test_a_changed_spec_waits_for_no_event_of_our_own_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first plan stores the new revision and tries it out, the second makes its engines."""
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr(f"{__name__}.COUNT", 1)
    assert virtual_time.run(change_one()) < 2.0


async def lose_the_secret() -> float:
    """Delete the ticket keys of a PDCluster that is Ready; return when there are new ones."""
    async with crowd(Counter()) as (server, loop):
        await come_to_rest(loop)
        began = now()
        server.delete("Secret", NAMESPACE, "c-0-ticket-key")
        while server.get("Secret", NAMESPACE, "c-0-ticket-key") is None:
            await asyncio.sleep(1.0)
            assert now() - began < 1000.0
        return now() - began


def test_a_secret_that_somebody_deletes_is_found_by_the_resync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No watch reports it: the operator has no right to watch Secrets."""
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr(f"{__name__}.COUNT", 1)
    assert 200.0 < virtual_time.run(lose_the_secret()) <= 1.1 * RESYNC_SECONDS


@pytest.mark.parametrize(
    ("count", "call_seconds", "limit", "reconciles"),
    [
        (36, CALL_SECONDS, 15.0, 12),
        pytest.param(400, 10 * CALL_SECONDS, 250.0, 7, marks=pytest.mark.soak),
    ],
)
def test_what_each_of_many_new_clusters_costs(
    count: int, call_seconds: float, limit: float, reconciles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its children, one status and one event; so the benchmark's gate holds."""
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr(f"{__name__}.COUNT", count)
    monkeypatch.setattr(f"{__name__}.CALL_SECONDS", call_seconds)
    monkeypatch.setattr(f"{__name__}.LIMIT_SECONDS", 4 * limit)
    counts: Counter[str] = Counter()
    make_plan = planner.make_plan

    def counted(*arguments: Any) -> Any:
        counts["reconciles"] += 1
        return make_plan(*arguments)

    monkeypatch.setattr(planner, "make_plan", counted)
    took = virtual_time.run(create_many(counts))
    assert took < limit
    shared = WORKERS  # each may try to create the ConfigMap that all share
    assert counts["children"] <= CHILDREN * count + shared
    assert counts["statuses"] <= 1.3 * count
    assert counts["events"] <= 1.3 * count
    assert counts["reconciles"] <= reconciles * count
