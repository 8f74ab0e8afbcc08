"""Which ConfigMaps with a connector there are, and which of them pods mount."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pdcluster_operator.api.labels import CONNECTOR_LABEL, UNUSED_ANNOTATION
from pdcluster_operator.api.object_names import (
    connector_name,
    is_connector_name,
    owner_of_connector,
)
from pdcluster_operator.plan.builders.connector_configmap import CONNECTOR_VOLUME
from pdcluster_operator.plan.model import Manifest, Observed
from pdcluster_operator.plan.objects.ownership import controller_uid
from pdcluster_operator.plan.shared_connectors.forged_connectors import is_forged

MOUNTING_KINDS = frozenset({"StatefulSet", "Deployment", "ControllerRevision", "Pod"})
"""The kinds that hold a pod's spec. A stored revision counts: engines may be made of it again."""


def is_shared_connector(manifest: Manifest) -> bool:
    """Whether an object is a ConfigMap with a connector that belongs to its whole namespace."""
    metadata = manifest["metadata"]
    digest = (metadata.get("labels") or {}).get(CONNECTOR_LABEL)
    return (
        manifest.get("kind") == "ConfigMap"
        and is_connector_name(str(metadata["name"]))
        and metadata["name"] == connector_name(str(digest))
        and not controller_uid(manifest)
    )


def shared_connectors_of(manifest: Manifest) -> frozenset[str]:
    """Return the names of the shared ConfigMaps that an object's pods mount."""
    return frozenset(filter(is_connector_name, config_maps_of(manifest)))


def config_maps_of(manifest: Manifest) -> frozenset[str]:
    """Return the names of all ConfigMaps that an object's pods mount.

    Others may have written the object, and Kubernetes checks nothing of a stored revision.
    """
    if manifest.get("kind") not in MOUNTING_KINDS:
        return frozenset()
    return frozenset(name for _, name in _config_maps(_pod_spec(manifest)))


def mounted_connector(cluster: str, template: Manifest) -> str:
    """Return the name of the ConfigMap whose connector a pod mounts; empty if none.

    Args:
        template: a pod template of the PDCluster ``cluster``. A user may have added volumes to it.
    """
    for volume, name in _config_maps(_mapping(template.get("spec"))):
        ours = is_connector_name(name) or owner_of_connector(name) == cluster
        if volume == CONNECTOR_VOLUME and ours:
            return name
    return ""


def connector_of(cluster: str, manifest: Manifest) -> str:
    """Return the name of the ConfigMap whose connector an object's pods mount; empty if none."""
    if manifest.get("kind") not in MOUNTING_KINDS:
        return ""
    return mounted_connector(cluster, {"spec": _pod_spec(manifest)})


def digest_in(config_map: str) -> str:
    """Return the beginning of the digest that stands in the name of a connector's ConfigMap."""
    return config_map.rpartition("-")[2]


def config_maps_seen(observed: Observed) -> frozenset[str]:
    """Return the names of the ConfigMaps with a connector that exist for a cluster, and stay.

    One that holds another connector than its name says is as good as none.
    """
    own = (child for child in observed.children if child.get("kind") == "ConfigMap")
    shared = (one for one in observed.connectors if not marked_unused(one))
    found = (one for one in (*own, *shared) if not is_forged(one))
    return frozenset(str(one["metadata"]["name"]) for one in found)


def marked_unused(connector: Manifest) -> str:
    """Return since when nothing mounts a shared ConfigMap, as it says; empty if it does not."""
    annotations = connector["metadata"].get("annotations") or {}
    return str(annotations.get(UNUSED_ANNOTATION) or "")


def _pod_spec(manifest: Manifest) -> Mapping[str, Any]:
    if manifest["kind"] == "Pod":
        return _mapping(manifest.get("spec"))
    part = "data" if manifest["kind"] == "ControllerRevision" else "spec"
    template = _mapping(_mapping(manifest.get(part)).get("template"))
    return _mapping(template.get("spec"))


def _config_maps(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of the volumes that hold a ConfigMap, and of these ConfigMaps."""
    volumes = spec.get("volumes")
    for volume in map(_mapping, volumes if isinstance(volumes, list | tuple) else ()):
        name = _mapping(volume.get("configMap")).get("name")
        if isinstance(name, str):
            yield str(volume.get("name")), name


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
