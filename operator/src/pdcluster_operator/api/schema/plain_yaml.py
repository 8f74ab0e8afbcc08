"""JSON values as block YAML: enough for generated files, without a YAML library.

Strings that YAML could read as something else are written as JSON strings, which are YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9 _./()-]*[A-Za-z0-9_/).]|[A-Za-z]")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def to_yaml(value: Any) -> str:
    """Return a document in block style, keys in the order given."""
    return "\n".join(_lines(value, 0)) + "\n"


def _lines(value: Any, depth: int) -> list[str]:
    pad = "  " * depth
    if isinstance(value, Mapping) and value:
        lines = []
        for key, item in value.items():
            head = f"{pad}{_scalar(key)}:"
            lines += _attach(head, item, depth + 1)
        return lines
    if _is_list(value) and value:
        lines = []
        for item in value:
            inner = _lines(item, depth + 1)
            lines += [f"{pad}- {inner[0].lstrip()}", *inner[1:]]
        return lines
    return [pad + _scalar(value)]


def _attach(head: str, item: Any, depth: int) -> list[str]:
    if (isinstance(item, Mapping) or _is_list(item)) and item:
        return [head, *_lines(item, depth)]
    return [f"{head} {_scalar(item)}"]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
