"""Metadata of every child: name, namespace, labels and owner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.api.labels import API_VERSION, KIND
from pdcluster_operator.api.spec.types import Cluster


def child_metadata(cluster: Cluster, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return metadata with the cluster as controlling owner, so that deletion cascades."""
    return {
        "name": name,
        "namespace": cluster.namespace,
        "labels": dict(labels),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": cluster.name,
                "uid": cluster.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
