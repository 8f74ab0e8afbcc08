"""Kubernetes' pod templates: their fields and values, how to read a user's, and how to merge it.

:func:`merge` lays a user's template over ours, in the spirit of Kubernetes' strategic merge.
"""

import ipaddress
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any, Final, TypeGuard

from pdcluster_operator.api.findings import Rule, did_you_mean
from pdcluster_operator.api.spec.fields import LABEL_KEY
from pdcluster_operator.api.spec.types import Cluster, Role

ENGINE_CONTAINER = "engine"
DOWNLOAD_CONTAINER = "download"
ROUTER_CONTAINER = "router"
SIDECAR_CONTAINER = "routing-proxy"
"""Of llm-d, an init container that goes on beside each decode engine."""
CERTIFICATE_FOLDER = "/pdcluster-tls"
"""The folder of the certificate in an engine's container, the operator's or a mounted one."""


def _read_fields() -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield (type, its (field, type, limit)) from the table, which ``make generate`` writes."""
    for line in files(__package__).joinpath("pod_fields.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, *words = line.split(" ")
            parts = (word.partition(":") for word in words)
            yield name, [(field, *kind.partition("=")[::2]) for field, _, kind in parts]


_TABLE = dict(_read_fields())
FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    name: {field.rstrip("!"): kind for field, kind, _ in rows} for name, rows in _TABLE.items()
}
"""Type of Kubernetes -> its fields and their types. The table's head explains them."""
NEEDED: Final = {
    name: [field[:-1] for field, _, _ in rows if field.endswith("!")]
    for name, rows in _TABLE.items()
}
"""Type of Kubernetes -> the fields that each object of it must have."""
LIMITS: Final = {
    (name, field.rstrip("!")): limit for name, rows in _TABLE.items() for field, _, limit in rows
}
"""(Type, field) -> which values the API server takes; empty for all."""
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DOMAIN = rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*"
_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
_KEY = rf"(?=([^/]*/)?[^/]{{1,63}}$)(?![^/]*(\.[-.]|-\.).*/)(?={LABEL_KEY.pattern})(?!.{{318}}).*"
_UP = r"(?!(.*/)?\.\.(/|$))"
# Name of a limit -> pattern, what it is, an example.
_NAMED = {
    "absolute": (r"/.*", "an absolute path", "/models"),
    "domain": (_DOMAIN, "a DNS name in lower case", "model.example.com"),
    "header": (r"[-A-Za-z0-9]+", "the name of an HTTP header", "X-Team"),
    "ip": ("", "an IP address", "10.0.0.10"),
    "key": (_KEY, "a key: [domain/]name, the name of at most 63 characters", "example.com/team"),
    "label": (
        _LABEL, "a DNS label: 1 to 63 lower-case letters, digits and hyphens", "model-cache",
    ),
    "path": (rf"{_UP}.*", "a path without '..'", "/models"),
    "port": (
        r"(?=.{1,15}$)(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*",
        "a name of a port: 1 to 15 lower-case letters, digits and hyphens", "http-metrics",
    ),
    "relative": (rf"(?!/)(?!\.\.[^/]){_UP}.*", "a relative path without '..'", "models/one"),
    "search": (rf"\.|(?=.{{1,254}}$)_?{_LABEL}(\._?{_LABEL})*\.?", "a DNS name", "example.com"),
    "value": (
        _VALUE, "the value of a label: at most 63 letters, digits, '-', '_' and '.'", "blue",
    ),
    "variable": (r"[ -<>-~]*", "the name of a variable: ASCII without '='", "HF_HOME"),
}  # fmt: skip
Wrong = tuple[Rule, str, str]
"""The rule, the message and the remedy of a finding."""


def wrong_value(limit: str, value: Any) -> Wrong | None:
    """Return why the API server refuses a value of the right type; None if it takes it.

    Args:
        limit: as in the table of fields, see its head.
    """
    if not limit or value == "":  # the API server fills in what is empty
        return None
    least, dots, most = ("0..511" if limit == "@mode" else limit).partition("..")
    if dots:  # a port may have a name, too
        return _wrong_number(limit, int(least), most, value) if isinstance(value, int) else None
    if not isinstance(value, str):
        return None
    return _wrong_name(limit[1:], value) if limit.startswith("@") else _wrong_word(limit, value)


def _wrong_number(limit: str, least: int, most: str, value: int) -> Wrong | None:
    if least <= value <= int(most or value):
        return None
    if limit == "@mode":
        return Rule.OUT_OF_RANGE, "is no file mode", "Write an octal number, such as 0644."
    if not most:
        return Rule.OUT_OF_RANGE, f"must be at least {least}", f"Write {least} or more."
    remedy = f"Write a number from {least} to {most}."
    return Rule.OUT_OF_RANGE, f"must be between {least} and {most}", remedy


def _wrong_name(limit: str, value: str) -> Wrong | None:
    pattern, what, example = _NAMED[limit]
    if limit == "ip":
        with suppress(ValueError):
            ipaddress.ip_address(value)
            return None
    elif re.fullmatch(pattern, value):
        return None
    return Rule.BAD_FORMAT, f"is not {what}", f"Write for example {example}."


def _wrong_word(limit: str, value: str) -> Wrong | None:
    words = limit.split("|")
    if any(value.startswith(word[:-1]) if word.endswith("*") else value == word for word in words):
        return None
    named = list(dict.fromkeys(word.rstrip("-*") for word in words))
    remedy = did_you_mean(value, named) or f"Write {' or '.join(named)}."
    one = "" if len(named) == 1 else "one of "
    return Rule.NOT_ALLOWED, f"must be {one}{', '.join(named)}", remedy


def _selects(*operators: str, few: Callable[[int], bool]) -> Callable[[Mapping[str, Any]], bool]:
    return lambda one: one.get("operator") in operators and few(len(as_list(one.get("values"))))


def _of_one_that_ends(field: str) -> Callable[[Mapping[str, Any]], bool]:
    def wrong(one: Mapping[str, Any]) -> bool:
        ends = one["restartPolicy"] != "Always" and one["name"] != SIDECAR_CONTAINER
        return ends and bool(one[field])

    return wrong


_CONFLICT, _REMOVE = Rule.CONFLICTING_SETTINGS, "Remove it."
_SELECTOR = (
    ("values", _selects("In", "NotIn", few=lambda number: number == 0), Rule.REQUIRED,
     "is missing beside operator In or NotIn", "List what is compared with."),
    ("values", _selects("Exists", "DoesNotExist", few=lambda number: number > 0), _CONFLICT,
     "is not allowed with operator Exists or DoesNotExist", "Remove it, or write In."),
    ("values", _selects("Gt", "Lt", few=lambda number: number != 1), _CONFLICT,
     "must have one number beside operator Gt or Lt", "Write one."),
)  # fmt: skip
_PROFILE = (
    ("localhostProfile", lambda one: one["type"] == "Localhost" and not one["localhostProfile"],
     Rule.REQUIRED, "is missing beside type Localhost", "Name the profile of the node."),
    ("localhostProfile",
     lambda one: one["localhostProfile"] and one["type"] not in (None, "Localhost"),
     _CONFLICT, "is allowed with type Localhost only", _REMOVE),
)  # fmt: skip
_ONCE = (
    ("successThreshold", lambda one: one["successThreshold"] not in (None, 0, 1),
     Rule.OUT_OF_RANGE, "may differ from 1 in a readinessProbe only", _REMOVE),
)  # fmt: skip
_Row = tuple[str, Callable[[Mapping[str, Any]], Any], Rule, str, str]
# Type, or the field that holds the object -> (field, whether it is wrong beside others, why).
_TOGETHER: Mapping[str, tuple[_Row, ...]] = {
    **dict.fromkeys(("V1AppArmorProfile", "V1SeccompProfile"), _PROFILE),
    "V1Container": (
        ("volumeMounts",
         lambda one: not as_mapping(one["securityContext"]).get("privileged")
         and any(as_mapping(mount).get("mountPropagation") == "Bidirectional"
                 for mount in as_list(one["volumeMounts"])),
         _CONFLICT, "need privileged: true for mountPropagation Bidirectional",
         "Write HostToContainer."),
    ),
    **dict.fromkeys(("V1LabelSelectorRequirement", "V1NodeSelectorRequirement"), _SELECTOR),
    "V1PodSpec": (
        ("dnsPolicy", lambda one: one["dnsPolicy"] == "None"
         and not as_mapping(one["dnsConfig"]).get("nameservers"),
         Rule.REQUIRED, "needs dnsConfig.nameservers", "Write one, or another policy."),
        ("serviceAccount", lambda o: o["serviceAccount"] not in ("", None, o["serviceAccountName"]),
         _CONFLICT, "is ignored beside the operator's serviceAccountName",
         "Write serviceAccountName."),
        ("hostPID", lambda one: one["hostPID"] and one["shareProcessNamespace"], _CONFLICT,
         "is not allowed beside shareProcessNamespace", "Remove one of them."),
        *((field, lambda one, field=field: one[field] and one["hostUsers"] is False, _CONFLICT,
           "is not allowed beside hostUsers: false", "Remove one of them.")
          for field in ("hostPID", "hostIPC")),
    ),
    "V1Toleration": (
        ("operator", lambda one: not one["key"] and one["operator"] != "Exists", _CONFLICT,
         "must be Exists in a toleration without a key", "Write a key, or operator: Exists."),
        ("value", lambda one: one["operator"] == "Exists" and one["value"], _CONFLICT,
         "is not allowed with operator Exists", _REMOVE),
        ("tolerationSeconds",
         lambda one: one["tolerationSeconds"] is not None and one["effect"] != "NoExecute",
         _CONFLICT, "is not allowed without effect NoExecute", "Remove it, or write that effect."),
    ),
    "V1TopologySpreadConstraint": (
        ("minDomains",
         lambda one: one["minDomains"] is not None and one["whenUnsatisfiable"] != "DoNotSchedule",
         _CONFLICT, "is not allowed without whenUnsatisfiable DoNotSchedule", _REMOVE),
    ),
    "V1VolumeMount": (
        ("subPath", lambda one: "$(" in str(one["subPath"]), _CONFLICT,
         "is taken as it is written", "Write subPathExpr."),
        ("recursiveReadOnly",
         lambda one: one["recursiveReadOnly"] in ("IfPossible", "Enabled") and not one["readOnly"],
         _CONFLICT, "needs readOnly: true", "Write readOnly: true, or leave it out."),
    ),
    "initContainers": tuple(
        (field, _of_one_that_ends(field),
         Rule.NOT_ALLOWED, "is not allowed in an init container that the pod waits for",
         "Remove it, or write restartPolicy: Always.")
        for field in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
    ),
    "livenessProbe": _ONCE,
    "readinessProbe": (
        ("terminationGracePeriodSeconds",
         lambda one: one["terminationGracePeriodSeconds"] is not None,
         Rule.NOT_ALLOWED, "is not allowed in a readinessProbe", _REMOVE),
    ),
    "startupProbe": _ONCE,
}  # fmt: skip


def wrong_together(kind: str, field: str, one: Mapping[str, Any]) -> Iterator[tuple[str, Wrong]]:
    """Yield (field, why) of fields of an object that the API server does not take together.

    Args:
        field: the one that holds the object, or a list of such objects.
    """
    read = defaultdict(lambda: None, one)
    for name, wrong, rule, message, remedy in (*_TOGETHER.get(kind, ()), *_TOGETHER.get(field, ())):
        if wrong(read):
            yield name, (rule, message, remedy)


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
UNREMOVABLE = frozenset({*KEPT_FIELDS.values(), *KEYED_LISTS})
"""Fields of which :func:`merge` takes a null for no value."""
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
                if name not in UNREMOVABLE:
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
    if key == "spec" and overlay.get("hostPID") is True:
        refused = {"shareProcessNamespace"}
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
