"""Which fields of objects the store keeps: those that plans read.

Each namespace has a ConfigMap with the connector, of some hundred kB. The operator compares its
content and never reads it, so it keeps the hash: a thousand namespaces would need a gigabyte.
A pod's spec is the largest part of a pod, and of most statuses little is read. What many objects
have, :mod:`.shared_parts` holds once.
"""

import base64
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pdcluster_operator.api.object_names import is_connector_name
from pdcluster_operator.plan.types import Manifest

CONTENTS = ("data", "binaryData")
MARK = "sha256:"
STATUS_FIELDS: Mapping[str, tuple[str, ...]] = {
    "Deployment": ("observedGeneration", "replicas", "updatedReplicas", "availableReplicas"),
    "Job": ("conditions",),
    "Pod": ("podIP", "containerStatuses"),
}
POD_CONDITIONS = ("Ready", "PodScheduled")


def without_contents(manifest: Manifest) -> Manifest:
    """Return the ConfigMap of a connector with hashes of its contents; any other object as it is.

    The bytes are hashed, because the ConfigMap's name says the beginning of that hash. The result
    for a result is the same, so that both sides of a comparison may come from here.
    """
    if manifest.get("kind") != "ConfigMap" or not is_connector_name(manifest["metadata"]["name"]):
        return manifest
    hashed: dict[str, Any] = {
        part: {
            name: text if text.startswith(MARK) else _digest(text)
            for name, text in manifest[part].items()
        }
        for part in CONTENTS
        if manifest.get(part)
    }
    return {**manifest, **hashed}


def pod_spec_that_is_read(spec: Manifest) -> dict[str, Any]:
    """Return a pod's node, PodGroup, scheduling gates, limits (GPUs), and what it mounts of ours.

    That is its Secrets, and the ConfigMap with the connector.
    """
    volumes = spec.get("volumes") or ()
    secrets = (one["secret"].get("secretName") for one in volumes if one.get("secret"))
    maps = (one["configMap"].get("name") for one in volumes if one.get("configMap"))
    limits = ((one.get("resources") or {}).get("limits") for one in spec.get("containers") or ())
    kept = {
        "nodeName": spec.get("nodeName"),
        "schedulingGroup": spec.get("schedulingGroup"),
        "schedulingGates": spec.get("schedulingGates"),
        "volumes": [
            *({"secret": {"secretName": name}} for name in secrets),
            *({"configMap": {"name": name}} for name in maps if is_connector_name(str(name))),
        ],
        "containers": [{"resources": {"limits": one}} for one in limits if one],
    }
    return {name: value for name, value in kept.items() if value}


def status_that_is_read(kind: str, status: Manifest) -> dict[str, Any]:
    """Return what plans read of the status of a child or of a pod.

    Controllers write a status a dozen times while a cluster starts. Most of these changes are about
    what nobody here reads.
    """
    kept = {name: status[name] for name in STATUS_FIELDS.get(kind, ()) if name in status}
    if kind == "Pod":
        conditions = status.get("conditions") or ()
        kept["conditions"] = [one for one in conditions if one.get("type") in POD_CONDITIONS]
    return {name: value for name, value in kept.items() if value}


@lru_cache(maxsize=4)
def _digest(text: str) -> str:
    """Remembered, because all clusters of an operator have the same content."""
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError:
        content = text.encode()
    return MARK + hashlib.sha256(content).hexdigest()
