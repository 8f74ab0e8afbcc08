"""Kubernetes' pod templates: which fields they have, and how to read a user's of any shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.types import Cluster

ENGINE_CONTAINER = "engine"
ROUTER_CONTAINER = "router"
CERTIFICATE_FOLDER = "/pdcluster-tls"
"""The folder of the certificate in an engine's container, the operator's or a mounted one."""


def _read_fields() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (type, its fields) from the table, which ``make generate`` writes."""
    for line in files(__package__).joinpath("pod_fields.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, *words = line.split(" ")
            yield name, dict(word.split(":", 1) for word in words)


FIELDS: Final[Mapping[str, Mapping[str, str]]] = dict(_read_fields())
"""Type of Kubernetes -> its fields and their types. The table's head explains them."""


def pod_templates(cluster: Cluster) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield every pod template of a spec: its path, itself, and our container's name in it."""
    for role in Role:
        template = cluster.spec.role(role).pod_template
        if template is not None:
            yield f"spec.{role}.podTemplate", template, ENGINE_CONTAINER
    if cluster.spec.router.pod_template is not None:
        yield "spec.router.podTemplate", cluster.spec.router.pod_template, ROUTER_CONTAINER


def pod_spec(template: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a template's ``spec``; empty if it has none."""
    return as_mapping((template or {}).get("spec"))


def containers(template: Mapping[str, Any] | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a template's containers with their paths in it, init containers last."""
    spec = pod_spec(template)
    for field in ("containers", "initContainers"):
        for place, entry in enumerate(as_list(spec.get(field))):
            if isinstance(entry, Mapping):
                yield f"spec.{field}[{place}]", entry


def engine_container(cluster: Cluster, role: Role) -> tuple[str, Mapping[str, Any]]:
    """Return (path, container) of the engine's container in a role's template; else ``{}``."""
    template = cluster.spec.role(role).pod_template
    for path, entry in containers(template):
        if path.startswith("spec.containers") and entry.get("name") == ENGINE_CONTAINER:
            return f"spec.{role}.podTemplate.{path}", entry
    return f"spec.{role}.podTemplate", {}


def amounts(container: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return a container's ``requests`` or ``limits``; empty if it has none."""
    given = as_mapping(as_mapping(container.get("resources")).get(kind))
    return {str(name): amount for name, amount in given.items()}


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a value that is an object; else an empty one."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: object) -> Sequence[Any]:
    """Return a value that is a list; else an empty one."""
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()
