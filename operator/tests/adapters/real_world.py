"""The world of the rough hands on a real API server: its admission, controllers and collector.

The operator's own reconciler, store and adapter work on it, one look at a time. Nodes and launchers
are played, and so is who refuses a write. What the world holds is read from the API server before
each look; what others change there is sent when they are done.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rough_world import (
    CLUSTER,
    STRANGER,
    Identity,
    Manifest,
    World,
    copied,
    identity,
    is_up,
    owners_of,
)

from pdcluster_operator.adapters.api_server.client import MERGE, KubeClient
from pdcluster_operator.adapters.api_server.kinds import BY_NAME
from pdcluster_operator.adapters.api_server.kube_api import KubeApi
from pdcluster_operator.plan.objects.ownership import controller_uid
from pdcluster_operator.plan.types import (
    Delete,
    HeldCertificates,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
)
from pdcluster_operator.runtime.interfaces import ApiError, Key

HELD = (
    "PDCluster",
    "StatefulSet",
    "Deployment",
    "ReplicaSet",
    "ControllerRevision",
    "Service",
    "ConfigMap",
    "ServiceAccount",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "Secret",
    "Pod",
)
NEVER_RESTORED = ("PDCluster", "ReplicaSet", "Pod")
KEPT = ("name", "labels", "annotations", "ownerReferences")
COUNTS = ("replicas", "updatedReplicas", "availableReplicas")
ADDRESSES = ("clusterIP", "clusterIPs")
ROUNDS = 200  # of controllers and nodes between two looks, at most
UNCHANGED = 20  # so many rounds in which nothing changes are the end of waiting
BEAT = 0.05
NOW = {"gracePeriodSeconds": 0}


class RealWorld(World):
    """Call :meth:`begin` first.

    Args:
        admin: of the hands, controllers and nodes.
        api: the operator's adapter.
        namespace: one in which nothing is yet, and in which the operator has its rights.
    """

    simulated = False

    def __init__(
        self, admin: KubeClient, api: KubeApi, namespace: str, spec: Mapping[str, Any]
    ) -> None:
        self.namespace = namespace
        self._admin, self._api = admin, api
        self._todo: list[tuple[str, Identity]] = []
        self._of_nodes: list[tuple[Manifest, Manifest]] = []  # pods, and the status of each
        self._read: dict[Identity, Manifest] = {}
        super().__init__(spec)
        self.seconds = time.time()

    async def begin(self) -> None:
        """Make the node, and the PDCluster."""
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"{self.namespace}-node"}}
        await self._admin.call("POST", "/api/v1/nodes", body=node)
        await self.flush()

    # What others do.

    def write(self, wanted: Manifest, by: str) -> Manifest:
        made = super().write(wanted, by)
        self._todo.append(("write", identity(wanted)))
        return made

    def touch(self, name: Identity) -> Manifest:
        self._todo.append(("write", name))
        return super().touch(name)

    def remove(self, name: Identity) -> None:
        self._forget(name)
        self._todo.append(("delete", name))

    def _forget(self, name: Identity) -> None:
        """Take an object away, and what it owns. Kubernetes does the latter by itself."""
        todo = [*self._todo]
        super().remove(name)
        self._todo = todo

    async def flush(self) -> None:
        todo = dict.fromkeys(self._todo)
        self._todo.clear()
        for verb, name in todo:
            try:
                await (self._delete(name) if verb == "delete" else self._send(name))
            except ApiError as error:  # the API server lets nobody do that
                self.error = f"a hand was refused: {error}"
        await self._refresh()

    async def _delete(self, name: Identity, **options: Any) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        await self._admin.call("DELETE", self._path(name), body={**body, **options})

    async def _send(self, name: Identity) -> None:
        if (wanted := self.objects.get(name)) is None:
            return
        live, body = await self._admin.read(self._path(name)), bare(wanted)
        if live is None:
            await self._admin.call("POST", self._path((name[0], "")).rstrip("/"), body=body)
            return
        body["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"]
        live = await self._admin.call("PUT", self._path(name), body=body)
        if name == CLUSTER and live.get("status") and not wanted.get("status"):
            path = f"{self._path(name)}/status"
            await self._admin.call("PUT", path, body={**live, "status": {}})

    def _path(self, name: Identity) -> str:
        return BY_NAME[name[0]].path(self.namespace, name[1])

    # What there is.

    async def _refresh(self) -> None:
        paths = [BY_NAME[kind].path(self.namespace) for kind in HELD]
        pages = await asyncio.gather(*(self._admin.call("GET", path) for path in paths))
        before, self._read = self._read, {}
        for kind, page in zip(HELD, pages, strict=True):
            for item in page["items"]:
                one = {**item, "apiVersion": BY_NAME[kind].api_version, "kind": kind}
                old = before.get(identity(one))
                if old is not None and version_of(old) == version_of(one):
                    one = old
                elif kind not in NEVER_RESTORED and (old is None or bare(old) != bare(one)):
                    self.past.append(copied(one))
                one.setdefault("status", {})
                self._read[identity(one)] = one
        self.objects = {**self._read}

    async def reconcile(self) -> None:
        await self._refresh()
        await super().reconcile()

    def lags(self, child: Manifest) -> bool:
        """Whether a Deployment counts a pod as available that is none of its own, or ends."""
        labels = child["spec"]["selector"]["matchLabels"].items()
        own = [one for one in self.of_kind("Pod") if labels <= one["metadata"]["labels"].items()]
        up = sum(is_up(one) and owners_of(one) != () for one in own)
        return bool(child["status"].get("availableReplicas", 0) > up)

    def _count_routers(self, child: Manifest) -> None:
        """Kubernetes does it."""

    # The Lease is in tests of its own.

    async def _hold(self) -> None:
        self.claim.until = math.inf

    def _give_back(self) -> None:
        return

    def holder(self) -> str:
        return self.me

    # The operator's port.

    async def read(self, kind: str, namespace: str, name: str) -> Any:
        return await self._api.read(kind, namespace, name)

    async def read_ticket_key(self, key: Key, uid: str) -> str | None:
        return await self._api.read_ticket_key(key, uid)

    async def read_certificates(self, key: Key, uid: str) -> HeldCertificates:
        return await self._api.read_certificates(key, uid)

    async def write_ticket_key(self, step: WriteTicketKey) -> None:
        name = identity(step.manifest)
        self._admit(*name)
        await self._api.write_ticket_key(step)
        self._is_written(name, await self._admin.read(self._path(name)))

    async def write_certificates(self, step: WriteCertificates) -> HeldCertificates:
        name = ("Secret", step.manifest["metadata"]["name"])
        self._admit(*name)
        held = await self._api.write_certificates(step)
        self._is_written(name, await self._admin.read(self._path(name)))
        return held

    async def apply(self, wanted: Mapping[str, Any], uid: str = "") -> Manifest:
        self._admit(*identity(wanted))
        answer = await self._api.apply(wanted, uid)
        self._is_written(identity(wanted), answer)
        return answer

    def _is_written(self, name: Identity, answer: Manifest | None) -> None:
        self.writes.append(f"apply {' '.join(name)}")
        self.last_writer[name] = "operator"
        with self.watched("apply", name):
            if answer is not None:
                self.objects[name] = {"status": {}, **answer, "kind": name[0]}

    async def try_out(self, step: TryOut) -> None:
        await super().try_out(step)
        await self._api.try_out(step)

    async def delete(self, step: Delete) -> None:
        self._admit(step.kind)
        name = (step.kind, step.name)
        await self._api.delete(step)
        if name in self.objects:
            self.writes.append(f"delete {' '.join(name)}")
            with self.watched("delete", name):
                self._forget(name)

    async def write_status(
        self, key: Key, uid: str, status: Any, version: str = "", kind: str = "PDCluster"
    ) -> None:
        self._admit(kind)
        await self._api.write_status(key, uid, status, version, kind)
        self.writes.append("status")
        self.objects[CLUSTER] = {**self.cluster, "status": copied(dict(status))}

    # Everybody else.

    async def passes(self, seconds: float) -> None:
        """Let nodes do their work, and wait for Kubernetes' controllers, or sometimes not."""
        self.seconds += seconds
        World.monotonic += seconds
        unchanged = 0
        for _ in range(ROUNDS):
            before = {name: version_of(one) for name, one in self._read.items()}
            for pod in list(self.of_kind("Pod")):
                self._kubelet(pod)
            for pod, status in self._of_nodes:
                await self._node(pod, status)
            self._of_nodes.clear()
            await self._refresh()
            if self.dice is not None and self.dice.random() < 0.3:
                break
            same = before == {name: version_of(one) for name, one in self._read.items()}
            unchanged = unchanged + 1 if same else 0
            if unchanged == UNCHANGED or not any(self._waits()):
                break
            await asyncio.sleep(BEAT)
        self._move_kv()

    def _end_pod(self, name: Identity) -> None:
        self._of_nodes.append((self.objects[name], {}))

    def _run_pod(self, name: Identity, status: Manifest) -> None:
        self._of_nodes.append((self.objects[name], status))

    async def _node(self, pod: Manifest, status: Manifest) -> None:
        """Start a pod, or end it if there is no status to give it."""
        path, uid = self._path(identity(pod)), pod["metadata"]["uid"]
        try:
            if not status:
                await self._delete(identity(pod), **NOW, preconditions={"uid": uid})
                return
            if "nodeName" not in pod["spec"]:
                target = {"apiVersion": "v1", "kind": "Node", "name": f"{self.namespace}-node"}
                metadata = {"name": pod["metadata"]["name"], "uid": uid}
                binding = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata}
                body = {**binding, "target": target}
                await self._admin.call("POST", f"{path}/binding", body=body)
            started = {"ready": True, "restartCount": 0, "imageID": "", "state": {"running": {}}}
            containers = [
                {"name": one["name"], "image": one["image"], **started}
                for one in pod["spec"]["containers"]
            ]
            addresses = {"podIPs": [{"ip": status["podIP"]}], "containerStatuses": containers}
            patch = {"status": {**status, **addresses}}
            await self._admin.call("PATCH", f"{path}/status", body=patch, content=MERGE)
        except ApiError:  # it is gone, or another one has its name
            return

    def _waits(self) -> Iterator[str]:
        """Yield what controllers, the garbage collector and nodes have still to do."""
        uids = {one["metadata"]["uid"] for one in self.objects.values()}
        for name, one in self.objects.items():
            owners = [ref["uid"] for ref in owners_of(one)]
            if owners and not uids.intersection(owners) and STRANGER not in owners:
                yield f"{name} has no owner any more"
        for pod in self.of_kind("Pod"):
            name = pod["metadata"]["name"]
            if pod["metadata"].get("deletionTimestamp"):
                if name not in self.stuck:
                    yield f"{name} ends"
            elif not is_up(pod) and self._has_secrets(pod):
                yield f"{name} starts"
        yield from self._controllers_wait()

    def _controllers_wait(self) -> Iterator[str]:
        pods = [one for one in self.of_kind("Pod") if "deletionTimestamp" not in one["metadata"]]
        for child in self.of_kind("StatefulSet", "Deployment"):
            status, name = child["status"], child["metadata"]["name"]
            wanted = child["spec"]["replicas"]
            if status.get("observedGeneration") != child["metadata"]["generation"]:
                yield f"{name} was not looked at"
            elif child["kind"] == "Deployment":
                if any(status.get(part, 0) != wanted for part in COUNTS):
                    yield f"{name} is rolled"
            elif any(("Pod", f"{name}-{number}") not in self.objects for number in range(wanted)):
                yield f"{name} gets pods"
            elif sum(controller_uid(one) == child["metadata"]["uid"] for one in pods) > wanted:
                yield f"{name} loses pods"


def version_of(one: Mapping[str, Any]) -> str:
    return f"{one['metadata']['uid']} {one['metadata']['resourceVersion']}"


def bare(one: Mapping[str, Any]) -> Manifest:
    """Return an object as somebody would write it who has it from a backup."""
    made: Manifest = copied({name: part for name, part in one.items() if name != "status"})
    metadata = one["metadata"]
    made["metadata"] = {name: metadata[name] for name in KEPT if metadata.get(name)}
    if one["kind"] == "Service" and one["spec"].get("clusterIP") != "None":
        for name in ADDRESSES:
            made["spec"].pop(name, None)
    return made
