"""What is known of a cluster's routers, from the Deployment and from the pods."""

from __future__ import annotations

from collections.abc import Iterator

from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.router_deployment import ROUTER_COMPONENT
from pdcluster_operator.plan.model import Manifest, Observed
from pdcluster_operator.plan.pods import metadata_of, pod_trouble, status_of


def router_available(observed: Observed, cluster: Cluster) -> bool | None:
    """Whether a router pod serves; None if the spec wants no router."""
    if cluster.spec.router.replicas == 0:
        return None
    return any(status_of(child).get("availableReplicas") for child in _deployments(observed))


def router_behind(observed: Observed) -> str:
    """Return what the routers' Deployments still have to do; empty if nothing.

    Old pods serve until new ones are ready. So a new template whose pods never start is seen here,
    and not by whether a router is available.
    """
    for deployment in _deployments(observed):
        metadata, status = metadata_of(deployment), status_of(deployment)
        if status.get("observedGeneration", 0) < metadata.get("generation", 0):
            return "the routers' Deployment has changed"
        wanted = deployment["spec"].get("replicas", 1)
        ready = min(status.get("updatedReplicas", 0), status.get("availableReplicas", 0))
        if ready < wanted or status.get("replicas", wanted) > wanted:
            trouble = router_trouble(observed)
            return "not every router pod is new and ready" + (f": {trouble}" if trouble else "")
    return ""


def router_trouble(observed: Observed) -> str:
    """Return why a router pod does not run; empty if all run, or none exists.

    A pod that is being deleted comes last: it serves until another one is ready.
    """
    pods = sorted(_pods(observed), key=lambda pod: bool(metadata_of(pod).get("deletionTimestamp")))
    for pod in pods:
        if found := pod_trouble(pod):
            return f"{metadata_of(pod)['name']}: {found.message}"
    return ""


def _deployments(observed: Observed) -> Iterator[Manifest]:
    return (child for child in observed.children if child.get("kind") == "Deployment")


def _pods(observed: Observed) -> Iterator[Manifest]:
    for pod in observed.pods:
        labels = metadata_of(pod).get("labels") or {}
        if labels.get("app.kubernetes.io/component") == ROUTER_COMPONENT:
            yield pod
