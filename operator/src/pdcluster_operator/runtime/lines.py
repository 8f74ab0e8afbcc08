"""The lines in which keys wait for a worker, and whose turn it is.

Specs that changed, new PDClusters and the others wait in lines of their own, and the workers take
from them in turns. So a change does not wait behind a thousand new PDClusters, these do not wait
behind what becomes of the first of them, and nobody waits for ever. Some workers take no new
PDClusters: each of these keeps a worker for a dozen requests, and a look at another for none.

What becomes of a PDCluster whose children were just made waits while others are new: until they
have their children, too, or for ``HOLD_SECONDS``. One look then serves for many. Only PDClusters
without a status whose spec is the first one wait so, and only in a crowd is there no status yet
(``plan/status/pace.py``).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

HOLD_SECONDS = 30.0
"""How long a PDCluster is held at most, from the moment when its children were made.

It can then become Ready before its first status is due, which is one write less.
"""
NOT_NEW = 4
"""One in so many workers takes no new PDClusters."""


K = TypeVar("K", bound=Hashable)
Line = OrderedDict[K, None]


class Lines(Generic[K]):
    """Keys that wait, each in one line at most.

    Args:
        workers: how many take keys.
        is_new: whether nothing was made for a key yet.
        is_silent: whether nothing was said of a key yet, and nobody has changed it.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        workers: int,
        is_new: Callable[[K], bool],
        is_silent: Callable[[K], bool],
        clock: Callable[[], float],
    ) -> None:
        self._most_new = workers - workers // NOT_NEW
        self._is_new = is_new
        self._is_silent = is_silent
        self._clock = clock
        self._urgent: Line[K] = OrderedDict()
        self._new: Line[K] = OrderedDict()
        self._others: Line[K] = OrderedDict()
        self._turns = deque((self._urgent, self._new, self._others))
        self._held: Line[K] = OrderedDict()
        self._held_until: dict[K, float] = {}
        self._new_at_work: set[K] = set()

    def __len__(self) -> int:
        return sum(map(len, self._turns)) + len(self._held)

    def __contains__(self, key: K) -> bool:
        return any(key in line for line in self._all())

    @property
    def new(self) -> int:
        """New keys that wait."""
        return len(self._new)

    def add(self, key: K, *, urgent: bool) -> None:
        """Let a key wait. One that waits keeps its place, unless it becomes urgent."""
        if urgent:
            for line in (self._new, self._others, self._held):
                line.pop(key, None)
            self._urgent[key] = None
        elif key in self._held and not self._is_held(key):
            del self._held[key]
            self._others[key] = None
        elif key not in self:
            self._line_of(key)[key] = None

    def take(self) -> K | None:
        """Return the oldest key of the line whose turn it is; None if no key may be taken now.

        A line that is empty has no turn.
        """
        self._release()
        for _ in range(len(self._turns)):
            line = self._turns[0]
            self._turns.rotate(-1)
            if line and (line is not self._new or len(self._new_at_work) < self._most_new):
                key = line.popitem(last=False)[0]
                if line is self._new:
                    self._new_at_work.add(key)
                return key
        return None

    def done(self, key: K, *, failed: bool) -> bool:
        """Say that a worker is done with a key that it took; return whether it may be held.

        A key that failed is not held.
        """
        if key not in self._new_at_work:
            return False
        self._new_at_work.discard(key)
        self._held_until.pop(key, None)  # they stand in the order in which they end
        if not failed:
            self._held_until[key] = self._clock() + HOLD_SECONDS
        return not failed

    def clear(self) -> None:
        """Forget what waits."""
        for line in self._all():
            line.clear()

    def _all(self) -> Iterator[Line[K]]:
        yield from self._turns
        yield self._held

    def _line_of(self, key: K) -> Line[K]:
        if self._is_new(key):
            return self._new
        return self._held if self._is_held(key) else self._others

    def _is_held(self, key: K) -> bool:
        if key not in self._held_until:
            return False
        if self._clock() < self._held_until[key] and self._is_silent(key):
            return bool(self._new or self._new_at_work)
        del self._held_until[key]
        return False

    def _release(self) -> None:
        """Move the keys on that need not be held any longer."""
        if not (self._new or self._new_at_work):
            self._others.update(self._held)
            self._held.clear()
        now = self._clock()
        while self._held_until:
            key = next(iter(self._held_until))
            if now < self._held_until[key]:
                return
            del self._held_until[key]
            if key in self._held:
                del self._held[key]
                self._others[key] = None
