"""Holds equal parts of many objects once in memory.

Each JSON document brings strings, numbers and dicts of its own. The objects of a thousand clusters
have the same keys, images, probes, ports and volumes, and would hold each of them thousands of
times.

A part that is shared must never be changed in place. The store's objects and what plans return
never are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, TypeVar

T = TypeVar("T")

SHORT: Final = 128
"""Characters of the longest string that is shared."""
FEW: Final = 16
"""Items of the largest dict or list that is shared."""
LEVELS: Final = 32
"""How deep to look. The deepest field that Kubernetes knows in a pod template is half as deep."""
MOST_PARTS: Final = 1 << 11
"""Parts of one generation. The objects of one cluster have some hundred that others have, too.

Nobody can fill the memory with annotations: with the two bounds above, the parts of both
generations take 80 MB at the very most.
"""


class _Parts:
    """The parts that were met last: those of this generation, and of the one before.

    A part is known by the ids of what it holds. What it holds lives as long as the part is here,
    so none of these ids can come to mean something else.
    """

    def __init__(self) -> None:
        self._now: dict[bytes, Any] = {}
        self._before: dict[bytes, Any] = {}

    def first(self, name: bytes, part: Any) -> Any:
        """Return the part that was met first under this name."""
        if (known := self._now.get(name)) is not None:
            return known
        if len(self._now) >= MOST_PARTS:
            self._before, self._now = self._now, {}
        known = self._now[name] = self._before.get(name, part)
        return known


_PARTS = _Parts()


def with_shared_parts(value: Any, earlier: dict[str, Any] | None = None) -> Any:
    """Return an equal document, whose parts are mostly objects that other documents have, too.

    A part that holds something long or large is a new object: nobody else has it.

    Args:
        earlier: a version of the document that has shared parts. What is equal is taken from it,
            because most of an object does not change: to compare is much quicker than to look all
            of its parts up. Give none where a number can become an equal value of another type.
    """
    return _shared(value, LEVELS)[0] if earlier is None else _changed(value, earlier, 1)


def _changed(value: dict[str, Any], earlier: dict[str, Any], levels: int) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for key, item in value.items():
        name, old = _shared(key, 0)[0], earlier.get(key)
        if item == old:
            part[name] = old
        elif levels and isinstance(item, dict) and isinstance(old, dict):
            part[name] = _changed(item, old, levels - 1)
        else:
            part[name] = _shared(item, LEVELS)[0]
    return part


def _shared(value: Any, levels: int) -> tuple[Any, bool]:
    """Return an equal value, and whether it is one that others may have, too.

    The operator calls this for each part of all that it sees and makes. So strings, which most
    parts are, are looked up where they are met, without another call.
    """
    if isinstance(value, str):
        leaf = _text if type(value) is str else _typed
        return (leaf(value), True) if len(value) <= SHORT else (value, False)
    if isinstance(value, dict) and levels:
        return _shared_dict(value, levels - 1)
    if isinstance(value, list) and levels:
        return _shared_list(value, levels - 1)
    if isinstance(value, int):
        return _typed(value), True
    return value, value is None


def _shared_dict(value: dict[Any, Any], levels: int) -> tuple[dict[Any, Any], bool]:
    text = _text
    part: dict[Any, Any] = {}
    ids: list[int] = []
    common = len(value) <= FEW
    for key, item in value.items():
        if type(key) is str and len(key) <= SHORT:
            name = text(key)
        else:
            name, is_shared = _shared(key, 0)
            common = common and is_shared
        if type(item) is str and len(item) <= SHORT:
            held = text(item)
        else:
            held, is_shared = _shared(item, levels)
            common = common and is_shared
        part[name] = held
        ids += (id(name), id(held))
    return (_PARTS.first(_name(b"{", ids), part), True) if common else (part, False)


def _shared_list(value: list[Any], levels: int) -> tuple[list[Any], bool]:
    found = [_shared(item, levels) for item in value]
    part = [item for item, _ in found]
    if len(part) > FEW or not all(is_shared for _, is_shared in found):
        return part, False
    return _PARTS.first(_name(b"[", map(id, part)), part), True


def _name(kind: bytes, ids: Iterable[int]) -> bytes:
    return kind + array("Q", ids).tobytes()


def _itself(value: T) -> T:
    return value


# ``sys.intern`` is not used, because some versions of Python never free interned strings.
_text = lru_cache(maxsize=1 << 14)(_itself)
_typed = lru_cache(maxsize=1 << 11, typed=True)(_itself)  # 1 and True are equal, as are enums
