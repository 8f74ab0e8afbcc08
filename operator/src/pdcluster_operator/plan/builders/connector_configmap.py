"""The ConfigMap that carries the connector into engine pods."""

from __future__ import annotations

import base64
from functools import lru_cache
from typing import Any

from pdcluster_operator.api.labels import cluster_labels, connector_name
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.metadata import child_metadata
from pdcluster_operator.plan.model import ConnectorBundle

CONNECTOR_FILE = "connector.pyz"
CONNECTOR_FOLDER = "/pdcluster"


def build_connector_configmap(cluster: Cluster, connector: ConnectorBundle) -> dict[str, Any]:
    """Return an immutable ConfigMap, named by the connector's hash."""
    name = connector_name(cluster.name, connector.digest)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(cluster, name, cluster_labels(cluster.name, "connector")),
        "immutable": True,
        "binaryData": {CONNECTOR_FILE: _base64(connector.data)},
    }


@lru_cache(maxsize=4)
def _base64(data: bytes) -> str:
    """Return one string for all clusters: an operator has one connector all its life."""
    return base64.b64encode(data).decode()


def connector_volume(cluster: Cluster, digest: str) -> dict[str, Any]:
    """Return the volume of a pod that mounts this ConfigMap."""
    return {"name": "connector", "configMap": {"name": connector_name(cluster.name, digest)}}


def connector_mount() -> dict[str, Any]:
    """Return where a container sees it."""
    return {"name": "connector", "mountPath": CONNECTOR_FOLDER, "readOnly": True}
