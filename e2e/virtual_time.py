"""An asyncio loop that does not wait: when nothing can run, the next timer is due."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Patient(selectors.DefaultSelector):
    """Looks once whether something has arrived. If not, the wait is over at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "nothing will ever happen"
            self.now += max(timeout, 0.0)
        return events


class VirtualTime(asyncio.SelectorEventLoop):
    """What happens on one machine and in one thread takes no time here, only waiting does."""

    def __init__(self) -> None:
        self._patient = _Patient()
        super().__init__(self._patient)

    def time(self) -> float:
        """Return the seconds that were waited."""
        return self._patient.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(work)
