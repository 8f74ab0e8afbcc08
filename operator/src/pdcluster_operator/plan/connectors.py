"""The ConfigMaps with a connector: their content, which can be trusted, when one is deleted.

The PDClusters of a namespace share one. Nobody owns it, so it is judged by what mounts it; then
operators of several classes may share it, too. Two steps make sure that a pod never misses it:

1. It is marked. Whoever plans to mount a marked one takes the mark away first.
2. It is deleted when the mark is old, if the API server still has nothing that mounts it, and only
   in the version with the mark.

What somebody planned before the mark has long been written by then. The mark is in the object, so
another operator goes on where the first one stopped. The steps are carried out by
``adapters/operator_process.py``.
"""

import base64
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from pdcluster_operator.api import conditions, object_names
from pdcluster_operator.api.spec.pod_templates import as_list, as_mapping
from pdcluster_operator.plan import types
from pdcluster_operator.plan.objects import kept_fields, ownership

CONNECTOR_FILE = "connector.pyz"
CONNECTOR_FOLDER = "/pdcluster"
CONNECTOR_PATH = f"{CONNECTOR_FOLDER}/{CONNECTOR_FILE}"
CONNECTOR_COMPONENT = "connector"
CONNECTOR_VOLUME = "connector"
MOUNTING_KINDS = frozenset({"StatefulSet", "Deployment", "Job", "ControllerRevision", "Pod"})
"""The kinds that hold a pod's spec. A stored revision counts: engines may be made of it again."""


def is_shared_connector(manifest: types.Manifest) -> bool:
    """Whether an object is a ConfigMap with a connector that belongs to its whole namespace."""
    metadata = manifest["metadata"]
    digest = (metadata.get("labels") or {}).get(object_names.CONNECTOR_LABEL)
    return (
        manifest.get("kind") == "ConfigMap"
        and object_names.is_connector_name(str(metadata["name"]))
        and metadata["name"] == object_names.connector_name(str(digest))
        and not ownership.controller_uid(manifest)
    )


def shared_connectors_of(manifest: types.Manifest) -> frozenset[str]:
    """Return the names of the shared ConfigMaps that an object's pods mount.

    Others may have written the object, and Kubernetes checks nothing of a stored revision.
    """
    return frozenset(name for _, name in _connectors(_pod_spec(manifest)))


def mounted_connector(template: types.Manifest) -> str:
    """Return the name of the ConfigMap whose connector a pod runs; empty if none.

    Args:
        template: a pod template. A user may have added volumes to it.
    """
    found = _connectors(as_mapping(template.get("spec")))
    return next((name for volume, name in found if volume == CONNECTOR_VOLUME), "")


def connector_of(manifest: types.Manifest) -> str:
    """Return the name of the ConfigMap whose connector an object's pods run; empty if none."""
    return mounted_connector({"spec": _pod_spec(manifest)})


def config_maps_seen(observed: types.Observed) -> frozenset[str]:
    """Return the names of the ConfigMaps with a connector that exist for a cluster, and stay.

    One whose content does not match the hash in its name does not count.
    """
    staying = (one for one in observed.connectors if not marked_unused(one))
    return frozenset(str(one["metadata"]["name"]) for one in staying if not is_forged(one))


def marked_unused(connector: types.Manifest) -> str:
    """Return the time in the mark of an unused ConfigMap; empty if it has no mark."""
    annotations = connector["metadata"].get("annotations") or {}
    return str(annotations.get(object_names.UNUSED_ANNOTATION) or "")


def _pod_spec(manifest: types.Manifest) -> Mapping[str, Any]:
    """Return the spec of an object's pods; empty for other kinds than ``MOUNTING_KINDS``."""
    if manifest.get("kind") not in MOUNTING_KINDS:
        return {}
    if manifest["kind"] == "Pod":
        return as_mapping(manifest.get("spec"))
    part = "data" if manifest["kind"] == "ControllerRevision" else "spec"
    template = as_mapping(as_mapping(manifest.get(part)).get("template"))
    return as_mapping(template.get("spec"))


def _connectors(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of the volumes that hold a connector, and of their ConfigMaps."""
    for volume in map(as_mapping, as_list(spec.get("volumes"))):
        name = as_mapping(volume.get("configMap")).get("name")
        if isinstance(name, str) and object_names.is_connector_name(name):
            yield str(volume.get("name")), name


def is_forged(config_map: types.Manifest) -> bool:
    """Whether a ConfigMap has the name of a connector, but has other bytes or can be changed.

    Args:
        config_map: as the store keeps it, with hashes. One with its contents is not judged.
    """
    name = str(config_map["metadata"]["name"])
    if not object_names.is_connector_name(name):
        return False
    held = config_map.get("binaryData") or {}
    if not all(str(content).startswith(kept_fields.MARK) for content in held.values()):
        return False
    only = set(held) == {CONNECTOR_FILE} and not config_map.get("data")
    digest = name.rpartition("-")[2]
    right = only and str(held[CONNECTOR_FILE]).startswith(kept_fields.MARK + digest)
    return not (right and config_map.get("immutable") is True)


KEEP_SECONDS = 600.0
"""How old a mark must be before the deletion.

This is longer than any plan takes, and longer than a watch that works lags behind.
"""


def step_for_connector(
    live: types.Manifest, *, mounted: bool, now: float, keep: float = KEEP_SECONDS
) -> types.Apply | types.Delete | None:
    """Return what to do about the ConfigMap of a connector; None if nothing.

    It is marked by an apply of the mark alone, onto the version that was seen.

    Args:
        mounted: whether a StatefulSet, Deployment, stored revision or pod of its namespace mounts
            it.
        now: seconds since the epoch.
        keep: how old a mark has to be, in seconds.
    """
    if ownership.is_being_deleted(live):
        return None
    marked = marked_unused(live)
    if mounted:
        return _mark(live, "", "something mounts it again") if marked else None
    since = conditions.seconds(marked)
    if since is None or since > now + keep:
        return _mark(live, conditions.timestamp(now), "nothing mounts it")
    if now - since < keep:
        return None
    return types.deletion(live, "nothing has mounted it for a while")


def _mark(live: types.Manifest, since: str, why: str) -> types.Apply:
    """Return the apply of a mark; ``since`` is empty if something mounts the ConfigMap again."""
    seen = {key: live["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
    metadata = {**seen, "annotations": {object_names.UNUSED_ANNOTATION: since}}
    return types.Apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}, why)


def build_connector_configmap(namespace: str, connector: types.ConnectorBundle) -> dict[str, Any]:
    """Return the immutable ConfigMap of a namespace, named by the connector's hash.

    Operators of different releases may share it. So nothing in it depends on who wrote it.
    """
    labels = {
        "app.kubernetes.io/name": "pdcluster",
        "app.kubernetes.io/component": CONNECTOR_COMPONENT,
        "app.kubernetes.io/part-of": "pdcluster",
        "app.kubernetes.io/managed-by": object_names.FIELD_MANAGER,
        object_names.CONNECTOR_LABEL: connector.digest[: object_names.CONNECTOR_LENGTH],
    }
    metadata = {
        "name": object_names.connector_name(connector.digest),
        "namespace": namespace,
        "labels": labels,
        "annotations": {object_names.UNUSED_ANNOTATION: ""},
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,
        "binaryData": {CONNECTOR_FILE: _base64(connector.data)},
    }


@lru_cache(maxsize=4)
def _base64(data: bytes) -> str:
    """Return one string for all clusters: an operator has one connector all its life."""
    return base64.b64encode(data).decode()


def connector_volume(config_map: str) -> dict[str, Any]:
    """Return the volume of a pod that mounts a connector's ConfigMap."""
    return {"name": CONNECTOR_VOLUME, "configMap": {"name": config_map}}


def connector_mount() -> dict[str, Any]:
    """Return where a container sees it."""
    return {"name": CONNECTOR_VOLUME, "mountPath": CONNECTOR_FOLDER, "readOnly": True}
