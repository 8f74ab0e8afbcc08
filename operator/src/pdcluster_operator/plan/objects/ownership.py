"""Who owns an object, whether it is being deleted, and the metadata of a new child.

An object's owner is its controller, by UID. Names and labels can be copied, UIDs cannot.

A pod belongs to a cluster through a chain of controllers: the StatefulSet of an engine, or the
ReplicaSet of a router's Deployment.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pdcluster_operator.api.object_names import API_VERSION, KIND, EngineName, engine_of
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.types import Manifest

Reference = Mapping[str, Any]
"""An owner reference."""

WORKLOADS: Mapping[str, str] = {
    **dict.fromkeys(("StatefulSet", "ReplicaSet", "Deployment"), "apps"),
    "Job": "batch",
}
"""API groups of the kinds in the owner chain between a pod and its PDCluster."""
_NAME = re.compile("[a-z0-9]([-.a-z0-9]*[a-z0-9])?")


def identity(manifest: Manifest) -> tuple[str, str]:
    """Return the kind and name of a child, which identify it within a cluster."""
    return str(manifest.get("kind")), str(manifest["metadata"]["name"])


def controller_of(manifest: Manifest) -> Reference:
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


def end_of_chain(pod: Manifest, owner_of: Callable[[Reference], Reference | None]) -> Reference:
    """Follow the controllers from a pod up to its PDCluster.

    Args:
        owner_of: returns the reference to the controller of the object that a reference means:
            empty if it has none, None if that is not known, or if the object is gone.

    Returns:
        The reference to the PDCluster, or the first one of which ``owner_of`` knows nothing. Empty
        if the pod was made by something else.
    """
    reference = controller_of(pod)
    for _ in WORKLOADS:  # anybody may write references that form a circle
        group = str(reference.get("apiVersion", "apps")).partition("/")[0]
        named = _NAME.fullmatch(str(reference.get("name")))
        if not (named and WORKLOADS.get(str(reference.get("kind"))) == group):
            break
        above = owner_of(reference)
        if above is None:
            return reference
        reference = above
    return reference if reference.get("kind") == KIND else {}


def owner_in(live: Manifest | None, reference: Reference) -> Reference | None:
    """Return the controller of the object that a reference means; None if that object is gone.

    Args:
        live: the object of this kind and name as it is now; None if there is none.
    """
    if live is None or live["metadata"].get("uid") != reference["uid"]:
        return None
    return controller_of(live)


def is_pod_of(cluster: Manifest, pod: Manifest, end: Reference) -> bool:
    """Whether a workload of the cluster made a pod with the cluster's label.

    The pods of a workload outlive it for a while, and they count: their engine still runs. If
    nobody knows the workload's owner any more, only Kubernetes' garbage collector is left to care
    for the pod, so a stranger's pod of this kind does not stay. Such a pod does not count if it is
    older than the cluster: it belonged to a cluster of the same name, which was deleted.

    Args:
        end: where the pod's chain of controllers ends; see :func:`end_of_chain`.
    """
    controller, engine = controller_of(pod), engine_of(pod)
    of_engine = controller.get("kind") == "StatefulSet"
    if (engine and engine.stateful_set) != (controller["name"] if of_engine else None):
        return False
    if end.get("kind") == KIND:
        return bool(end["uid"] == cluster["metadata"].get("uid"))
    born = _created(cluster)
    return bool(end) and (_created(pod) or born) >= born


def _created(manifest: Manifest) -> str:
    """Return when an object was created, as the API server writes it; empty if it is not known."""
    return str(manifest["metadata"].get("creationTimestamp") or "")


def common_metadata(cluster: Cluster, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return labels and annotations: ours, and below them those of ``spec.commonMetadata``."""
    common = cluster.spec.common_metadata
    annotations = {"annotations": dict(common.annotations)} if common.annotations else {}
    return {"labels": {**common.labels, **labels}, **annotations}


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
        **common_metadata(cluster, labels),
        "ownerReferences": [owner],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **parts}
