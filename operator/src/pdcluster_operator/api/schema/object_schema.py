"""The spec's OpenAPI schema, generated from the types.

Structural, as Kubernetes wants it: every field described, every string, list and number
bounded, defaults only where the types have them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from pdcluster_operator.api.spec.bounds import LABEL_VALUE
from pdcluster_operator.api.spec.fields import Cel, FieldInfo, Items, Kind, Text, Whole, describe

QUANTITY = (
    r"^\+?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30})"
    r"([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$"
)
MAX_RESOURCES = 32
MAX_LABELS = 32


def object_schema(cls: type[Any], description: str) -> dict[str, Any]:
    """Return the schema of one API dataclass."""
    fields = describe(cls)
    schema: dict[str, Any] = {
        "type": "object",
        "description": description,
        "properties": {field.json_name: field_schema(field) for field in fields},
    }
    required = [field.json_name for field in fields if field.required]
    if required:
        schema["required"] = required
    rules = list(getattr(cls, "RULES", ()))
    if getattr(cls, "ONE_OF", False):
        rules.append(_one_of([field.json_name for field in fields]))
    if rules:
        schema["x-kubernetes-validations"] = [
            {"rule": rule.rule, "message": rule.message} for rule in rules
        ]
    return schema


def _one_of(names: list[str]) -> Cel:
    given = ", ".join(f"has(self.{name})" for name in names)
    return Cel(
        f"[{given}].filter(given, given).size() == 1",
        f"needs exactly one of {', '.join(names)} (rule ExactlyOne)",
    )


def field_schema(field: FieldInfo) -> dict[str, Any]:
    """Return the schema of one field, with its description and default."""
    description = f"{field.json_name} {field.doc}"
    if field.kind == "object":
        schema = object_schema(field.item, description)
        if not field.optional and not field.required and (defaults := _defaults(schema)):
            # The API server checks CEL rules against a default before it adds nested defaults. So
            # with rules the default has to hold the nested ones.
            schema["default"] = defaults if "x-kubernetes-validations" in schema else {}
        return schema
    schema = {"description": description} | _bare(field)
    default = _json(field.default)
    if default not in (None, [], {}):
        schema["default"] = default
    return schema


def _bare(field: FieldInfo) -> dict[str, Any]:
    builders: dict[Kind, Callable[[FieldInfo], dict[str, Any]]] = {
        "choice": lambda field: {"type": "string", "enum": [member.value for member in field.item]},
        "text": lambda field: _text(field.mark(Text)),
        "whole": lambda field: _whole(field.mark(Whole)),
        "flag": lambda _: {"type": "boolean"},
        "list": _list,
        "quantities": lambda _: _quantities(),
        "labels": lambda _: _labels(),
        "free": lambda _: {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    }
    return builders[field.kind](field)


def _whole(bounds: Whole) -> dict[str, Any]:
    return {
        "type": "integer",
        "format": "int32",
        "minimum": bounds.least,
        "maximum": bounds.most,
    }


def _text(bounds: Text) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "maxLength": bounds.longest}
    if bounds.shortest:
        schema["minLength"] = bounds.shortest
    if bounds.pattern:
        schema["pattern"] = bounds.pattern
    return schema


def _list(field: FieldInfo) -> dict[str, Any]:
    bounds: Items = field.mark(Items)
    item = field.item_info
    entry = (
        object_schema(item.item, (item.item.__doc__ or "").strip())
        if item.kind == "object"
        else _bare(item)
    )
    schema: dict[str, Any] = {"type": "array", "items": entry, "maxItems": bounds.most}
    if bounds.least:
        schema["minItems"] = bounds.least
    if bounds.key:
        schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [bounds.key]}
    else:
        schema["x-kubernetes-list-type"] = "atomic"
    return schema


def _quantities() -> dict[str, Any]:
    amount = {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "pattern": QUANTITY,
        "x-kubernetes-int-or-string": True,
    }
    return {"type": "object", "maxProperties": MAX_RESOURCES, "additionalProperties": amount}


def _labels() -> dict[str, Any]:
    return {
        "type": "object",
        "maxProperties": MAX_LABELS,
        "additionalProperties": _text(LABEL_VALUE),
    }


def _defaults(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an object as the API server makes it from nothing."""
    found = {}
    for name, part in schema.get("properties", {}).items():
        nested = _defaults(part)
        if nested or "default" in part:
            found[name] = nested or part["default"]
    return found


def _json(default: Any) -> Any:
    if isinstance(default, StrEnum):
        return default.value
    if isinstance(default, tuple):
        return [_json(item) for item in default]
    return None if dataclasses.is_dataclass(default) else default
