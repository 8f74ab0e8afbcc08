"""What is known of a cluster's routers, from the Deployment and from the pods."""

from __future__ import annotations

from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.router_deployment import ROUTER_COMPONENT
from pdcluster_operator.plan.model import Observed
from pdcluster_operator.plan.pods import pod_trouble


def router_available(observed: Observed, cluster: Cluster) -> bool | None:
    """Whether a router pod serves; None if the spec wants no router."""
    if cluster.spec.router.replicas == 0:
        return None
    deployments = [child for child in observed.children if child.get("kind") == "Deployment"]
    return any((child.get("status") or {}).get("availableReplicas") for child in deployments)


def router_trouble(observed: Observed) -> str:
    """Return why a router pod does not run; empty if all run, or none exists."""
    for pod in observed.pods:
        metadata = pod["metadata"]
        component = (metadata.get("labels") or {}).get("app.kubernetes.io/component")
        if component == ROUTER_COMPONENT and (found := pod_trouble(pod)):
            return f"{metadata['name']}: {found.message}"
    return ""
