"""Folders of the nodes. Who may mount a folder can read it, so an operator may forbid them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.spec.types import Cluster, Role

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
    templates: dict[str, Mapping[str, Any] | None] = {
        f"spec.{role}": cluster.spec.role(role).pod_template for role in Role
    }
    templates["spec.router"] = cluster.spec.router.pod_template
    for owner, template in templates.items():
        spec = (template or {}).get("spec")
        volumes = spec.get("volumes") if isinstance(spec, Mapping) else None
        for place, volume in enumerate(volumes if isinstance(volumes, list | tuple) else ()):
            if isinstance(volume, Mapping) and volume.get("hostPath") is not None:
                path = f"{owner}.podTemplate.spec.volumes[{place}].hostPath"
                yield _error(path, volume["hostPath"])


def host_path_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield the same places as warnings, where it is not known what the operator admits."""
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
