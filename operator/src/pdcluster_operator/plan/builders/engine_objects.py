"""The objects of one engine beside its pod template: its StatefulSet, its Service, its PodGroup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.api.object_names import (
    CLUSTER_LABEL,
    ENGINE_LABEL,
    ENGINE_METRICS_PORT,
    HTTP_PORT,
    LAUNCHER_PORT,
    QUEUE_LABEL,
    SIDE_CHANNEL_PORT,
    EngineName,
    cluster_labels,
    engine_labels,
)
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.objects.ownership import child_metadata


def build_engine_statefulset(
    cluster: Cluster,
    name: EngineName,
    template: Mapping[str, Any],
    *,
    pairing_key: str,
    nodes: int,
    queue: str = "",
) -> dict[str, Any]:
    """Return the StatefulSet; ``OnDelete`` because only the planner restarts pods.

    Args:
        template: the pod template of this engine; see :func:`..rollout.revisions.engine_template`.
        nodes: pods of the engine.
        queue: Kueue's queue; empty for none.
    """
    labels = engine_labels(name, pairing_key)
    if queue:
        labels[QUEUE_LABEL] = queue
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": child_metadata(cluster, name.stateful_set, labels),
        "spec": {
            "serviceName": name.stateful_set,
            "replicas": nodes,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {
                "matchLabels": {CLUSTER_LABEL: name.cluster, ENGINE_LABEL: name.stateful_set}
            },
            "template": template,
        },
    }


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


POD_GROUP_KIND = "PodGroup"
GANG_COMPONENT = "gang"


def build_pod_group(cluster: Cluster, name: str, pods: int, priority: str) -> dict[str, Any]:
    """Return the PodGroup.

    Args:
        pods: how many pods have to fit at once.
        priority: ``priorityClassName`` of the pods; empty if they have none. The scheduler refuses
            pods whose priority is not that of their group.
    """
    spec: dict[str, Any] = {"schedulingPolicy": {"gang": {"minCount": pods}}}
    if priority:
        spec["priorityClassName"] = priority
    return {
        "apiVersion": "scheduling.k8s.io/v1beta1",
        "kind": POD_GROUP_KIND,
        "metadata": child_metadata(cluster, name, cluster_labels(cluster.name, GANG_COMPONENT)),
        "spec": spec,
    }
