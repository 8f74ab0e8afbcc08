"""The block ids of one request in one KV cache group, and their compact form in a ticket.

A long prompt has very many of them: 250,000 for a million tokens in four groups. vLLM hands blocks
out in runs, so what is written down is by how much each id differs from the one before, and how
often in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAX_BLOCKS: Final = 2**20  # in one group, and in all groups of a ticket
LOWEST: Final = -1  # nothing is held at this position

_STEPS: Final = {1: "<i1", 2: "<i2", 4: "<i4"}
_COUNTS: Final = {0: "", 1: "<u1", 2: "<u2", 4: "<u4"}


class BlockIds(Sequence[int]):
    """Block ids as a sequence that is never changed; equal to any sequence of the same ids.

    Raises:
        ValueError: an id that is none, or more than MAX_BLOCKS of them.
    """

    __slots__ = ("_ids",)

    def __init__(self, ids: Sequence[int] | NDArray[np.int32]) -> None:
        if len(ids) > MAX_BLOCKS:
            raise ValueError(f"{len(ids)} block ids in one group, more than {MAX_BLOCKS}")
        try:
            self._ids = np.asarray(ids, np.int32).view()  # the caller may go on writing to its own
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"block ids that are no numbers of 32 bits: {error}") from error
        if self._ids.ndim != 1 or (self._ids.size and int(self._ids.min()) < LOWEST):
            raise ValueError(f"the block ids are not a list of whole numbers of at least {LOWEST}")
        self._ids.setflags(write=False)

    def packed(self) -> bytes:
        """Return the compact form: two bytes with the widths of a step and of a count, then all
        steps, then how often each is repeated (width 0: once).
        """
        steps = np.diff(self._ids, prepend=np.int32(0))  # wraps around, and back when summed up
        first = np.flatnonzero(np.concatenate([[True], steps[1:] != steps[:-1]])[: steps.size])
        counts = np.diff(first, append=steps.size)
        step = next(width for width, kind in _STEPS.items() if _fits(steps, kind))
        count = next(width for width, kind in _COUNTS.items() if kind and _fits(counts, kind))
        if first.size * (step + count) < steps.size * step:
            steps, repeated = steps[first], counts.astype(_COUNTS[count]).tobytes()
        else:  # scattered
            count, repeated = 0, b""
        return bytes((step, count)) + steps.astype(_STEPS[step]).tobytes() + repeated

    @classmethod
    def unpacked(cls, raw: bytes, most: int = MAX_BLOCKS) -> BlockIds:
        """Return the ids of :meth:`packed`.

        Raises:
            ValueError: whatever else ``raw`` is, and more than ``most`` ids. A few bytes can stand
                for very many, so that is known before they are made.
        """
        if len(raw) < 2 or raw[0] not in _STEPS or raw[1] not in _COUNTS:
            raise ValueError("block ids in an unknown form")
        size, rest = divmod(len(raw) - 2, raw[0] + raw[1])
        if rest:
            raise ValueError("block ids that are cut off")
        if size > most:
            raise ValueError(f"{size} block ids, more than {most}")
        steps = np.frombuffer(raw, _STEPS[raw[0]], size, 2).astype(np.int32)
        if raw[1]:
            counts = np.frombuffer(raw, _COUNTS[raw[1]], size, 2 + raw[0] * size).astype(np.int64)
            total = int(counts.sum())
            if total > most:
                raise ValueError(f"{total} block ids, more than {most}")
            steps = np.repeat(steps, counts)
        return cls(np.cumsum(steps, dtype=np.int32))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._ids, dtype) if copy else np.asarray(self._ids, dtype)

    def __len__(self) -> int:
        return self._ids.size

    def __getitem__(self, index: Any) -> Any:
        return self._ids[index].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockIds):
            return np.array_equal(self._ids, other._ids)
        return isinstance(other, tuple | list) and self._ids.tolist() == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"BlockIds({self._ids.tolist()})"


def _fits(values: NDArray[Any], kind: str) -> bool:
    bounds = np.iinfo(kind)
    return not values.size or bool(bounds.min <= values.min() and values.max() <= bounds.max)
