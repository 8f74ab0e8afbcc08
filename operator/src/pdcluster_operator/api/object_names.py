"""Names, addresses and TCP ports of the objects of a PDCluster, and the limits of names.

A StatefulSet's name may have 52 characters, because Kubernetes appends a revision of 11 characters
to it in a label of its pods. These 52 are: 34 of the cluster's name, ``-prefill-`` (9), a revision
(5) and ``-999`` (4).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pdcluster_operator.api.spec.enums import Role

HTTP_PORT = 8000
"""An engine's OpenAI API."""
LAUNCHER_PORT = 5590
ENGINE_METRICS_PORT = 5591
SIDE_CHANNEL_PORT = 5600
"""Of an engine's first data-parallel rank; the next ones have the next ports."""
MASTER_PORT = 29500
"""Where the pods of an engine of several nodes find each other."""
ROUTER_PORT = 8000
"""The OpenAI API for clients."""
ROUTER_METRICS_PORT = 29000

NAME_LIMIT = 34
REVISION_LENGTH = 5
CONNECTOR_LENGTH = 16
"""Digits of a connector's digest in a name."""

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SHARED_CONNECTOR = re.compile(rf"pdcluster-connector-[0-9a-f]{{{CONNECTOR_LENGTH}}}")


def name_errors(name: object) -> list[tuple[str, str]]:
    """Return (message, remedy) of each error in a cluster's name."""
    if not isinstance(name, str) or not name:
        return [("is missing", "Give the cluster a name.")]
    errors = []
    if not _DNS_1035.fullmatch(name):
        errors.append(
            (
                "must start with a letter and hold only lower-case letters, digits and hyphens",
                "Choose another name.",
            )
        )
    if len(name) > NAME_LIMIT:
        errors.append(
            (
                f"has {len(name)} characters; {NAME_LIMIT} are allowed: pods' names contain it",
                f"Choose a name of at most {NAME_LIMIT} characters.",
            )
        )
    return errors


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


def budget_name(cluster: str, component: str) -> str:
    """Name of the PodDisruptionBudget of a role or of the routers."""
    return f"{cluster}-{component}"


def engines_policy_name(cluster: str) -> str:
    """Name of the NetworkPolicy of a cluster's engines."""
    return f"{cluster}-engines"


def router_policy_name(cluster: str) -> str:
    """Name of the NetworkPolicy of a cluster's routers."""
    return f"{cluster}-router"
