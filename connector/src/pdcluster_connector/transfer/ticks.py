"""Which receive's time is up next: a heap that forgets lazily."""

from __future__ import annotations

import heapq
from math import inf


class Ticks:
    """One due time per key; infinite means none."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def set(self, key: int, at: float) -> None:
        """Set ``key``'s due time, in place of the one it had."""
        if self._due.get(key, inf) == at:
            return
        if at == inf:
            del self._due[key]
        else:
            self._due[key] = at
            heapq.heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._due) + 64:
            self._heap = [(due, key) for key, due in self._due.items()]
            heapq.heapify(self._heap)

    @property
    def next(self) -> float:
        """Return the earliest due time."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else inf

    def due(self, now: float) -> list[int]:
        """Return the keys whose time has come, and forget their times."""
        keys = []
        while self.next <= now:
            _, key = heapq.heappop(self._heap)
            del self._due[key]
            keys.append(key)
        return keys
