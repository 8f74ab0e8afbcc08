"""One engine: a StatefulSet with a pod for each node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.api.labels import CLUSTER_LABEL, ENGINE_LABEL, QUEUE_LABEL, engine_labels
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.metadata import child_metadata


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
        template: the pod template of this engine; see :func:`..rollout.stored.engine_template`.
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
