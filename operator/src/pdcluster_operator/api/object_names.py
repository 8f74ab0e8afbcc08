"""Names, addresses, TCP ports, labels and annotations of the objects of a PDCluster.

A StatefulSet's name may have 52 characters, because Kubernetes appends a revision of 11 characters
to it in a label of its pods. These 52 are: 34 of the cluster's name, ``-prefill-`` (9), a revision
(5) and ``-999`` (4).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.api.spec.types import Role

HTTP_PORT = 8000
"""An engine's OpenAI API."""
LAUNCHER_PORT = 5590
ENGINE_METRICS_PORT = 5591
SIDE_CHANNEL_PORT = 5600
"""Of an engine's first data-parallel rank; the next ones have the next ports."""
MASTER_PORT = 29500
"""Where the pods of an engine of several nodes find each other."""
BEHIND_SIDECAR_PORT = 8200
"""Where a decode engine listens behind the sidecar: its default for ``--model-server-port``."""
ROUTER_PORT = 8000
"""The OpenAI API for clients."""
ROUTER_METRICS_PORT = 29000
ENGINE_PORTS = {
    "http": HTTP_PORT,
    "launcher": LAUNCHER_PORT,
    "metrics": ENGINE_METRICS_PORT,
    "side-channel": SIDE_CHANNEL_PORT,
}
ROUTER_PORTS = {"http": ROUTER_PORT, "metrics": ROUTER_METRICS_PORT}
GATE = "gate"
"""The router's port that the kubelet asks if clients need an API key."""

NAME_LIMIT = 34
REVISION_LENGTH = 5
CONNECTOR_LENGTH = 16
"""Digits of a connector's digest in a name."""

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SHARED_CONNECTOR = re.compile(rf"pdcluster-connector-[0-9a-f]{{{CONNECTOR_LENGTH}}}")


def name_errors(name: object) -> Iterator[tuple[str, str]]:
    """Yield (message, remedy) of each error in a cluster's name."""
    if name is None or name == "":
        yield "is missing", "Give the cluster a name."
        return
    if not isinstance(name, str):
        yield "must be text", "Write it in quotes."
        return
    if not _DNS_1035.fullmatch(name):
        message = "must start with a letter and hold only lower-case letters, digits and hyphens"
        yield message, "Choose another name."
    if len(name) > NAME_LIMIT:
        message = f"has {len(name)} characters; {NAME_LIMIT} are allowed: pods' names contain it"
        yield message, f"Choose a name of at most {NAME_LIMIT} characters."


def namespace_errors(namespace: object) -> Iterator[tuple[str, str]]:
    """Yield (message, remedy) of the error in a namespace's name, if it has one."""
    if not isinstance(namespace, str):
        yield "must be text", "Write it in quotes."
    elif not _DNS_1123.fullmatch(namespace):
        message = "must be 1 to 63 lower-case letters, digits and hyphens, with no hyphen at an end"
        yield message, "Name a namespace of the cluster."


@dataclass(frozen=True, slots=True, order=True)
class EngineName:
    """Identifies an engine. Its objects' names and addresses follow from it."""

    namespace: str
    cluster: str
    role: Role
    revision: str
    index: int

    @property
    def logical(self) -> str:
        """Stable id of the engine, over restarts: ``namespace.cluster.role.revision.index``."""
        return f"{self.namespace}.{self.cluster}.{self.role}.{self.revision}.{self.index}"

    @property
    def stateful_set(self) -> str:
        """Name of the engine's StatefulSet and of its headless Service."""
        return f"{self.cluster}-{self.role}-{self.revision}-{self.index}"

    def pod(self, node: int = 0) -> str:
        """Name of one of the engine's pods; node 0 leads."""
        return f"{self.stateful_set}-{node}"

    def host(self, node: int = 0) -> str:
        """DNS name of one of the engine's pods."""
        return f"{self.pod(node)}.{self.stateful_set}.{self.namespace}.svc"

    @property
    def api_url(self) -> str:
        """Where the engine's OpenAI API answers."""
        return f"http://{self.host()}:{HTTP_PORT}"


def engine_ports(ranks: int) -> dict[str, int]:
    """Return the names and numbers of the ports of an engine with that many data-parallel ranks.

    Kubernetes takes names of 15 characters.
    """
    return ENGINE_PORTS | {f"side-ch-{rank}": SIDE_CHANNEL_PORT + rank for rank in range(1, ranks)}


def router_ports(*, gated: bool) -> dict[str, int]:
    """Return the ports of a router; with ``gated``, clients need an API key."""
    return ROUTER_PORTS | ({GATE: LAUNCHER_PORT} if gated else {})


def short(engine: str) -> str:
    """``prefill/0`` for a logical id ``namespace.cluster.prefill.revision.0``."""
    parts = engine.split(".")
    return f"{parts[2]}/{parts[4]}" if len(parts) == 5 else engine


def router_name(cluster: str) -> str:
    """Name of the Service that clients talk to."""
    return f"{cluster}-router"


def router_deployment_name(cluster: str, pairing_key: str) -> str:
    """Name of the router Deployment of one pairing key."""
    return f"{cluster}-router-{pairing_key}"


def connector_name(digest: str) -> str:
    """Name of the ConfigMap that holds the connector for a namespace, by its content."""
    return f"pdcluster-connector-{digest[:CONNECTOR_LENGTH]}"


def is_connector_name(name: str) -> bool:
    """Whether a ConfigMap of this name holds a connector for a namespace."""
    return _SHARED_CONNECTOR.fullmatch(name) is not None


def start_group_name(cluster: str, suffix: str) -> str:
    """Name of the PodGroup of the engines that start together."""
    return f"{cluster}-start-{suffix}"


def is_group_of(name: EngineName, group: str) -> bool:
    """Whether a PodGroup of this name is one that the operator makes for an engine."""
    return group == name.stateful_set or group.startswith(start_group_name(name.cluster, ""))


def revision_name(cluster: str, role: Role, revision: str) -> str:
    """Name of the ControllerRevision of one revision of a role."""
    return f"{cluster}-{role}-{revision}"


def ticket_key_name(cluster: str) -> str:
    """Name of the Secret with the keys that sign a cluster's tickets."""
    return f"{cluster}-ticket-key"


def certificates_name(cluster: str) -> str:
    """Name of the Secret with the certificates of a cluster's engines."""
    return f"{cluster}-certificates"


def service_account_name(cluster: str) -> str:
    """Name of the ServiceAccount of a cluster's pods."""
    return f"{cluster}-pods"


GROUP = "pdcluster.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "PDCluster"
PLURAL = "pdclusters"
SCALER_KIND = "PrefillScaler"
SCALER_PLURAL = "prefillscalers"
FIELD_MANAGER = "pdcluster-operator"
STATUS_FIELD_MANAGER = "pdcluster-operator-status"
SCALE_FIELD_MANAGER = "pdcluster-operator-scale"
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
ACCEPTED_ANNOTATION = f"{GROUP}/accepted"
"""On the ServiceAccount of a cluster's pods: accepted fields that nothing else holds."""
RELEASED_ANNOTATION = f"{GROUP}/released-at"
"""On an engine's StatefulSet: since when it has no pods, because not all of them fit."""
RELEASED_BECAUSE_ANNOTATION = f"{GROUP}/released-because"
ROTATE_TICKET_KEY_ANNOTATION = f"{GROUP}/rotate-ticket-key"
"""On a PDCluster: each new value asks for a new ticket key. On the Secret: the last such value."""
TICKET_KEY_HASH_ANNOTATION = f"{GROUP}/ticket-key-hash"
"""On the Secret: a hash of the keys that were written, which shows what somebody changed."""

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


def labels_of(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the labels of an object; of a workload, those of its pods.

    Somebody may change the labels of a workload itself. Those of its pods have to match its
    selector, which never changes.
    """
    template = as_mapping(manifest.get("spec")).get("template")
    return as_mapping(as_mapping((template or manifest).get("metadata")).get("labels"))


def engine_of(manifest: Mapping[str, Any]) -> EngineName | None:
    """Return the engine that an object belongs to by its labels; None if it belongs to none.

    Somebody may change labels of a pod. Only those two that are read here take it from its
    StatefulSet, because they are its selector.
    """
    labels = labels_of(manifest)
    namespace = str(as_mapping(manifest.get("metadata")).get("namespace") or "default")
    cluster, engine = str(labels.get(CLUSTER_LABEL)), str(labels.get(ENGINE_LABEL))
    return _engine_named(namespace, cluster, engine)


def pairing_key_of(manifest: Mapping[str, Any]) -> str:
    """Return the pairing key in an object's labels; empty if it has none."""
    return str(labels_of(manifest).get(PAIRING_LABEL, ""))


@lru_cache(maxsize=1 << 14)
def _engine_named(namespace: str, cluster: str, engine: str) -> EngineName | None:
    """Cached, because a plan reads the engine of each object several times."""
    named, role, revision, index = ["", "", "", *engine.rsplit("-", 3)][-4:]
    if named != cluster or role not in list(Role) or not index.isdecimal():
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


def url_host(address: str) -> str:
    """Return an IP address as a URL writes it: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def role_selector(cluster: str, role: Role) -> str:
    """Label selector of the leading pod of each engine of a role, for /scale."""
    return f"{CLUSTER_LABEL}={cluster},{ROLE_LABEL}={role.value},{POD_INDEX_LABEL}=0"
