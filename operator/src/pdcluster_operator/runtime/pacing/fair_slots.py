"""A limited number of slots, given out so that no namespace gets all of them.

Each call into a namespace may hang for half a minute: it is enough that an admission webhook for
that namespace does not answer. If the calls into one namespace held all workers, or all connections
to the API server, no PDCluster of another namespace would be reconciled.

**The share of one namespace.** A namespace may have one more slot while it has fewer than
``TIMES_FREE`` times what is free. So one alone gets three quarters, two get three sevenths each,
and something stays free for those that have nothing yet. This rule is from Choudhury and Hahne,
"Dynamic queue length thresholds for shared-memory packet switches", IEEE/ACM Transactions on
Networking 6(2), 1998.

**Namespaces that hang.** All namespaces in which something hangs count as one. If each of many
could have a few slots, they would hold all of them together. Before it is known that they hang,
they do. So what they hold beyond three quarters is given out a second time: what hangs computes
nothing.

``operator/tests/runtime/test_fair_slots.py`` shows it in virtual time, and
``operator/tests/adapters/test_hanging_webhook.py`` on a real API server: without the shares, a
change elsewhere waits until most of forty PDClusters had their thirty seconds.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from typing import Generic, TypeVar

TIMES_FREE = 3
BELIEVED_SECONDS = 120.0
"""How long a namespace counts as one that hangs after something in it has hung."""
CHECK_SECONDS = 1.0
"""How soon to check again for items that wait: a call that becomes one that hangs is no event."""

T = TypeVar("T", bound=Hashable)


def most_given(total: int) -> int:
    """Return how many slots are given out at most, of which ``total`` count."""
    return total + _quarter(total)


def _quarter(total: int) -> int:
    return total // (TIMES_FREE + 1)


def _nobody(_: str) -> bool:
    return False


class FairSlots(Generic[T]):
    """Starts items when they get a slot. Used from one event loop.

    Items wait in two lines, urgent ones and the others, which take turns. In each line the
    namespaces take turns, and within a namespace the oldest item is first. The empty namespace is
    for what no webhook can delay, and never counts as one that hangs.

    Args:
        total: number of slots. A few more are given out while something hangs; see
            :func:`most_given`.
        hangs_seconds: what holds a slot for longer hangs.
        start: called with each item that gets a slot. :meth:`done` gives the slot back.
    """

    def __init__(self, total: int, hangs_seconds: float, start: Callable[[T], None]) -> None:
        self._total = total
        self._hangs_seconds = hangs_seconds
        self._start = start
        self._urgent: _Line[T] = _Line()
        self._others: _Line[T] = _Line()
        self._turns = deque((self._urgent, self._others))
        self._since: dict[str, dict[T, float]] = {}  # when each holder got its slot, oldest first
        self._hung_until: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return how many items wait."""
        return len(self._urgent) + len(self._others)

    def waiting(self) -> int:
        """Return how many items wait, but for namespaces in which something hangs."""
        hanging = self.hanging()
        return len(self) - sum(line.count(name) for line in self._turns for name in hanging)

    def waits(self, namespace: str, item: T) -> bool:
        """Whether an item waits."""
        return any(line.holds(namespace, item) for line in self._turns)

    def add(self, namespace: str, item: T, *, urgent: bool = False) -> None:
        """Start an item, or let it wait. One that waits keeps its place, unless it gets urgent."""
        if urgent:
            self._others.drop(namespace, item)
            self._urgent.add(namespace, item)
        elif not self._urgent.holds(namespace, item):
            self._others.add(namespace, item)

    def drop(self, namespace: str, item: T) -> None:
        """Let an item wait no longer, if it does."""
        for line in self._turns:
            line.drop(namespace, item)

    def done(self, namespace: str, item: T) -> None:
        """Take back the slot that an item had."""
        held, now = self._since[namespace], _now()
        if now - held.pop(item) > self._hangs_seconds:
            self._hung_until[namespace] = now + BELIEVED_SECONDS
        if not held:
            del self._since[namespace]

    def clear(self) -> None:
        """Forget the items that wait."""
        for line in self._turns:
            line.clear()

    def hand_out(self) -> None:
        """Start each item that may have a slot now."""
        while (item := self.take()) is not None:
            self._start(item)
        if len(self) and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check)

    def take(self) -> T | None:
        """Give a slot to the item whose turn it is, and return it; None if none may have one.

        A line of which no item may be started loses no turn.
        """
        may = self._limits()
        for _ in range(len(self._turns)):
            line = self._turns[0]
            self._turns.rotate(-1)
            if (taken := line.take(may)) is not None:
                namespace, item = taken
                self._since.setdefault(namespace, {})[item] = _now()
                return item
        return None

    def hanging(self) -> AbstractSet[str]:
        """Return the namespaces in which something hangs, or did lately."""
        now = _now()
        self._hung_until = {name: until for name, until in self._hung_until.items() if now < until}
        long = (
            name
            for name, held in self._since.items()
            if now - next(iter(held.values())) > self._hangs_seconds
        )
        return (self._hung_until.keys() | set(long)) - {""}

    def free(self) -> int:
        """Return how many slots are free."""
        return self._free(self._held_in(self.hanging()))

    def _limits(self) -> Callable[[str], bool]:
        """Return a function that says whether a namespace may have one more slot now."""
        hanging = self.hanging()
        of_hanging = self._held_in(hanging)
        free = self._free(of_hanging)
        if free <= 0:
            return _nobody

        def may(namespace: str) -> bool:
            own = len(self._since.get(namespace, ()))
            return (of_hanging if namespace in hanging else own) < TIMES_FREE * free

        return may

    def _held_in(self, namespaces: AbstractSet[str]) -> int:
        return sum(len(held) for name, held in self._since.items() if name in namespaces)

    def _free(self, of_hanging: int) -> int:
        quarter = _quarter(self._total)
        beyond = min(quarter, max(0, of_hanging - self._total + quarter))
        return self._total + beyond - sum(map(len, self._since.values()))

    def _check(self) -> None:
        self._timer = None
        self.hand_out()


class _Line(Generic[T]):
    """Items that wait, each once: namespaces take turns, and in one the oldest item is first."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, OrderedDict[T, None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def count(self, namespace: str) -> int:
        return len(self._items.get(namespace, ()))

    def holds(self, namespace: str, item: T) -> bool:
        return item in self._items.get(namespace, ())

    def add(self, namespace: str, item: T) -> None:
        if not self.holds(namespace, item):
            self._items.setdefault(namespace, OrderedDict())[item] = None
            self._count += 1

    def drop(self, namespace: str, item: T) -> None:
        if self.holds(namespace, item):
            items = self._items[namespace]
            del items[item]
            self._count -= 1
            if not items:
                del self._items[namespace]

    def take(self, may: Callable[[str], bool]) -> tuple[str, T] | None:
        """Return the next item of the first namespace that may; the others keep their turn."""
        if may is _nobody:  # thousands of namespaces may wait, and each would be asked
            return None
        for namespace, items in self._items.items():
            if may(namespace):
                item, _ = items.popitem(last=False)
                self._count -= 1
                if items:
                    self._items.move_to_end(namespace)
                else:
                    del self._items[namespace]
                return namespace, item
        return None

    def clear(self) -> None:
        self._items.clear()
        self._count = 0


def _now() -> float:
    return asyncio.get_running_loop().time()
