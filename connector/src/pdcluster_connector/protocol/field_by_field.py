"""Reads a document field by field if it cannot be read as a whole.

An optional field whose value cannot be read counts as missing, or as None where its type has None.
So one wrong field does not cost the document. A required one does.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import FieldInfo, fields

_Report = TypeVar("_Report", bound=Struct)
Parts = Mapping[tuple[type[Struct], str], type[Struct]]
"""(type, field) -> the type of the field's value, or of each entry of its list."""


def reader_of(kind: type[_Report], parts: Parts, most: int) -> Callable[[bytes], _Report]:
    """Return a decoder of JSON.

    Args:
        parts: fields that are read field by field, too. In a list, what cannot be read is left out.
        most: the entries of a list that are read.

    The decoder raises ``msgspec.DecodeError`` if the bytes are no JSON, or a required field is not
    there or wrong.
    """
    whole = msgspec.json.Decoder(kind).decode

    def read(raw: bytes) -> _Report:
        try:
            return whole(raw)
        except msgspec.ValidationError:
            return _converted(msgspec.json.decode(raw), kind, parts, most)

    return read


def _converted(value: object, kind: type[_Report], parts: Parts, most: int) -> _Report:
    """Make a report of what can be read; raises ValidationError if a required field cannot."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        if not isinstance(value, dict):
            raise
        given: dict[str, Any] = {}
        for field in fields(kind):
            if field.name in value:
                part = parts.get((kind, field.name))
                try:
                    given[field.name] = _field(value[field.name], field, part, parts, most)
                except msgspec.ValidationError:
                    if field.required:
                        raise
                    with suppress(msgspec.ValidationError):  # it is there, but its value is unknown
                        given[field.name] = msgspec.convert(None, field.type)
            elif field.required:
                raise
    return kind(**given)


def _field(
    value: object, field: FieldInfo, part: type[Struct] | None, parts: Parts, most: int
) -> object:
    if part is not None and isinstance(value, dict):
        value = _converted(value, part, parts, most)
    elif part is not None and isinstance(value, list):
        found: list[Struct] = []
        for entry in value[:most]:
            with suppress(msgspec.ValidationError):
                found.append(_converted(entry, part, parts, most))
        value = found
    return msgspec.convert(value, field.type)
