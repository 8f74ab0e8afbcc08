"""Holds equal parts of many objects once in memory.

Each JSON document brings strings, numbers and dicts of its own. The objects of a thousand clusters
have the same keys, images, probes, ports and volumes, and would hold each of them thousands of
times. In a test without an API server, 14 objects of one PDCluster take 0.047 MB instead of
0.141 MB, and 0.093 MB if only their strings are shared. So without this module, the operator would
take more than the 300 MB that it may with 1,000 PDClusters (docs/benchmarks.md): it took 266 MB.

A part that is shared must never be changed in place. The store's objects and what plans return
never are.
"""

from functools import lru_cache
from typing import Any, Final

import msgspec

SHORT: Final = 128
"""Characters of the longest string that is shared."""
SMALL: Final = 512
"""Bytes of JSON of the largest dict or list that is shared."""
LEVELS: Final = 32
"""How deep to look. The deepest field that Kubernetes knows in a pod template is half as deep."""
MOST_PARTS: Final = 1 << 12
"""Dicts and lists that are remembered, those that were met last. With ``SMALL``, annotations that
somebody writes to fill the memory take 50 MB at most."""
MOST_STRINGS: Final = 1 << 14


def with_shared_parts(value: Any, earlier: dict[str, Any] | None = None) -> Any:
    """Return an equal JSON document, whose parts are mostly objects that other documents have, too.

    Args:
        earlier: a version of the document that has shared parts. What is equal is taken from it,
            because most of an object does not change, and comparing is much quicker than looking
            all of its parts up. Give none where a number can become an equal value of another type.
    """
    return _shared(value, LEVELS) if earlier is None else _changed(value, earlier, 1)


def _changed(value: dict[str, Any], earlier: dict[str, Any], levels: int) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for key, item in value.items():
        name, old = _shared(key, 0), earlier.get(key)
        if item == old:
            part[name] = old
        elif levels and isinstance(item, dict) and isinstance(old, dict):
            part[name] = _changed(item, old, levels - 1)
        else:
            part[name] = _shared(item, LEVELS)
    return part


def _shared(value: Any, levels: int) -> Any:
    kind = type(value)
    if kind is str:
        return _string(value) if len(value) <= SHORT else value
    part: Any
    if kind is dict and levels:
        part = {_shared(key, 0): _shared(item, levels - 1) for key, item in value.items()}
    elif kind is list and levels:
        part = [_shared(item, levels - 1) for item in value]
    else:
        return value
    try:
        text = msgspec.json.encode(part)
    except (RecursionError, ValueError):  # very deep, or half a character
        return part
    return _first(text, part) if len(text) <= SMALL else part


def _first(text: bytes, part: Any) -> Any:
    """Return the part that was met first with this JSON."""
    known = _parts(text)
    if not known:
        known.append(part)
    return known[0]


@lru_cache(maxsize=MOST_PARTS)
def _parts(_: bytes) -> list[Any]:
    return []


@lru_cache(maxsize=MOST_STRINGS)
def _string(value: str) -> str:
    # ``sys.intern`` is not used, because some versions of Python never free interned strings.
    return value
