"""The headless Service that gives an engine's pods their DNS names."""

from __future__ import annotations

from typing import Any

from pdcluster_operator.api.labels import CLUSTER_LABEL, ENGINE_LABEL, engine_labels
from pdcluster_operator.api.object_names import (
    ENGINE_METRICS_PORT,
    HTTP_PORT,
    LAUNCHER_PORT,
    SIDE_CHANNEL_PORT,
    EngineName,
)
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.metadata import child_metadata


def build_engine_service(cluster: Cluster, name: EngineName, pairing_key: str) -> dict[str, Any]:
    """Return the Service. Pods have names before they are ready: others connect to the first."""
    labels = engine_labels(name, pairing_key)
    ports = {
        "http": HTTP_PORT,
        "launcher": LAUNCHER_PORT,
        "metrics": ENGINE_METRICS_PORT,
        "side-channel": SIDE_CHANNEL_PORT,
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(cluster, name.stateful_set, labels),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {CLUSTER_LABEL: name.cluster, ENGINE_LABEL: name.stateful_set},
            "ports": [
                {"name": port, "port": number, "targetPort": port, "protocol": "TCP"}
                for port, number in ports.items()
            ],
        },
    }
