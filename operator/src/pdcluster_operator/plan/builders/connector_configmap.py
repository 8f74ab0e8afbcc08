"""The ConfigMap that carries the connector into engine pods.

All PDClusters of a namespace share one. It has no owner, and ``plan/connectors.py`` says when it
goes.
"""

from __future__ import annotations

import base64
from functools import lru_cache
from typing import Any

from pdcluster_operator.api.labels import (
    CONNECTOR_LABEL,
    FIELD_MANAGER,
    UNUSED_ANNOTATION,
)
from pdcluster_operator.api.object_names import CONNECTOR_LENGTH, connector_name
from pdcluster_operator.plan.types import ConnectorBundle

CONNECTOR_FILE = "connector.pyz"
CONNECTOR_FOLDER = "/pdcluster"
CONNECTOR_COMPONENT = "connector"
CONNECTOR_VOLUME = "connector"


def build_connector_configmap(namespace: str, connector: ConnectorBundle) -> dict[str, Any]:
    """Return the immutable ConfigMap of a namespace, named by the connector's hash.

    Operators of different releases may share it. So nothing in it depends on who wrote it.
    """
    labels = {
        "app.kubernetes.io/name": "pdcluster",
        "app.kubernetes.io/component": CONNECTOR_COMPONENT,
        "app.kubernetes.io/part-of": "pdcluster",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        CONNECTOR_LABEL: connector.digest[:CONNECTOR_LENGTH],
    }
    metadata = {
        "name": connector_name(connector.digest),
        "namespace": namespace,
        "labels": labels,
        "annotations": {UNUSED_ANNOTATION: ""},
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,
        "binaryData": {CONNECTOR_FILE: _base64(connector.data)},
    }


@lru_cache(maxsize=4)
def _base64(data: bytes) -> str:
    """Return one string for all clusters: an operator has one connector all its life."""
    return base64.b64encode(data).decode()


def connector_volume(config_map: str) -> dict[str, Any]:
    """Return the volume of a pod that mounts a connector's ConfigMap."""
    return {"name": CONNECTOR_VOLUME, "configMap": {"name": config_map}}


def connector_mount() -> dict[str, Any]:
    """Return where a container sees it."""
    return {"name": CONNECTOR_VOLUME, "mountPath": CONNECTOR_FOLDER, "readOnly": True}
