"""How many pods of a role may be evicted at once: as many as cost one engine."""

from __future__ import annotations

from typing import Any

from pdcluster_operator.api.labels import (
    CLUSTER_LABEL,
    ROLE_LABEL,
    budget_name,
    cluster_labels,
)
from pdcluster_operator.api.types import Cluster, Role

from .metadata import child_metadata


def build_disruption_budget(cluster: Cluster, role: Role) -> dict[str, Any]:
    """Return the PodDisruptionBudget of a role.

    One pod less is one engine less, whose other pods restart: they count as unavailable, so
    no second engine goes before this one is back. Pods that are not ready may always go, or
    a node could not be drained of a broken engine.
    """
    labels = cluster_labels(cluster.name, role.value)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(cluster, budget_name(cluster.name, role), labels),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {CLUSTER_LABEL: cluster.name, ROLE_LABEL: role.value}},
        },
    }
