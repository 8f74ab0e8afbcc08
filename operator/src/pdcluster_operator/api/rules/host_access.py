"""Rules of the access to nodes: hostPath, host namespaces and privileged containers.

Whoever may mount a folder of a node can read it, so an operator may forbid hostPath.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.spec.pod_templates import (
    as_list,
    as_mapping,
    containers,
    pod_spec,
    pod_templates,
)
from pdcluster_operator.api.spec.types import Cluster

REMEDY = (
    "Use a persistentVolumeClaim, or let the operator admit folders of the nodes "
    "(--allow-host-path-models, the chart's operator.allowHostPathModels)."
)
MESSAGE = "mounts a folder of the node, which this operator does not admit"


def host_path_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield every place where a spec mounts a folder of the node."""
    source = cluster.spec.model.source.host_path
    if source is not None:
        yield _error("spec.model.source.hostPath.path", source.path)
    for path, template, _ in pod_templates(cluster):
        for place, volume in enumerate(as_list(pod_spec(template).get("volumes"))):
            if isinstance(volume, Mapping) and volume.get("hostPath") is not None:
                yield _error(f"{path}.spec.volumes[{place}].hostPath", volume["hostPath"])


def host_path_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield the same places as warnings, for ``pdcluster lint``, which sees no operator."""
    for error in host_path_errors(cluster):
        yield replace(error, message="mounts a folder of the node, which a default install refuses")


def _error(path: str, value: object) -> FieldError:
    return FieldError(path, shown(value), Rule.HOST_PATH_NOT_ADMITTED, MESSAGE, REMEDY)


def node_local_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield a warning about a model in a folder, which every node must have."""
    if cluster.spec.model.source.host_path is not None:
        yield FieldError(
            "spec.model.source.hostPath.path",
            cluster.spec.model.source.host_path.path,
            Rule.NODE_LOCAL_MODEL,
            "the folder must exist on every node that an engine may run on",
            "Use a persistentVolumeClaim on a cluster of several nodes.",
        )


HOST_FIELDS = {
    "hostPID": "see all processes of the node, and can stop those of the same user",
    "hostIPC": "can read shared memory of all processes on the node that also use hostIPC",
    "hostNetwork": "use the node's network: two engines on one node need the same ports, and "
    "NetworkPolicies do not protect them",
}


def exposure_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield settings that give a pod access to its node."""
    for path, template, ours in pod_templates(cluster):
        spec = pod_spec(template)
        for name, means in HOST_FIELDS.items():
            if spec.get(name) is True:
                yield _host_field(f"{path}.spec.{name}", f"these {ours}s {means}")
        for place, container in containers(template):
            if as_mapping(container.get("securityContext")).get("privileged") is True:
                where = f"{path}.{place}.securityContext.privileged"
                yield _host_field(where, f"these {ours}s have the rights of root on the node")


def _host_field(path: str, message: str) -> FieldError:
    return FieldError(
        path,
        "true",
        Rule.HOST_NAMESPACE,
        message,
        "Use it only where you trust what runs in the pod and on the node; docs/operations.md "
        "says what needs it.",
    )
