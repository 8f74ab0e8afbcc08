"""One engine: a StatefulSet with a pod for each node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdcluster_operator.api.labels import CLUSTER_LABEL, ENGINE_LABEL, QUEUE_LABEL, engine_labels
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan.builders.metadata import child_metadata
from pdcluster_operator.plan.lost import choose_indexes
from pdcluster_operator.plan.rollout.stored import Revision, bound, in_group


def build_engine_statefulset(
    cluster: Cluster, revision: Revision, name: EngineName, *, group: str = "", queue: str = ""
) -> dict[str, Any]:
    """Return the StatefulSet; ``OnDelete`` because only the planner restarts pods.

    Args:
        group: the PodGroup of its pods; empty for none.
        queue: Kueue's queue; empty for none.
    """
    labels = engine_labels(name, revision.pairing_key)
    if queue:
        labels[QUEUE_LABEL] = queue
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": child_metadata(cluster, name.stateful_set, labels),
        "spec": {
            "serviceName": name.stateful_set,
            "replicas": revision.nodes,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {
                "matchLabels": {CLUSTER_LABEL: name.cluster, ENGINE_LABEL: name.stateful_set}
            },
            "template": in_group(bound(revision, name), group),
        },
    }


def engine_names(
    cluster: Cluster,
    role: Role,
    revision: str,
    live: Iterable[EngineName] = (),
    lost: Iterable[EngineName] = (),
) -> tuple[EngineName, ...]:
    """Return the names of all engines that the spec wants of a role.

    Args:
        live: engines that exist.
        lost: engines whose names cannot be used, because their node is gone.
    """

    def indexes(names: Iterable[EngineName]) -> set[int]:
        return {name.index for name in names if (name.role, name.revision) == (role, revision)}

    replicas = cluster.spec.role(role).replicas
    return tuple(
        EngineName(cluster.namespace, cluster.name, role, revision, index)
        for index in choose_indexes(replicas, indexes(live), indexes(lost))
    )
