"""Where a misplaced field belongs: in another object of the API, or in a pod template."""

from __future__ import annotations

from typing import Any

from pdcluster_operator.api.rules.pod_fields import TYPES
from pdcluster_operator.api.spec.fields import describe
from pdcluster_operator.api.spec.types import EngineOverride, Role, RoleSpec, Router, Spec

CONTAINER_FIELDS = frozenset(word.partition(":")[0] for word in TYPES["V1Container"].split())
POD_FIELDS = frozenset(word.partition(":")[0] for word in TYPES["V1PodSpec"].split())
ROLES = [f"spec.{role}" for role in Role]
METADATA_FIELDS = frozenset({"labels", "annotations"})


def where_it_belongs(path: str, key: str, cls: type[Any] | None) -> str:
    """Return the remedy for a field that belongs somewhere else; empty if it belongs nowhere.

    Args:
        path: of the object that the field was found in.
        key: the field's name.
        cls: the dataclass of that object.
    """
    if cls is None:
        return ""
    inside = [
        field.json_name
        for field in describe(cls)
        if field.kind == "object" and key in {inner.json_name for inner in describe(field.item)}
    ]
    if inside:
        places = " or ".join(f"{path}.{name}.{key}" for name in inside)
        return f"Write it as {places}."
    if issubclass(cls, EngineOverride) and key in {field.json_name for field in describe(RoleSpec)}:
        roles = [path.removesuffix(".engine")] if path != "spec.engine" else ROLES
        return f"Write it as {' or '.join(f'{role}.{key}' for role in roles)}."
    return _pod_template(path, key, cls)


def _pod_template(path: str, key: str, cls: type[Any]) -> str:
    container = "router" if cls is Router else "engine"
    if key in METADATA_FIELDS:
        place = f"podTemplate.metadata.{key}"
    elif key in POD_FIELDS:
        place = f"podTemplate.spec.{key}"
    elif key in CONTAINER_FIELDS:
        place = f"podTemplate.spec.containers, as {key} of the container {container}"
    else:
        return ""
    if cls in (RoleSpec, Router):
        return f"Write it as {path}.{place}."
    if issubclass(cls, EngineOverride) and path != "spec.engine":
        return f"Write it as {path.removesuffix('.engine')}.{place}."
    if issubclass(cls, EngineOverride) or cls is Spec:
        return f"Write it as spec.prefill.{place}; spec.decode and spec.router have one, too."
    return ""
