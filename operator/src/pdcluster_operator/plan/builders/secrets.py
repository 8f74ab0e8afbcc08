"""The Secrets that pods mount or read: certificates, keys that sign tickets, and the API key.

One Secret of the operator's holds the certificates of all engines of a cluster, and a pod mounts
those of its own engine alone. Another one holds the ticket keys. The API key is in a Secret of the
user's. :mod:`..renewals` says when the operator's Secrets are written. The keys are made then
(``runtime/cluster_secrets.py``, ``adapters/engine_authority.py``): no manifest, plan, status or log
ever holds one.

Engines ask clients for the API key by ``vllm/api_guard.py`` of the connector. Routers ask by its
``launcher/router_gate.py``, which :mod:`.router` has started in front of the router.
"""

from typing import Any

from pdcluster_connector.protocol.api_key import VARIABLE
from pdcluster_operator.api import object_names
from pdcluster_operator.api.spec.pod_templates import CERTIFICATE_FOLDER, ENGINE_CONTAINER
from pdcluster_operator.api.spec.types import Certificates, Cluster, TlsMode
from pdcluster_operator.plan.objects.ownership import child_object
from pdcluster_operator.plan.types import Manifest

CERTIFICATE_VOLUME = "certificate"
AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"


_SOURCES = {
    TlsMode.ENABLED: Certificates.OPERATOR,
    TlsMode.MOUNTED: Certificates.MOUNTED,
    TlsMode.DISABLED: Certificates.NONE,
}


def certificates_of(cluster: Cluster) -> Certificates:
    """Return which certificates the engines of this spec have."""
    return _SOURCES[cluster.spec.transfer.tls]


def has_certificates(cluster: Cluster) -> bool:
    """Whether the engines of this spec have certificates, so that they speak TLS."""
    return certificates_of(cluster) is not Certificates.NONE


def build_secret(cluster: Cluster, component: str, annotations: dict[str, str]) -> dict[str, Any]:
    """Return the Secret ``certificates`` or ``ticket-key`` without its data."""
    labels = object_names.cluster_labels(cluster.name, component)
    made = child_object(cluster, "v1", "Secret", f"{cluster.name}-{component}", labels)
    common = made["metadata"].get("annotations", {})
    metadata = {**made["metadata"], "annotations": common | annotations}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata}


def entry_of(name: object_names.EngineName) -> str:
    """Return the name of an engine's certificate in the Secret: ``prefill-7f9c4-0``."""
    return f"{name.role}-{name.revision}-{name.index}"


def certificate_volume(cluster: Cluster, name: object_names.EngineName) -> dict[str, Any]:
    """Return the volume of a pod that mounts the certificate of its engine, and no other one."""
    entry = entry_of(name)
    files = {
        AUTHORITY_FILE: AUTHORITY_FILE,
        f"{entry}.crt": CERTIFICATE_FILE,
        f"{entry}.key": KEY_FILE,
    }
    items = [{"key": key, "path": path} for key, path in files.items()]
    secret = {"secretName": object_names.certificates_name(cluster.name), "items": items}
    return {"name": CERTIFICATE_VOLUME, "secret": secret}


def renamed_volume(
    volume: Manifest, old: object_names.EngineName, new: object_names.EngineName
) -> Manifest:
    """Return a volume of a pod of ``old`` as the pods of ``new`` have it."""
    secret = volume.get("secret") or {}
    if (
        secret.get("secretName") != object_names.certificates_name(old.cluster)
        or "items" not in secret
    ):
        return volume
    keys = {f"{entry_of(old)}.{kind}": f"{entry_of(new)}.{kind}" for kind in ("crt", "key")}
    items = [{**item, "key": keys.get(item["key"], item["key"])} for item in secret["items"]]
    return {**volume, "secret": {**secret, "items": items}}


def tls_option(cluster: Cluster) -> dict[str, str]:
    """Return the connector's option ``tls``. All engines of a role mount the same files."""
    files = {"ca": AUTHORITY_FILE, "certificate": CERTIFICATE_FILE, "key": KEY_FILE}
    names = {"names": "roles"} if certificates_of(cluster) is Certificates.MOUNTED else {}
    return {name: f"{CERTIFICATE_FOLDER}/{file}" for name, file in files.items()} | names


def certificates_of_template(template: Manifest, cluster: str) -> Certificates:
    """Return which certificates the pods of a template have. With any, launchers speak HTTPS.

    Args:
        template: of a StatefulSet or of a stored revision, never a pod: others may change the
            labels of a pod.
        cluster: the name of the PDCluster.
    """
    if _mounts_own_volume(template.get("spec") or {}, object_names.certificates_name(cluster)):
        return Certificates.OPERATOR
    labels = (template.get("metadata") or {}).get("labels") or {}
    mounted = labels.get(object_names.TLS_LABEL) == TlsMode.MOUNTED
    return Certificates.MOUNTED if mounted else Certificates.NONE


def _mounts_own_volume(spec: Manifest, secret: str) -> bool:
    """Whether engines have the operator's volume. A user's volume may name the same Secret."""
    volumes = [one for one in spec.get("volumes") or () if one.get("name") == CERTIFICATE_VOLUME]
    sources = [one.get("secret") or {} for one in volumes]
    mounts = [
        (mount.get("name"), mount.get("mountPath"))
        for container in spec.get("containers") or ()
        if container.get("name") == ENGINE_CONTAINER
        for mount in container.get("volumeMounts") or ()
    ]
    ours = any(one.get("secretName") == secret and one.get("items") for one in sources)
    return ours and (CERTIFICATE_VOLUME, CERTIFICATE_FOLDER) in mounts


TICKET_KEY_VOLUME = "ticket-key"
TICKET_KEY_FOLDER = "/pdcluster-keys"
TICKET_KEY_FILE = "ticket"


def mounts(*, signed: bool) -> list[dict[str, Any]]:
    """Return where a container sees them. Without a subPath, so that the kubelet updates them."""
    places = {TICKET_KEY_VOLUME: TICKET_KEY_FOLDER}
    if signed:
        places[CERTIFICATE_VOLUME] = CERTIFICATE_FOLDER
    return [{"name": name, "mountPath": at, "readOnly": True} for name, at in places.items()]


def ticket_audience(cluster: Cluster, pairing_key: str) -> str:
    """Return which engines may use a ticket: those of this cluster with this pairing key."""
    return f"{cluster.namespace}/{cluster.name}/{pairing_key}"


# vLLM's own check asks for the key only on paths that begin with /v1.
ENGINE_MIDDLEWARE = "pdcluster_connector.vllm.api_guard.RequireKey"


def api_key_env(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the variable that engines and routers find the key in; nothing without a key."""
    ref = cluster.spec.router.api_key_secret_ref
    if ref is None:
        return []
    source = {"secretKeyRef": {"name": ref.name, "key": ref.key}}
    return [{"name": VARIABLE, "valueFrom": source}]
