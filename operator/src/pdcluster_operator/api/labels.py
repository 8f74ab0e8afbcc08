"""Labels and annotations of the objects of a PDCluster, and the names of its API."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.enums import Role

GROUP = "pdcluster.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "PDCluster"
PLURAL = "pdclusters"
SCALER_KIND = "PrefillScaler"
SCALER_PLURAL = "prefillscalers"
FIELD_MANAGER = "pdcluster-operator"
STATUS_FIELD_MANAGER = "pdcluster-operator-status"
OPERATOR_LABELS = {
    "app.kubernetes.io/part-of": "pdcluster",
    "app.kubernetes.io/component": "operator",
}
"""Labels of the operator's own pods. Network policies let in the pods that have them."""

CLUSTER_LABEL = f"{GROUP}/cluster"
ROLE_LABEL = f"{GROUP}/role"
REVISION_LABEL = f"{GROUP}/revision"
PAIRING_LABEL = f"{GROUP}/pairing-key"
ENGINE_LABEL = f"{GROUP}/engine"
POD_INDEX_LABEL = "apps.kubernetes.io/pod-index"
APPLIED_ANNOTATION = f"{GROUP}/applied"
RENDERED_ANNOTATION = f"{GROUP}/rendered"
"""On a router's Deployment: its pod template without the engines' addresses, and the template's
inputs."""
RELEASED_ANNOTATION = f"{GROUP}/released-at"
"""On an engine's StatefulSet: since when it has no pods, because not all of them fit."""
RELEASED_BECAUSE_ANNOTATION = f"{GROUP}/released-because"
ROTATE_TICKET_KEY_ANNOTATION = f"{GROUP}/rotate-ticket-key"
"""On a PDCluster: each new value asks for a new ticket key. On the Secret: the last such value."""

TLS_LABEL = f"{GROUP}/tls"
"""In an engine's pod template: Mounted, if its pods use certificates that the user mounts. On a
pod it decides nothing, because others may change it."""
CERTIFICATES_ANNOTATION = f"{GROUP}/certificates"
"""On the Secret with engines' certificates: which authority made them, and for which time."""
CERTIFICATES_HASH_ANNOTATION = f"{GROUP}/certificates-hash"
"""On the same Secret: a hash of each entry that was written, which shows what somebody changed."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Kueue's label of a StatefulSet: which LocalQueue admits its pods."""
WORKLOAD_LABEL = "kueue.x-k8s.io/pod-group-name"
"""Kueue's label of a pod: which Workload it belongs to."""
KUEUE_GATES = "kueue.x-k8s.io/"
"""How the names of Kueue's scheduling gates begin."""
CONNECTOR_LABEL = f"{GROUP}/connector"
"""On a ConfigMap that PDClusters of a namespace share: the beginning of the connector's digest."""
UNUSED_ANNOTATION = f"{GROUP}/unused-since"
"""On the same ConfigMap: since when nothing mounts it; empty while something does."""


def engine_of(manifest: Mapping[str, object]) -> EngineName | None:
    """Return the engine that an object belongs to by its labels; None if it belongs to none."""
    metadata = manifest.get("metadata")
    if not isinstance(metadata, (dict, Mapping)):  # the check for dict is the quicker one
        return None
    labels = metadata.get("labels")
    if not isinstance(labels, (dict, Mapping)):
        return None
    engine, role = labels.get(ENGINE_LABEL), labels.get(ROLE_LABEL)
    if not isinstance(engine, str) or not isinstance(role, str):
        return None
    namespace = str(metadata.get("namespace") or "default")
    cluster, revision = labels.get(CLUSTER_LABEL, ""), labels.get(REVISION_LABEL, "")
    return _engine_named(namespace, str(cluster), role, str(revision), engine)


@lru_cache(maxsize=1 << 14)
def _engine_named(
    namespace: str, cluster: str, role: str, revision: str, engine: str
) -> EngineName | None:
    """Cached, because a plan reads the engine of each object several times."""
    index = engine.rpartition("-")[2]
    if role not in (Role.PREFILL.value, Role.DECODE.value) or not index.isdecimal():
        return None
    return EngineName(namespace, cluster, Role(role), revision, int(index))


def cluster_labels(cluster: str, component: str) -> dict[str, str]:
    """Labels of every child; ``component`` is prefill, decode, router and so on."""
    return {
        "app.kubernetes.io/name": "pdcluster",
        "app.kubernetes.io/instance": cluster,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "pdcluster",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        CLUSTER_LABEL: cluster,
    }


def engine_labels(engine: EngineName, pairing_key: str) -> dict[str, str]:
    """Labels of an engine's StatefulSet, Service and pods."""
    return cluster_labels(engine.cluster, engine.role.value) | {
        ROLE_LABEL: engine.role.value,
        REVISION_LABEL: engine.revision,
        PAIRING_LABEL: pairing_key,
        ENGINE_LABEL: engine.stateful_set,
    }


def role_selector(cluster: str, role: Role) -> str:
    """Label selector of the leading pod of each engine of a role, for /scale."""
    return f"{CLUSTER_LABEL}={cluster},{ROLE_LABEL}={role.value},{POD_INDEX_LABEL}=0"
