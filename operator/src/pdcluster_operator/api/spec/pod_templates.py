"""Kubernetes' pod templates: their fields, how to read a user's of any shape, and how to merge it.

:func:`merge` lays a user's template over ours, in the spirit of Kubernetes' strategic merge.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final, TypeGuard

from pdcluster_operator.api.spec.types import Cluster, Role

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
    yield from mappings(template, "containers")
    yield from mappings(template, "initContainers")


def mappings(
    template: Mapping[str, Any] | None, field: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects in a list of a template's ``spec``, with their paths in the template."""
    for place, entry in enumerate(as_list(pod_spec(template).get(field))):
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
    # The check for dict is the quicker one.
    return value if isinstance(value, (dict, Mapping)) else {}


def as_list(value: object) -> Sequence[Any]:
    """Return a value that is a list; else an empty one."""
    return value if is_list(value) else ()


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a list, as JSON has it."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


REFUSED = frozenset({"activeDeadlineSeconds", "ephemeralContainers", "restartPolicy"})
REFUSED_BECAUSE = "Kubernetes refuses it in the template of a StatefulSet or Deployment"
PROCESS = frozenset({"args", "command"})
"""Fields of a container that say which process runs. Those of ours start launcher and router."""


def extra_args_instead(path: str, field: str) -> str:
    """Return what to write instead of a process of one's own, at or below a path of the spec."""
    part = path.split(".")[1] if "." in path else ""
    place = f"spec.{part}.extraArgs" if part in ("engine", "router") else "spec.engine.extraArgs"
    if part in (*Role,):
        place = f"spec.{part}.engine.extraArgs"
    program = "vllm-router" if part == "router" else "vllm serve"
    starts = f"Remove it: the operator starts {program}. " if field == "command" else ""
    return f"{starts}Write flags of {program} into {place}."


# The field that identifies an item of a list. Kubernetes requires it, but of a pull secret.
REQUIRED_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
KEYED_LISTS = {**REQUIRED_KEYS, "imagePullSecrets": "name"}
# Such an item names one of several sources. Two items merged would name two of them.
WHOLE_ITEMS = frozenset({"volumes", "env"})
# Plans read these of every template. Admission refuses a null, and a stored one removes nothing.
KEPT_FIELDS = {"V1PodTemplateSpec": "spec", "V1PodSpec": "containers", "V1Container": "image"}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
HOOKS = ("preStop", "postStart")
HANDLERS = ("exec", "grpc", "httpGet", "sleep", "tcpSocket")
TCP = "TCP"


def merge(base: Any, overlay: Any, key: str = "") -> Any:
    """Return ``base`` with ``overlay`` on top; neither is changed.

    Objects merge by key, the lists of ``KEYED_LISTS`` by the field that identifies an item. These
    are taken whole: volumes, variables, a mount of another volume, and what a probe or hook asks.
    Every other list is replaced. ``null`` removes a key, but none of ``KEPT_FIELDS``.
    For one of ``KEYED_LISTS`` it is an empty list, as Helm's ``range`` may write it: ours stays.
    """
    if isinstance(base, Mapping) and isinstance(overlay, Mapping):
        merged = _beside(base, overlay, key)
        for name, value in overlay.items():
            if value is None:
                if name not in (*KEPT_FIELDS.values(), *KEYED_LISTS):
                    merged.pop(name, None)
            elif name in merged:
                merged[name] = merge(merged[name], value, name)
            else:  # a null inside of it would reach the API server
                merged[name] = merge({}, value) if isinstance(value, Mapping) else value
        return merged
    if is_list(base) and is_list(overlay) and key in KEYED_LISTS:
        return _merge_items(base, overlay, KEYED_LISTS[key], whole=key in WHOLE_ITEMS)
    return overlay


def _beside(base: Mapping[str, Any], overlay: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a copy of ``base`` without what Kubernetes refuses beside ``overlay``."""
    refused: set[str] = set()
    if key in (*PROBES, *HOOKS) and any(overlay.get(name) is not None for name in HANDLERS):
        refused = set(HANDLERS)  # our scheme and path are not those of another server
    if key == "securityContext" and _escalates(overlay):
        refused = {"allowPrivilegeEscalation"}
    return {name: value for name, value in base.items() if name not in refused}


def _escalates(security: Mapping[str, Any]) -> bool:
    names = as_list(as_mapping(security.get("capabilities")).get("add"))
    admin = "SYS_ADMIN" in names or "CAP_SYS_ADMIN" in names
    return security.get("privileged") is True or admin


def _merge_items(
    base: Sequence[Any], overlay: Sequence[Any], field: str, *, whole: bool
) -> list[Any]:
    items = list(base)
    places = {found: n for n, item in enumerate(items) if (found := _identity(item, field))}
    for item in overlay:
        found = _identity(item, field)
        place = places.get(found) if found else None
        if place is None:  # a null inside of it would reach the API server
            items.append(merge({}, item) if isinstance(item, Mapping) else item)
        else:
            old = items[place]
            other = field == "mountPath" and item.get("name") not in (None, old.get("name"))
            items[place] = item if whole or other else merge(old, item)
    return items


def _identity(item: Any, field: str) -> tuple[str | int, str] | None:
    """Return what identifies an item; of a port, that is its protocol, too."""
    value = item.get(field) if isinstance(item, Mapping) else None
    if not isinstance(value, (str, int)):
        return None
    return value, str(item.get("protocol") or TCP) if field == "containerPort" else ""
