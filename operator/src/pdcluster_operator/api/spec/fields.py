"""How a field of the API describes itself, and the bounds that several fields share.

The dataclasses of :mod:`.types` carry these marks in ``Annotated`` hints. A mark that is a string
is the field's description, to follow its JSON name: ``is the …``. The parser and the generators of
the CRD and of docs/api.md use the same marks, so each bound, default and description is written
once.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

Kind = Literal[
    "text", "whole", "flag", "choice", "object", "list", "quantities", "labels", "free"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Example:
    """A value that a user could write, as JSON; docs/api.md shows it.

    An object without one is shown with the examples of its fields. The example of a list of
    objects names every field of such an object.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Text:
    """Bounds of a string: lengths in characters and an RE2-compatible pattern."""

    longest: int
    shortest: int = 1
    pattern: str | None = None
    says: str = ""


@dataclass(frozen=True, slots=True)
class Whole:
    """Bounds of an integer, both included."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Items:
    """Bounds of a list; ``key`` names the field that identifies an item."""

    most: int
    least: int = 0
    key: str | None = None


@dataclass(frozen=True, slots=True)
class JsonName:
    """The JSON name where it is not the camelCase of the Python name."""

    name: str


@dataclass(frozen=True, slots=True)
class Cel:
    """A rule of one object, evaluated by the API server.

    The same rule is checked again in Python, because a CRD may be older than the operator: in
    ``api/rules``, or in :mod:`.parse` for ``ONE_OF``.
    """

    rule: str
    message: str


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field of one API object, as the reader and the generators need it."""

    name: str
    json_name: str
    kind: Kind
    optional: bool
    required: bool
    default: Any
    doc: str
    marks: tuple[Any, ...]
    item: Any = None

    @property
    def item_info(self) -> FieldInfo:
        """The description of a list's items."""
        return _describe(self.name, self.item, required=True, default=None, doc=self.doc)

    def mark(self, kind: type[Any]) -> Any:
        """Return the first mark of a kind, or None."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)


class Quantities(dict[str, str]):
    """Resource names to Kubernetes quantities."""


class Labels(dict[str, str]):
    """Labels of Kubernetes objects."""


class Free(dict[str, Any]):
    """An object of Kubernetes' own API, passed through as it is."""


def camel(name: str) -> str:
    """``lease_seconds`` -> ``leaseSeconds``."""
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


_described: dict[type[Any], tuple[FieldInfo, ...]] = {}


def describe(cls: type[Any]) -> tuple[FieldInfo, ...]:
    """Return all fields of an API dataclass, in order.

    Raises:
        TypeError: a field has no description, or a type that is not supported.
    """
    if cls not in _described:
        _described[cls] = _describe_all(cls)
    return _described[cls]


def _describe_all(cls: type[Any]) -> tuple[FieldInfo, ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    found = []
    for field in dataclasses.fields(cls):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        required = default is dataclasses.MISSING
        default = None if required else default
        found.append(_describe(field.name, hints[field.name], required=required, default=default))
    return tuple(found)


def _describe(name: str, hint: Any, *, required: bool, default: Any, doc: str = "") -> FieldInfo:
    marks: tuple[Any, ...] = ()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *rest = typing.get_args(hint)
        marks = tuple(rest)
    bare, optional = _without_none(hint)
    kind, item = _kind(bare)
    doc = next((mark for mark in marks if isinstance(mark, str)), doc)
    if not doc:
        raise TypeError(f"field {name} has no description")
    named = next((mark.name for mark in marks if isinstance(mark, JsonName)), camel(name))
    return FieldInfo(name, named, kind, optional, required, default, doc, marks, item)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        args = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(args) == 1:
            return args[0], True
        raise TypeError(f"unsupported union {hint}")
    return hint, False


def _kind(hint: Any) -> tuple[Kind, Any]:
    plain: dict[Any, Kind] = {
        str: "text", int: "whole", bool: "flag", Quantities: "quantities", Labels: "labels",
        Free: "free",
    }  # fmt: skip
    if hint in plain:
        return plain[hint], None
    if typing.get_origin(hint) is tuple:
        return "list", typing.get_args(hint)[0]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return "choice", hint
    if dataclasses.is_dataclass(hint):
        return "object", hint
    raise TypeError(f"unsupported type {hint}")


def as_manifest(value: Any) -> Any:
    """Return a parsed value as JSON, without fields that were not given."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.json_name: getattr(value, field.name) for field in describe(type(value))}
        return {
            name: as_manifest(part) for name, part in parts.items() if part not in (None, (), {})
        }
    if isinstance(value, tuple):
        return [as_manifest(item) for item in value]
    if isinstance(value, StrEnum):
        return value.value
    return dict(value) if isinstance(value, dict) else value


DNS_SUBDOMAIN = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"
REPOSITORY = r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?$"

NAME = Text(253, pattern=DNS_SUBDOMAIN, says="a lower-case Kubernetes object name")
CLASS = Text(
    32,
    pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    says="lower-case letters, digits and hyphens",
)
QUEUE = Text(63, pattern=DNS_SUBDOMAIN, says="the name of a LocalQueue")
# A path's parts: anything but "..", which would lead out of the folder. One slash a step keeps
# the pattern linear.
_PART = r"(\.|[^./][^/]*|\.[^./][^/]*|\.\.[^/]+)"

IMAGE = Text(500, pattern=r"^\S+$", says="an image reference without spaces")
RELATIVE = Text(
    1024,
    pattern=rf"^{_PART}(/{_PART}?)*$",
    says="a path inside the volume, without '..' in it",
)
ABSOLUTE = Text(1024, pattern=rf"^(/{_PART}?)+$", says="an absolute path, without '..' in it")
# Words of a command line. One that begins with a hyphen would be read as a flag.
WORD = Text(
    200, pattern=r"^[^-\s]\S*$", says="a word without spaces; it may not begin with a hyphen"
)
SIZE = Text(20, pattern=r"^[1-9][0-9]*(Mi|Gi|Ti)?$", says="a size such as 64Gi")
EXTENDED_RESOURCE = Text(
    253,
    pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$",
    says="an extended resource name, domain/name, e.g. rdma/ib",
)
LABEL_KEY = Text(
    316,
    pattern=r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    says="the key of a label",
)
LABEL_VALUE = Text(
    63,
    shortest=0,
    pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
    says="the value of a label",
)
CIDR = Text(64, pattern=r"^[0-9A-Fa-f.:]+/[0-9]{1,3}$", says="a CIDR, e.g. 10.0.0.0/8")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretKeyRef:
    """One key of a Secret in the cluster's namespace."""

    name: typing.Annotated[str, Example("hub-token"), "is the name of the Secret.", NAME]
    key: typing.Annotated[str, Example("token"), "is the key in the Secret.", Text(253)] = "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigMapKeyRef:
    """One key of a ConfigMap in the cluster's namespace."""

    name: typing.Annotated[str, Example("llama-config"), "is the name of the ConfigMap.", NAME]
    key: typing.Annotated[
        str, Example("config.json"), "is the key in the ConfigMap.", Text(253)
    ] = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRef:
    """A Secret in the cluster's namespace."""

    name: typing.Annotated[str, Example("registry-login"), "is the name of the Secret.", NAME]
