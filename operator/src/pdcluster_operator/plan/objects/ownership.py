"""Who owns an object, whether it is being deleted, and the metadata of a new child.

An object's owner is its controller, by UID. Labels can be copied, UIDs cannot.

A pod belongs to a cluster through a workload: a StatefulSet of an engine, or the ReplicaSet of a
router's Deployment.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pdcluster_operator.api.object_names import API_VERSION, KIND, EngineName, engine_of
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.types import Manifest


def identity(manifest: Manifest) -> tuple[str, str]:
    """Return the kind and name of a child, which identify it within a cluster."""
    return str(manifest.get("kind")), str(manifest["metadata"]["name"])


def controller_of(manifest: Manifest) -> Mapping[str, Any]:
    """Return the owner reference of an object's controller; empty if it has none."""
    references = manifest["metadata"].get("ownerReferences") or ()
    return next((one for one in references if one.get("controller") is True), {})


def controller_uid(manifest: Manifest) -> str:
    """Return the UID of an object's controller; empty if it has none."""
    return str(controller_of(manifest).get("uid") or "")


def is_being_deleted(manifest: Manifest) -> bool:
    """Whether Kubernetes has begun to delete an object."""
    return bool((manifest.get("metadata") or {}).get("deletionTimestamp"))


def engine_sets(children: Iterable[Manifest]) -> dict[EngineName, Manifest]:
    """Return the StatefulSets of engines, by engine."""
    sets = (child for child in children if child.get("kind") == "StatefulSet")
    return {name: one for one in sets if (name := engine_of(one)) is not None}


def engines_of(manifests: Iterable[Manifest]) -> frozenset[EngineName]:
    """Return the engines that objects belong to by their labels."""
    return frozenset(name for name in map(engine_of, manifests) if name is not None)


def own_pods(
    cluster: Manifest, pods: Iterable[Manifest], children: Iterable[Manifest]
) -> Iterator[Manifest]:
    """Yield the pods that the cluster's workloads made.

    Args:
        pods: pods with the cluster's label.
        children: the live objects that the cluster controls.

    The pods of a StatefulSet outlive it for a while, and they count: their engine still runs. Its
    UID is unknown then. Only Kubernetes' garbage collector is left to care for such a pod, so a
    stranger's pod of this kind does not stay. A pod that is older than the cluster does not count:
    it belonged to a cluster of the same name, which was deleted.
    """
    born = _created(cluster)
    workloads = {
        (str(child["kind"]), str(child["metadata"]["name"])): str(child["metadata"].get("uid", ""))
        for child in children
        if child["kind"] in ("StatefulSet", "Deployment")
    }
    for pod in pods:
        if _made_by(pod, workloads, born):
            yield pod


def _made_by(pod: Manifest, workloads: Mapping[tuple[str, str], str], born: str) -> bool:
    controller = controller_of(pod)
    kind, name = str(controller.get("kind")), str(controller.get("name"))
    if kind == "ReplicaSet":  # not watched: it has its Deployment's name and a hash
        return ("Deployment", name.rpartition("-")[0]) in workloads
    uid = str(controller.get("uid") or "")
    if kind == "Deployment":  # local mode has no ReplicaSets
        return bool(uid) and workloads.get((kind, name)) == uid
    engine = engine_of(pod)
    if kind != "StatefulSet" or not uid or engine is None or name != engine.stateful_set:
        return False
    if (kind, name) in workloads:
        return workloads[kind, name] == uid
    return (_created(pod) or born) >= born


def _created(manifest: Manifest) -> str:
    """Return when an object was created, as the API server writes it; empty if it is not known."""
    return str(manifest["metadata"].get("creationTimestamp") or "")


def child_object(
    cluster: Cluster,
    api_version: str,
    kind: str,
    name: str,
    labels: Mapping[str, str],
    **parts: Any,
) -> dict[str, Any]:
    """Return an object with the cluster as controlling owner, so that deletion cascades.

    Args:
        parts: what follows the metadata, such as ``spec``.
    """
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": cluster.name,
        "uid": cluster.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {
        "name": name,
        "namespace": cluster.namespace,
        "labels": dict(labels),
        "ownerReferences": [owner],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **parts}
