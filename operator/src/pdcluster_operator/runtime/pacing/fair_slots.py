"""A limited number of slots, given out so that no namespace gets all of them.

Each call into a namespace may hang for half a minute: it is enough that an admission webhook for
that namespace does not answer. If the calls into one namespace held all workers, no PDCluster of
another namespace would be reconciled.

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
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from pdcluster_operator.runtime.interfaces import Key

TIMES_FREE = 3
BELIEVED_SECONDS = 120.0
"""How long a namespace counts as one that hangs after something in it has hung."""
CHECK_SECONDS = 1.0
"""How soon to check again for keys that wait: a call that becomes one that hangs is no event."""

_Line = OrderedDict[str, OrderedDict[Key, None]]
"""Keys that wait by namespace: namespaces take turns, and in one the oldest key is first."""


class FairSlots:
    """Starts keys when they get a slot. Used from one event loop.

    Keys wait in two lines, urgent ones and the others, which take turns. In each line the
    namespaces take turns, and within a namespace the oldest key is first.

    Args:
        total: number of slots. Up to a quarter more are given out while something hangs.
        hangs_seconds: what holds a slot for longer hangs.
        start: called with each key that gets a slot. :meth:`done` gives the slot back.
    """

    def __init__(self, total: int, hangs_seconds: float, start: Callable[[Key], None]) -> None:
        self._total = total
        self._hangs_seconds = hangs_seconds
        self._start = start
        self._urgent: _Line = OrderedDict()
        self._others: _Line = OrderedDict()
        self._turns = deque((self._urgent, self._others))
        self._since: dict[str, dict[Key, float]] = {}  # when each holder got its slot, oldest first
        self._hung_until: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return how many keys wait."""
        return sum(len(keys) for line in self._turns for keys in line.values())

    def waiting(self) -> int:
        """Return how many keys wait, but for namespaces in which something hangs."""
        hanging = self.hanging()
        lines = ((name, keys) for line in self._turns for name, keys in line.items())
        return sum(len(keys) for name, keys in lines if name not in hanging)

    def waits(self, key: Key) -> bool:
        """Whether a key waits."""
        return any(key in line.get(key.namespace, ()) for line in self._turns)

    def add(self, key: Key, *, urgent: bool = False) -> None:
        """Let a key wait. One that waits keeps its place, unless it gets urgent."""
        if key in self._urgent.get(key.namespace, ()):
            return
        if urgent:
            _drop(self._others, key)
        line = self._urgent if urgent else self._others
        line.setdefault(key.namespace, OrderedDict())[key] = None

    def done(self, key: Key) -> None:
        """Take back the slot that a key had."""
        held, now = self._since[key.namespace], _now()
        if now - held.pop(key) > self._hangs_seconds:
            self._hung_until[key.namespace] = now + BELIEVED_SECONDS
        if not held:
            del self._since[key.namespace]

    def clear(self) -> None:
        """Forget the keys that wait."""
        for line in self._turns:
            line.clear()

    def hand_out(self) -> None:
        """Start each key that may have a slot now."""
        while (key := self.take()) is not None:
            self._start(key)
        if any(self._turns) and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check)

    def take(self) -> Key | None:
        """Give a slot to the key whose turn it is, and return it; None if none may have one.

        A line of which no key may be started loses no turn, nor does a namespace.
        """
        hanging = self.hanging()
        of_hanging = sum(len(held) for name, held in self._since.items() if name in hanging)
        quarter = self._total // (TIMES_FREE + 1)
        beyond = min(quarter, max(0, of_hanging - self._total + quarter))
        free = self._total + beyond - sum(map(len, self._since.values()))
        if free <= 0:  # thousands of namespaces may wait
            return None
        for _ in range(len(self._turns)):
            line = self._turns[0]
            self._turns.rotate(-1)
            for namespace, keys in line.items():
                own = of_hanging if namespace in hanging else len(self._since.get(namespace, ()))
                if own < TIMES_FREE * free:
                    key = next(iter(keys))
                    line.move_to_end(namespace)
                    _drop(line, key)
                    self._since.setdefault(namespace, {})[key] = _now()
                    return key
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
        return self._hung_until.keys() | set(long)

    def _check(self) -> None:
        self._timer = None
        self.hand_out()


def _drop(line: _Line, key: Key) -> None:
    keys = line.get(key.namespace, {})
    keys.pop(key, None)
    if not keys:
        line.pop(key.namespace, None)


def _now() -> float:
    return asyncio.get_running_loop().time()
