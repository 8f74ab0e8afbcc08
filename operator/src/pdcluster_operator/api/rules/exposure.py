"""What a cluster's pods share with their nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pdcluster_operator.api.findings import FieldError, Rule
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.pod_templates import containers
from pdcluster_operator.api.spec.types import Cluster

HOST_FIELDS = {
    "hostPID": "see all processes of the node, and can stop those of the same user",
    "hostIPC": "can read shared memory of all processes on the node that also use hostIPC",
    "hostNetwork": "use the node's network: two engines on one node need the same ports, and "
    "NetworkPolicies do not protect them",
}


def exposure_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield settings that give a pod access to its node."""
    templates: list[tuple[str, Mapping[str, Any] | None, str]] = [
        (f"spec.{role}", cluster.spec.role(role).pod_template, "engines") for role in Role
    ]
    templates.append(("spec.router", cluster.spec.router.pod_template, "routers"))
    for owner, template, what in templates:
        spec = template.get("spec") if template is not None else None
        if not isinstance(spec, Mapping):
            continue
        path = f"{owner}.podTemplate.spec"
        for name, means in HOST_FIELDS.items():
            if spec.get(name) is True:
                yield _host(f"{path}.{name}", f"these {what} {means}")
        for place, container in containers(template):
            security = container.get("securityContext")
            if isinstance(security, Mapping) and security.get("privileged") is True:
                where = f"{owner}.podTemplate.{place}.securityContext.privileged"
                yield _host(where, f"these {what} have the rights of root on the node")


def _host(path: str, message: str) -> FieldError:
    return FieldError(
        path,
        "true",
        Rule.HOST_NAMESPACE,
        message,
        "Use it only where you trust what runs in the pod and on the node; docs/operations.md "
        "says what needs it.",
    )
