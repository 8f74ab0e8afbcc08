"""The Secret with the engines' certificates: all of it but the keys, and where pods mount it.

One Secret holds the certificates of all engines of a cluster. A pod mounts those of its own engine
alone. The keys are made when the Secret is written. No plan, status or log ever holds one.
"""

from __future__ import annotations

from typing import Any

from pdcluster_operator.api.labels import (
    CERTIFICATES_ANNOTATION,
    CLUSTER_LABEL,
    EngineName,
    certificates_name,
    cluster_labels,
)
from pdcluster_operator.api.spec.enums import Switch
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.metadata import child_metadata
from pdcluster_operator.plan.model import Manifest

CERTIFICATE_VOLUME = "certificate"
CERTIFICATE_FOLDER = "/pdcluster-tls"
AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"


def has_certificates(cluster: Cluster) -> bool:
    """Whether the engines of this spec have certificates of the operator."""
    return cluster.spec.transfer.tls is Switch.ENABLED


def build_certificates_secret(cluster: Cluster, issue: str) -> dict[str, Any]:
    """Return the Secret without its data; ``issue`` is noted in an annotation."""
    labels = cluster_labels(cluster.name, "certificates")
    metadata = child_metadata(cluster, certificates_name(cluster.name), labels)
    metadata["annotations"] = {CERTIFICATES_ANNOTATION: issue}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata}


def entry_of(name: EngineName) -> str:
    """Return the name of an engine's certificate in the Secret: ``prefill-7f9c4-0``."""
    return f"{name.role}-{name.revision}-{name.index}"


def certificate_volume(cluster: Cluster, name: EngineName) -> dict[str, Any]:
    """Return the volume of a pod that mounts the certificate of its engine, and no other one."""
    entry = entry_of(name)
    files = {
        AUTHORITY_FILE: AUTHORITY_FILE,
        f"{entry}.crt": CERTIFICATE_FILE,
        f"{entry}.key": KEY_FILE,
    }
    items = [{"key": key, "path": path} for key, path in files.items()]
    secret = {"secretName": certificates_name(cluster.name), "items": items}
    return {"name": CERTIFICATE_VOLUME, "secret": secret}


def renamed_volume(volume: Manifest, old: EngineName, new: EngineName) -> Manifest:
    """Return a volume of a pod of ``old`` as the pods of ``new`` have it."""
    secret = volume.get("secret") or {}
    if secret.get("secretName") != certificates_name(old.cluster) or "items" not in secret:
        return volume
    keys = {f"{entry_of(old)}.{kind}": f"{entry_of(new)}.{kind}" for kind in ("crt", "key")}
    items = [{**item, "key": keys.get(item["key"], item["key"])} for item in secret["items"]]
    return {**volume, "secret": {**secret, "items": items}}


def certificate_mount() -> dict[str, Any]:
    """Return where a container sees it. Without a subPath, so that the kubelet updates it."""
    return {"name": CERTIFICATE_VOLUME, "mountPath": CERTIFICATE_FOLDER, "readOnly": True}


def tls_option() -> dict[str, str]:
    """Return the connector's option ``tls``."""
    files = {"ca": AUTHORITY_FILE, "certificate": CERTIFICATE_FILE, "key": KEY_FILE}
    return {name: f"{CERTIFICATE_FOLDER}/{file}" for name, file in files.items()}


def mounts_certificate(pod: Manifest) -> bool:
    """Whether a pod was made with a certificate, so that its launcher speaks HTTPS."""
    labels = pod["metadata"].get("labels") or {}
    name = certificates_name(str(labels.get(CLUSTER_LABEL, "")))
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    return any((volume.get("secret") or {}).get("secretName") == name for volume in volumes)
