"""One engine: a StatefulSet with a pod for each node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdcluster_operator.api.labels import (
    CLUSTER_LABEL,
    ENGINE_LABEL,
    EngineName,
    engine_labels,
)
from pdcluster_operator.api.spec.resolve import Engine
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan.builders.engine_pod import build_engine_pod
from pdcluster_operator.plan.builders.metadata import child_metadata
from pdcluster_operator.plan.lost import choose_indexes
from pdcluster_operator.plan.rollout.revision import role_revision


def build_engine_statefulset(
    cluster: Cluster, engine: Engine, name: EngineName, pairing_key: str, digest: str
) -> dict[str, Any]:
    """Return the StatefulSet; ``OnDelete`` because only the planner restarts pods."""
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": child_metadata(cluster, name.stateful_set, engine_labels(name, pairing_key)),
        "spec": {
            "serviceName": name.stateful_set,
            "replicas": engine.parallelism.nodes,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {
                "matchLabels": {CLUSTER_LABEL: name.cluster, ENGINE_LABEL: name.stateful_set}
            },
            "template": build_engine_pod(cluster, engine, name, pairing_key, digest),
        },
    }


def engine_revision(cluster: Cluster, engine: Engine, pairing_key: str, digest: str) -> str:
    """Return the role's revision: a hash of the pod template without an engine's own name."""
    nobody = EngineName(cluster.namespace, cluster.name, engine.role, "", 0)
    return role_revision(build_engine_pod(cluster, engine, nobody, pairing_key, digest))


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
