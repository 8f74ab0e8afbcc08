"""How many pods may be evicted at once: as many as cost one engine, or one router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.api.labels import (
    CLUSTER_LABEL,
    ROLE_LABEL,
    budget_name,
    cluster_labels,
)
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan.builders.metadata import child_metadata
from pdcluster_operator.plan.builders.router_deployment import ROUTER_COMPONENT, router_selector


def build_disruption_budget(cluster: Cluster, role: Role) -> dict[str, Any]:
    """Return the PodDisruptionBudget of a role.

    One pod less is one engine less, whose other pods restart: they count as unavailable, so
    no second engine goes before this one is back. Pods that are not ready may always go, or
    a node could not be drained of a broken engine.
    """
    selector = {CLUSTER_LABEL: cluster.name, ROLE_LABEL: role.value}
    return _budget(cluster, role.value, selector)


def build_router_budget(cluster: Cluster, pairing_key: str) -> dict[str, Any] | None:
    """Return the routers' PodDisruptionBudget; None for one router, which could never go."""
    if cluster.spec.router.replicas < 2:
        return None
    return _budget(cluster, ROUTER_COMPONENT, router_selector(cluster, pairing_key))


def _budget(cluster: Cluster, component: str, selector: Mapping[str, str]) -> dict[str, Any]:
    labels = cluster_labels(cluster.name, component)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(cluster, budget_name(cluster.name, component), labels),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": dict(selector)},
        },
    }
