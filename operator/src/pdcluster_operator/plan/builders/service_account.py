"""The ServiceAccount of a cluster's pods: an identity without rights and without a token."""

from __future__ import annotations

from typing import Any

from pdcluster_operator.api.labels import cluster_labels
from pdcluster_operator.api.object_names import service_account_name
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.metadata import child_metadata


def build_service_account(cluster: Cluster) -> dict[str, Any]:
    """Return the ServiceAccount; nothing in the pods talks to the Kubernetes API."""
    name = service_account_name(cluster.name)
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": child_metadata(cluster, name, cluster_labels(cluster.name, "identity")),
        "automountServiceAccountToken": False,
    }
