"""The StatefulSet and Deployment controllers, as far as the operator's objects need them.

After every change of the in-memory API, one pass compares all workloads with their pods and
corrects the pods. StatefulSets are ``OnDelete`` and ``Parallel``, because the operator writes no
others. Deployments replace old pods once the new ones are ready. Local mode has no ReplicaSets and
no revisions.
"""

import asyncio
import copy
import hashlib
import json

from pdcluster_operator.api.object_names import POD_INDEX_LABEL
from pdcluster_operator.local.api_server import LocalApi, Manifest
from pdcluster_operator.plan.observed.pods import is_pod_ready

HASH_LABEL = "controller-revision-hash"


class Workloads:
    """Keeps the pods of every StatefulSet and Deployment."""

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
        name, namespace = owner["metadata"]["name"], owner["metadata"]["namespace"]
        revision, replaces = _template_hash(owner), owner["kind"] == "Deployment"
        wanted = int(owner["spec"].get("replicas", 1))
        prefix = f"{name}-{revision}" if replaces else name
        pods = self._pods(owner)
        current = [pod for pod in pods if not replaces or _label(pod, HASH_LABEL) == revision]
        for index in range(wanted):
            if self._api.get("Pod", namespace, f"{prefix}-{index}") is None:
                labels = {HASH_LABEL: revision} | (
                    {} if replaces else {POD_INDEX_LABEL: str(index)}
                )
                self._api.apply(_pod(owner, f"{prefix}-{index}", labels))
        for pod in current:
            if int(pod["metadata"]["name"].rpartition("-")[2]) >= wanted:
                self._delete(pod)
        if sum(is_pod_ready(pod) for pod in current) >= wanted:
            for pod in pods:
                if pod not in current:
                    self._delete(pod)
        self._write_status(owner, pods)

    def _pods(self, owner: Manifest) -> list[Manifest]:
        uid = owner["metadata"]["uid"]
        return [
            pod
            for pod in self._api.list("Pod", owner["metadata"].get("namespace"))
            if any(ref["uid"] == uid for ref in pod["metadata"].get("ownerReferences") or ())
        ]

    def _delete(self, pod: Manifest) -> None:
        metadata = pod["metadata"]
        self._api.delete("Pod", metadata["namespace"], metadata["name"], uid=metadata["uid"])

    def _write_status(self, owner: Manifest, pods: list[Manifest]) -> None:
        revision, metadata = _template_hash(owner), owner["metadata"]
        status = {
            "observedGeneration": metadata["generation"],
            "replicas": len(pods),
            "availableReplicas": sum(map(is_pod_ready, pods)),
            "updatedReplicas": sum(_label(pod, HASH_LABEL) == revision for pod in pods),
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


def _label(pod: Manifest, name: str) -> str | None:
    return (pod["metadata"].get("labels") or {}).get(name)


def _template_hash(owner: Manifest) -> str:
    text = json.dumps(owner["spec"]["template"], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
