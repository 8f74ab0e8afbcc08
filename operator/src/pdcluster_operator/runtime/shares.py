"""How much of something scarce one namespace may have, and whose turn it is to get more.

Each call into a namespace may hang for half a minute: it is enough that an admission webhook for
that namespace answers nobody. If the calls into one namespace held all workers, or all connections,
no other namespace's PDClusters would be worked on.

A namespace may have one more while it has less than ``TIMES_FREE`` times what is free. So one alone
gets three quarters, two get three sevenths each, and something stays free for those that have
nothing yet. This rule is from Choudhury and Hahne, "Dynamic queue length thresholds for
shared-memory packet switches", IEEE/ACM Transactions on Networking 6(2), 1998.

All namespaces in which something hangs count as one. If each of many could have a few, they would
hold everything together. That happens until it is known that they hang. What they hold beyond three
quarters is then given out a second time: what hangs computes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from typing import Generic, TypeVar

TIMES_FREE = 3
BELIEVED_SECONDS = 120.0
"""How long a namespace counts as one in which something hangs, after something did."""

T = TypeVar("T")


def most_given(total: int) -> int:
    """Return how many things are given out at most, of which ``total`` count."""
    return total + _quarter(total)


def nobody(_: str) -> bool:
    """Whether a namespace may have one more if nothing is free."""
    return False


class Shares:
    """Who has which of ``total`` equal things.

    Namespaces are names. The empty one is for what no webhook can hold, and never hangs.

    Args:
        hangs_seconds: what is held longer hangs.
        clock: seconds that only grow.
    """

    def __init__(self, total: int, hangs_seconds: float, clock: Callable[[], float]) -> None:
        self._total = total
        self._hangs_seconds = hangs_seconds
        self._clock = clock
        self._since: dict[str, dict[Hashable, float]] = {}  # of each holder, the oldest first
        self._hung_until: dict[str, float] = {}

    def take(self, namespace: str, holder: Hashable) -> None:
        """Give one to a holder in a namespace."""
        self._since.setdefault(namespace, {})[holder] = self._clock()

    def give_back(self, namespace: str, holder: Hashable) -> None:
        """Take back what a holder had."""
        held, now = self._since[namespace], self._clock()
        if now - held.pop(holder) > self._hangs_seconds:
            self._hung_until[namespace] = now + BELIEVED_SECONDS
        if not held:
            del self._since[namespace]

    def hanging(self) -> AbstractSet[str]:
        """Return the namespaces in which something hangs, or did lately."""
        now = self._clock()
        self._hung_until = {name: until for name, until in self._hung_until.items() if now < until}
        long = (
            name
            for name, held in self._since.items()
            if now - next(iter(held.values())) > self._hangs_seconds
        )
        return (self._hung_until.keys() | set(long)) - {""}

    def free(self) -> int:
        """Return how many are free."""
        return self._free(self._given(self.hanging()))

    def limits(self) -> Callable[[str], bool]:
        """Return a function that says whether a namespace may have one more now.

        It is :func:`nobody` if nothing is free.
        """
        hanging = self.hanging()
        of_hanging = self._given(hanging)
        free = self._free(of_hanging)
        if free <= 0:
            return nobody

        def may(namespace: str) -> bool:
            own = len(self._since.get(namespace, ()))
            return (of_hanging if namespace in hanging else own) < TIMES_FREE * free

        return may

    def _given(self, namespaces: AbstractSet[str]) -> int:
        return sum(len(held) for name, held in self._since.items() if name in namespaces)

    def _free(self, of_hanging: int) -> int:
        quarter = _quarter(self._total)
        beyond = min(quarter, max(0, of_hanging - self._total + quarter))
        return self._total + beyond - sum(map(len, self._since.values()))


class Turns(Generic[T]):
    """What waits, each item once. Namespaces have turns; within one, the oldest item is first."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, OrderedDict[T, None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def outside(self, namespaces: AbstractSet[str]) -> int:
        """Return how many items wait that are in none of these namespaces."""
        return self._count - sum(len(self._lines.get(name, ())) for name in namespaces)

    def holds(self, namespace: str, item: T) -> bool:
        """Whether an item waits."""
        return item in self._lines.get(namespace, ())

    def add(self, namespace: str, item: T) -> None:
        """Let an item wait. One that waits keeps its place."""
        if not self.holds(namespace, item):
            self._lines.setdefault(namespace, OrderedDict())[item] = None
            self._count += 1

    def drop(self, namespace: str, item: T) -> None:
        """Let an item wait no longer, if it does."""
        if self.holds(namespace, item):
            line = self._lines[namespace]
            del line[item]
            self._count -= 1
            if not line:
                del self._lines[namespace]

    def take(self, may: Callable[[str], bool]) -> tuple[str, T] | None:
        """Return the item whose turn it is, with its namespace. None if none may be taken now.

        Args:
            may: whether an item of a namespace may be taken. Where not, it keeps its turn.
        """
        if may is nobody:  # no need to ask for each of what may be thousands of namespaces
            return None
        for namespace, line in self._lines.items():
            if may(namespace):
                item, _ = line.popitem(last=False)
                self._count -= 1
                if line:
                    self._lines.move_to_end(namespace)
                else:
                    del self._lines[namespace]
                return namespace, item
        return None

    def clear(self) -> None:
        """Forget what waits."""
        self._lines.clear()
        self._count = 0


def _quarter(total: int) -> int:
    return total // (TIMES_FREE + 1)
