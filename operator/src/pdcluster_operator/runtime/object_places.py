"""What an object is, which PDCluster it concerns, and where it stands in the store's indexes.

Who owns an object is decided by the UID of its controller. Labels only say which queue key an event
belongs to.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from pdcluster_operator.api.labels import CLUSTER_LABEL, SCALER_KIND
from pdcluster_operator.plan.connectors import (
    is_shared_connector,
    shared_connectors_of,
)
from pdcluster_operator.plan.objects.ownership import controller_uid
from pdcluster_operator.runtime.queue import Key

log = logging.getLogger(__name__)

Identity = tuple[str, str, str]
"""Kind, namespace, name."""
Place = tuple[str, ...]
"""An index, and under what an object stands in it."""

CLUSTER_KIND = "PDCluster"
# The indexes. An owner is always in the namespace of what it owns.
CLUSTERS, OWNER, POD_LABEL = "clusters", "owner", "pod-label"
CONNECTOR, MOUNTED = "connector", "mounted"


def key_of(manifest: Mapping[str, Any]) -> Key | None:
    """Return the key of the cluster that an object is, belongs to, or names in its label."""
    metadata = manifest["metadata"]
    namespace = metadata.get("namespace", "")
    if manifest["kind"] in (CLUSTER_KIND, SCALER_KIND):
        return Key(namespace, metadata["name"])
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("kind") == CLUSTER_KIND:
            return Key(namespace, owner["name"])
    return _labelled(manifest)


def places_of(manifest: Mapping[str, Any]) -> frozenset[Place]:
    """Return where an object stands in the indexes.

    Anybody may write objects with our labels. One that cannot be read stands in no index, because
    an error here would end the operator, and would end it again after each start.
    """
    try:
        return frozenset(_read_places(manifest))
    except Exception:
        log.exception("%s %s/%s cannot be read", *identity_of(manifest))
        return frozenset()


def _read_places(manifest: Mapping[str, Any]) -> Iterator[Place]:
    namespace = manifest["metadata"].get("namespace", "")
    if manifest["kind"] == CLUSTER_KIND:
        yield CLUSTERS, namespace
        return
    if manifest["kind"] == "Pod":
        if (key := _labelled(manifest)) is not None:
            yield (POD_LABEL, *key)
    elif uid := controller_uid(manifest):
        yield OWNER, namespace, uid
    elif is_shared_connector(manifest):
        yield CONNECTOR, namespace
    for config_map in shared_connectors_of(manifest):
        yield MOUNTED, namespace, config_map


def _labelled(manifest: Mapping[str, Any]) -> Key | None:
    metadata = manifest["metadata"]
    name = (metadata.get("labels") or {}).get(CLUSTER_LABEL)
    return Key(metadata.get("namespace", ""), name) if name else None


def identity_of(manifest: Mapping[str, Any]) -> Identity:
    """Return an object's kind, namespace and name."""
    metadata = manifest["metadata"]
    return manifest["kind"], metadata.get("namespace", ""), metadata["name"]
