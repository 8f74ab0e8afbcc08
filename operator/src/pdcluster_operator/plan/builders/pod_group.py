"""A PodGroup: pods that get their nodes together or not at all.

Kubernetes' scheduler counts the pods that name the group. It gives nodes to none of them before at
least ``minCount`` fit, those that have a node already included.
"""

from __future__ import annotations

from typing import Any

from pdcluster_operator.api.labels import cluster_labels
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.metadata import child_metadata

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
