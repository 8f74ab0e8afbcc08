"""How much of something scarce one namespace may have, and whose turn it is to get more.

Each call into a namespace may hang for half a minute: it is enough that an admission webhook for
that namespace answers nobody. If the calls into one namespace held all workers, or all connections,
no other namespace's PDClusters would be worked on.

A namespace may have one more while it has less than ``TIMES_FREE`` times what is free. So one alone
gets three quarters, two get three sevenths each, and something stays free for those that have
nothing yet. This rule is from Choudhury and Hahne, "Dynamic queue length thresholds for
shared-memory packet switches", IEEE/ACM Transactions on Networking 6(2), 1998.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

TIMES_FREE = 3

T = TypeVar("T")


class Shares:
    """Counts what each namespace has of ``total`` equal things."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._had: Counter[str] = Counter()

    def may_take(self, namespace: str) -> bool:
        """Whether a namespace may have one more now."""
        return self._had[namespace] < TIMES_FREE * self._free

    def take(self, namespace: str) -> None:
        """Give one to a namespace."""
        self._free -= 1
        self._had[namespace] += 1

    def give_back(self, namespace: str) -> None:
        """Take back one that a namespace had."""
        self._free += 1
        self._had[namespace] -= 1
        if not self._had[namespace]:
            del self._had[namespace]


class Turns(Generic[T]):
    """What waits, each item once. Namespaces have turns; within one, the oldest item is first."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, OrderedDict[T, None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def holds(self, namespace: str, item: T) -> bool:
        """Whether an item waits."""
        return item in self._lines.get(namespace, ())

    def add(self, namespace: str, item: T) -> None:
        """Let an item wait. One that waits keeps its place."""
        self._lines.setdefault(namespace, OrderedDict())[item] = None

    def drop(self, namespace: str, item: T) -> None:
        """Let an item wait no longer, if it does."""
        line = self._lines.get(namespace)
        if line is not None and item in line:
            del line[item]
            if not line:
                del self._lines[namespace]

    def take(self, may: Callable[[str], bool]) -> tuple[str, T] | None:
        """Return the item whose turn it is, with its namespace. None if none may be taken now.

        Args:
            may: whether an item of a namespace may be taken. Where not, it keeps its turn.
        """
        for namespace, line in self._lines.items():
            if may(namespace):
                item, _ = line.popitem(last=False)
                if line:
                    self._lines.move_to_end(namespace)
                else:
                    del self._lines[namespace]
                return namespace, item
        return None

    def clear(self) -> None:
        """Forget what waits."""
        self._lines.clear()
