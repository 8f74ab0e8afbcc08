"""How many pods may be evicted at once: those of one engine of a role, or one router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.api.labels import CLUSTER_LABEL, ROLE_LABEL, cluster_labels
from pdcluster_operator.api.object_names import budget_name
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.metadata import child_metadata
from pdcluster_operator.plan.builders.router_deployment import ROUTER_COMPONENT, router_selector


def build_disruption_budget(cluster: Cluster, role: Role, pods: int) -> dict[str, Any]:
    """Return the PodDisruptionBudget of a role.

    When a pod is evicted, its engine stops and the other pods of that engine restart. They count
    as unavailable, so no pod of a second engine is evicted before the first engine is back. A pod
    that is not ready may always be evicted. Otherwise a broken engine would block a drain.

    With ``maxUnavailable``, Kubernetes counts the pods that should run from those that exist: each
    names its StatefulSet. An engine without any pod is then forgotten, and another one may be
    evicted. So the budget says how many pods should run.

    Args:
        pods: how many pods all engines of the role should have.
    """
    selector = {CLUSTER_LABEL: cluster.name, ROLE_LABEL: role.value}
    return _budget(cluster, role.value, selector, {"minAvailable": max(pods - 1, 0)})


def build_router_budget(cluster: Cluster, pairing_key: str) -> dict[str, Any] | None:
    """Return the routers' PodDisruptionBudget; None for one router: it must be evictable."""
    if cluster.spec.router.replicas < 2:
        return None
    selector = router_selector(cluster, pairing_key)
    return _budget(cluster, ROUTER_COMPONENT, selector, {"maxUnavailable": 1})


def _budget(
    cluster: Cluster, component: str, selector: Mapping[str, str], bound: Mapping[str, int]
) -> dict[str, Any]:
    labels = cluster_labels(cluster.name, component)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(cluster, budget_name(cluster.name, component), labels),
        "spec": {
            **bound,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": dict(selector)},
        },
    }
