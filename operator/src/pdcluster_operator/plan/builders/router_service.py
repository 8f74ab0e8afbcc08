"""The Service that clients talk to."""

from __future__ import annotations

from typing import Any

from pdcluster_operator.api.labels import cluster_labels
from pdcluster_operator.api.object_names import ROUTER_PORT, router_name
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.metadata import child_metadata
from pdcluster_operator.plan.builders.router_deployment import ROUTER_COMPONENT, router_selector


def build_router_service(cluster: Cluster, pairing_key: str) -> dict[str, Any] | None:
    """Return the Service of the routers of one pairing key; None without routers."""
    if cluster.spec.router.replicas == 0:
        return None
    labels = cluster_labels(cluster.name, ROUTER_COMPONENT)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(cluster, router_name(cluster.name), labels),
        "spec": {
            "selector": router_selector(cluster, pairing_key),
            "ports": [
                {
                    "name": "http",
                    "port": ROUTER_PORT,
                    "targetPort": "http",
                    "protocol": "TCP",
                    "appProtocol": "http",
                }
            ],
        },
    }


def endpoint(cluster: Cluster) -> str:
    """Return the base URL for clients inside the Kubernetes cluster; empty without routers."""
    if cluster.spec.router.replicas == 0:
        return ""
    return f"http://{router_name(cluster.name)}.{cluster.namespace}.svc:{ROUTER_PORT}"
