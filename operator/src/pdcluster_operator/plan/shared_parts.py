"""Equal parts of many objects, held once.

Each JSON document brings strings, numbers and dicts of its own. The objects of a thousand clusters
have the same keys, images, probes, ports and volumes, and would hold each of them thousands of
times.

A part that is shared must never be changed in place. The store's objects and what plans return
never are.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import Any, Final

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


def with_shared_parts(value: Any) -> Any:
    """Return an equal document, whose parts are mostly objects that other documents have, too.

    A part that holds something long or large is a new object: nobody else has it.
    """
    return _shared(value, LEVELS)[0]


def _shared(value: Any, levels: int) -> tuple[Any, bool]:
    """Return an equal value, and whether it is one that others may have, too."""
    if isinstance(value, str):
        return (_leaf(value), True) if len(value) <= SHORT else (value, False)
    if isinstance(value, dict) and levels:
        keys = [_shared(key, 0) for key in value]
        items = [_shared(item, levels - 1) for item in value.values()]
        part: Any = {key: item for (key, _), (item, _) in zip(keys, items, strict=True)}
        return _part(b"{", part, [*keys, *items])
    if isinstance(value, list) and levels:
        items = [_shared(item, levels - 1) for item in value]
        return _part(b"[", [item for item, _ in items], items)
    if isinstance(value, int):
        return _leaf(value), True
    return value, value is None


def _part(kind: bytes, part: Any, held: list[tuple[Any, bool]]) -> tuple[Any, bool]:
    if len(part) > FEW or not all(is_shared for _, is_shared in held):
        return part, False
    name = kind + array("Q", [id(item) for item, _ in held]).tobytes()
    return _PARTS.first(name, part), True


@lru_cache(maxsize=1 << 14, typed=True)
def _leaf(value: Any) -> Any:
    """``sys.intern`` is not used, because some versions of Python never free interned strings."""
    return value
