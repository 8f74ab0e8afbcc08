"""The Secret with the keys that sign tickets: all of it but the keys, and where pods mount it.

``plan/secrets/ticket_key.py`` says when it is written, and ``runtime/cluster_secrets.py`` makes the
keys then. No plan, status or log ever holds one.
"""

from __future__ import annotations

from typing import Any

from pdcluster_operator.api.labels import ROTATE_TICKET_KEY_ANNOTATION, cluster_labels
from pdcluster_operator.api.object_names import ticket_key_name
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.metadata import child_metadata

TICKET_KEY_VOLUME = "ticket-key"
TICKET_KEY_FOLDER = "/pdcluster-keys"
TICKET_KEY_FILE = "ticket"


def build_ticket_key_secret(cluster: Cluster, rotation: str) -> dict[str, Any]:
    """Return the Secret without its data; ``rotation`` is noted in an annotation."""
    labels = cluster_labels(cluster.name, "ticket-key")
    metadata = child_metadata(cluster, ticket_key_name(cluster.name), labels)
    metadata["annotations"] = {ROTATE_TICKET_KEY_ANNOTATION: rotation}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata}


def ticket_key_volume(cluster: Cluster) -> dict[str, Any]:
    """Return the volume of a pod that mounts the keys."""
    return {"name": TICKET_KEY_VOLUME, "secret": {"secretName": ticket_key_name(cluster.name)}}


def ticket_key_mount() -> dict[str, Any]:
    """Return where a container sees them. Without a subPath, so that the kubelet updates them."""
    return {"name": TICKET_KEY_VOLUME, "mountPath": TICKET_KEY_FOLDER, "readOnly": True}


def ticket_audience(cluster: Cluster, pairing_key: str) -> str:
    """Return which engines may use a ticket: those of this cluster with this pairing key."""
    return f"{cluster.namespace}/{cluster.name}/{pairing_key}"
