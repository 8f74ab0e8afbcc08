"""The lines in which keys wait for a worker, and whose turn it is.

PDClusters with a changed spec, new PDClusters and the others wait in three lines. The workers take
from the lines in turns, so no key waits for ever. A changed spec does not wait behind a thousand
new PDClusters. New PDClusters do not wait behind changes of those that were made before them.

A new PDCluster keeps a worker for a dozen requests to the API server. Any other mostly needs no
request. Therefore some workers take no new ones.

In each line, namespaces take turns. No namespace gets all workers, because its calls may hang
(:mod:`.shares`).

A PDCluster whose children were just made waits until all new PDClusters have their children, too,
or for ``HOLD_SECONDS``. The operator then looks once for many changes. Only PDClusters with their
first spec and without a status wait like this. Unless many PDClusters are new, the first status is
written at once (``plan/status/pace.py``), so nothing waits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from pdcluster_operator.runtime.shares import Shares, Turns, nobody

HOLD_SECONDS = 30.0
"""How long a PDCluster is held at most, from the moment when its children were made.

It can then become Ready before its first status is due, which is one write less.
"""
LOOK_HANGS_SECONDS = 15.0
"""A look that takes longer hangs. In a crowd on a slow API server, some take several seconds."""
NOT_NEW = 3
"""One in so many workers takes no new PDClusters."""


K = TypeVar("K", bound=Hashable)


class Lines(Generic[K]):
    """Keys that wait, each in one line at most.

    Args:
        workers: how many take keys.
        namespace_of: returns the namespace of a key.
        is_new: whether nothing was made for a key yet.
        is_silent: whether nothing was said of a key yet, and nobody has changed it.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        workers: int,
        namespace_of: Callable[[K], str],
        is_new: Callable[[K], bool],
        is_silent: Callable[[K], bool],
        clock: Callable[[], float],
    ) -> None:
        self._namespace_of = namespace_of
        self._is_new = is_new
        self._is_silent = is_silent
        self._clock = clock
        self._workers = Shares(workers, LOOK_HANGS_SECONDS, clock)
        self._workers_for_new = Shares(workers - workers // NOT_NEW, LOOK_HANGS_SECONDS, clock)
        self._urgent: Turns[K] = Turns()
        self._new: Turns[K] = Turns()
        self._others: Turns[K] = Turns()
        self._turns = deque((self._urgent, self._new, self._others))
        self._held: OrderedDict[K, None] = OrderedDict()
        self._held_until: dict[K, float] = {}
        self._new_at_work: set[K] = set()

    def __len__(self) -> int:
        return sum(map(len, self._turns)) + len(self._held)

    def __contains__(self, key: K) -> bool:
        namespace = self._namespace_of(key)
        return key in self._held or any(line.holds(namespace, key) for line in self._turns)

    @property
    def new(self) -> int:
        """New keys that wait, but for namespaces in which something hangs."""
        return self._new.outside(self._workers.hanging())

    def add(self, key: K, *, urgent: bool) -> None:
        """Let a key wait. One that waits keeps its place, unless it becomes urgent."""
        namespace = self._namespace_of(key)
        if urgent:
            for line in (self._new, self._others):
                line.drop(namespace, key)
            self._held.pop(key, None)
            self._urgent.add(namespace, key)
        elif key in self._held:
            if not self._is_held(key):
                self._let_go(key)
        elif key not in self:
            if self._is_new(key):
                self._new.add(namespace, key)
            elif self._is_held(key):
                self._held[key] = None
            else:
                self._others.add(namespace, key)

    def take(self) -> K | None:
        """Return the key whose turn it is; None if no key may be taken now.

        A line of which no key may be taken has no turn.
        """
        self._release()
        may, may_new = self._workers.limits(), self._workers_for_new.limits()

        def may_both(namespace: str) -> bool:
            return may(namespace) and may_new(namespace)

        of_new = nobody if nobody in (may, may_new) else may_both
        for _ in range(len(self._turns)):
            line = self._turns[0]
            self._turns.rotate(-1)
            if (taken := line.take(of_new if line is self._new else may)) is not None:
                namespace, key = taken
                self._workers.take(namespace, key)
                if line is self._new:
                    self._workers_for_new.take(namespace, key)
                    self._new_at_work.add(key)
                return key
        return None

    def done(self, key: K, *, failed: bool) -> bool:
        """Say that a worker is done with a key that it took; return whether it may be held.

        A key that failed is not held.
        """
        namespace = self._namespace_of(key)
        self._workers.give_back(namespace, key)
        if key not in self._new_at_work:
            return False
        self._workers_for_new.give_back(namespace, key)
        self._new_at_work.discard(key)
        self._held_until.pop(key, None)  # they stand in the order in which they end
        if not failed:
            self._held_until[key] = self._clock() + HOLD_SECONDS
        return not failed

    def clear(self) -> None:
        """Forget what waits."""
        for line in self._turns:
            line.clear()
        self._held.clear()

    def _others_are_new(self) -> bool:
        """Whether there are new keys, but for namespaces in which something hangs."""
        hanging = self._workers.hanging()
        at_work = (self._namespace_of(key) not in hanging for key in self._new_at_work)
        return any(at_work) or self._new.outside(hanging) > 0

    def _is_held(self, key: K) -> bool:
        if key not in self._held_until:
            return False
        if self._clock() < self._held_until[key] and self._is_silent(key):
            return self._others_are_new()
        del self._held_until[key]
        return False

    def _let_go(self, key: K) -> None:
        del self._held[key]
        self._others.add(self._namespace_of(key), key)

    def _release(self) -> None:
        """Move the keys on that need not be held any longer."""
        if self._held and not self._others_are_new():
            for key in tuple(self._held):
                self._let_go(key)
        now = self._clock()
        while self._held_until:
            key = next(iter(self._held_until))
            if now < self._held_until[key]:
                return
            del self._held_until[key]
            if key in self._held:
                self._let_go(key)
