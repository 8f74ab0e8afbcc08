"""A whole control plane in one process: the operator's control loop, an API server, a kubelet."""

import asyncio
import copy
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from pdcluster_connector.protocol.api_key import VARIABLE as API_KEY_VARIABLE
from pdcluster_operator.adapters import engine_authority, engines_http
from pdcluster_operator.adapters.api_server.events import event_object
from pdcluster_operator.adapters.api_server.kinds import EVENT
from pdcluster_operator.api import object_names as names
from pdcluster_operator.local import addresses, kubelet
from pdcluster_operator.local.api_server import LocalApi, Manifest
from pdcluster_operator.plan import types
from pdcluster_operator.plan.objects.ownership import controller_uid
from pdcluster_operator.plan.observed.pods import is_pod_ready
from pdcluster_operator.runtime import cluster_secrets, control_loop, interfaces, queue

POD_PORTS = (
    names.HTTP_PORT,
    names.LAUNCHER_PORT,
    names.ENGINE_METRICS_PORT,
    names.SIDE_CHANNEL_PORT,
    names.ROUTER_METRICS_PORT,
)
MOST_EVENTS = 200
HASH_LABEL = "controller-revision-hash"
NOT_SIMULATED = (
    "container images (pods run this machine's Python and vllm-router)",
    "resource limits and GPU isolation",
    "NetworkPolicy",
    "Services that are reached from outside (spec.router.service)",
    "volumes other than hostPath, emptyDir, ConfigMap, the ticket key and certificates",
    "admission",
    "revisions and rollouts",
    "scheduling (gangs and queues)",
)
INHERITED = (
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "TZ",
    "LD_LIBRARY_PATH",
    "XDG_CACHE_HOME",
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
    API_KEY_VARIABLE,
    "CUDA_VISIBLE_DEVICES",
    "PDCLUSTER_ANY_VERSION",
)
"""Variables that an image or a device plugin sets in a cluster. The manifest sets the others."""


class LocalCluster:
    """One in-memory Kubernetes with our operator in it. Use as an async context manager.

    Args:
        folder: logs and stand-ins for volumes.
        connector: the connector that is mounted into engine pods.
        say: prints one line to the terminal.
        first_address: where the search for free loopback addresses starts.
    """

    def __init__(
        self,
        folder: Path,
        connector: types.ConnectorBundle,
        say: Callable[[str], None],
        *,
        first_address: str = "127.0.0.2",
    ) -> None:
        self.api = LocalApi()
        self._addresses = addresses.AddressBook(POD_PORTS, say, first_address)
        self.resolve = partial(addresses.resolve, self.api, self._addresses.address)
        self.kubelet = kubelet.Kubelet(
            self.api, self._addresses, folder, self.resolve, container_environment()
        )
        self._workloads = Workloads(self.api)
        self.authority, _ = engine_authority.EngineAuthority.new(time.time())
        self.events = Events(self.api)
        self._engines = engines_http.EnginesHttp(self.authority)
        self.loop = control_loop.ControlLoop(
            api_server=_ApiPort(self.api, self.authority),
            launchers=self._engines,
            events=self.events,
            connector=connector,
            backoff=queue.Backoff(last=10.0),
            place=types.Place(one_node=True),
        )

    async def __aenter__(self) -> Self:
        await self._engines.__aenter__()
        self.loop.start()
        self.api.watch(self._see)
        self._controllers = asyncio.create_task(self._workloads.run(), name="workloads")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kubelet.kill()
        await self.stop(0.0)
        await self._engines.__aexit__(None, None, None)
        self._addresses.close()

    def _see(self, event: str, manifest: Manifest) -> None:
        if manifest["kind"] != EVENT.name:  # no operator watches its own events
            self.loop.see(event, manifest)

    async def stop(self, grace: float) -> None:
        """End the operator, then every process; SIGKILL after ``grace`` seconds."""
        self._controllers.cancel()
        await asyncio.gather(self._controllers, return_exceptions=True)
        await self.loop.stop()
        await self.kubelet.stop(grace)

    def apply(self, cluster: Mapping[str, Any]) -> interfaces.Key:
        """Apply a PDCluster, as ``kubectl apply`` would."""
        metadata = {"namespace": "default", **cluster["metadata"]}
        live = self.api.apply({**cluster, "metadata": metadata})
        return interfaces.Key(live["metadata"]["namespace"], live["metadata"]["name"])

    def cluster(self, key: interfaces.Key) -> Manifest:
        """Return the live PDCluster."""
        return self.api.get(names.KIND, key.namespace, key.name) or {}


def container_environment() -> dict[str, str]:
    """Return the variables that every container inherits, with this Python first on PATH."""
    kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
    folders = [str(Path(sys.executable).parent), *os.environ.get("PATH", os.defpath).split(":")]
    return {**kept, "PATH": ":".join(dict.fromkeys(folders))}


class _ApiPort:
    """The control loop's port, over the in-memory API."""

    def __init__(self, api: LocalApi, authority: engine_authority.EngineAuthority) -> None:
        self._api = api
        self._authority = authority

    async def read(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self._api.get(kind, namespace, name)

    async def read_ticket_key(self, key: interfaces.Key, uid: str) -> str | None:
        live = self._api.get("Secret", key.namespace, names.ticket_key_name(key.name))
        return cluster_secrets.held_ticket_key(live)

    async def write_ticket_key(self, step: types.WriteTicketKey) -> None:
        metadata = step.manifest["metadata"]
        live = self._api.get("Secret", metadata["namespace"], metadata["name"])
        self._api.apply(cluster_secrets.with_a_new_key(step, live))

    async def read_certificates(self, key: interfaces.Key, uid: str) -> types.HeldCertificates:
        live = self._api.get("Secret", key.namespace, names.certificates_name(key.name))
        return engine_authority.held_certificates(live, self._authority)

    async def write_certificates(self, step: types.WriteCertificates) -> types.HeldCertificates:
        secret = self._api.apply(engine_authority.with_certificates(step, self._authority))
        return engine_authority.held_certificates(secret, self._authority)

    async def apply(self, manifest: Mapping[str, Any], uid: str = "") -> Mapping[str, Any]:
        return self._api.apply(dict(manifest))

    async def try_out(self, step: types.TryOut) -> None:
        """Refuse nothing: this API has no schemas and no quotas."""

    async def delete(self, step: types.Delete) -> None:
        where = step.kind, step.namespace, step.name
        self._api.delete(*where, uid=step.uid, resource_version=step.resource_version)

    async def write_status(
        self,
        key: interfaces.Key,
        uid: str,
        status: Mapping[str, Any],
        version: str = "",
        kind: str = names.KIND,
    ) -> None:
        self._api.set_status(kind, key.namespace, key.name, dict(status), uid)

    async def scale(self, key: interfaces.Key, step: types.Scale) -> None:
        live = self._api.get(names.KIND, key.namespace, key.name)
        if live is not None:
            decode = {**(live["spec"].get("decode") or {}), "replicas": step.replicas}
            self._api.apply({**live, "spec": {**live["spec"], "decode": decode}})


class Events:
    """Keeps the last events in the in-memory API, where other commands find them."""

    def __init__(self, api: LocalApi) -> None:
        self._api = api
        self._count = 0

    async def publish(self, cluster: Mapping[str, Any], events: Iterable[types.Event]) -> None:
        """Publish; the oldest event goes when there are too many."""
        metadata = cluster["metadata"]
        for event in events:
            self._count += 1
            name = f"{metadata['name']}.{self._count}"
            self._api.apply(event_object(metadata, event, name, time.time(), "pdcluster-up"))
            old = f"{metadata['name']}.{self._count - MOST_EVENTS}"
            self._api.delete(EVENT.name, metadata["namespace"], old)


class Workloads:
    """The StatefulSet and Deployment controllers, as far as the operator's objects need them.

    After every change of the in-memory API, one pass compares all workloads with their pods and
    corrects the pods. StatefulSets are ``OnDelete`` and ``Parallel``, as the operator writes no
    others. Deployments replace old pods once the new ones are ready. Local mode has no ReplicaSets
    and no revisions.
    """

    def __init__(self, api: LocalApi) -> None:
        self._api = api
        self._dirty = asyncio.Event()
        api.watch(self._on_event)

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            self.sync()

    def sync(self) -> None:
        """One pass over all workloads."""
        for kind in ("StatefulSet", "Deployment"):
            for owner in self._api.list(kind):
                self._sync(owner)

    def _on_event(self, _: str, manifest: Manifest) -> None:
        if manifest["kind"] in ("StatefulSet", "Deployment", "Pod"):
            self._dirty.set()

    def _sync(self, owner: Manifest) -> None:
        name, namespace, uid = (owner["metadata"][one] for one in ("name", "namespace", "uid"))
        revision, replaces = _template_hash(owner), owner["kind"] == "Deployment"
        wanted = int(owner["spec"].get("replicas", 1))
        prefix = f"{name}-{revision}" if replaces else name
        pods = [pod for pod in self._api.list("Pod", namespace) if controller_uid(pod) == uid]
        updated = [pod for pod in pods if names.labels_of(pod).get(HASH_LABEL) == revision]
        current = updated if replaces else pods
        for index in range(wanted):
            if self._api.get("Pod", namespace, f"{prefix}-{index}") is None:
                labels = {HASH_LABEL: revision} | (
                    {} if replaces else {names.POD_INDEX_LABEL: str(index)}
                )
                self._api.apply(_pod(owner, f"{prefix}-{index}", labels))
        for pod in current:
            if int(pod["metadata"]["name"].rpartition("-")[2]) >= wanted:
                self._delete(pod)
        if sum(is_pod_ready(pod) for pod in current) >= wanted:
            for pod in pods:
                if pod not in current:
                    self._delete(pod)
        self._write_status(owner, pods, len(updated))

    def _delete(self, pod: Manifest) -> None:
        metadata = pod["metadata"]
        self._api.delete("Pod", metadata["namespace"], metadata["name"], uid=metadata["uid"])

    def _write_status(self, owner: Manifest, pods: list[Manifest], updated: int) -> None:
        metadata = owner["metadata"]
        status = {
            "observedGeneration": metadata["generation"],
            "replicas": len(pods),
            "availableReplicas": sum(map(is_pod_ready, pods)),
            "updatedReplicas": updated,
        }
        self._api.set_status(
            owner["kind"], metadata["namespace"], metadata["name"], status, metadata["uid"]
        )


def _pod(owner: Manifest, name: str, labels: dict[str, str]) -> Manifest:
    template = copy.deepcopy(owner["spec"]["template"])
    metadata = template.get("metadata") or {}
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "controller": True,
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "blockOwnerDeletion": True,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": template["spec"],
        "metadata": {
            **metadata,
            "name": name,
            "namespace": owner["metadata"]["namespace"],
            "labels": {**(metadata.get("labels") or {}), **labels},
            "ownerReferences": [reference],
        },
    }


def _template_hash(owner: Manifest) -> str:
    text = json.dumps(owner["spec"]["template"], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
