"""Workers that found nothing to do, and who wakes them.

Each new key wakes one worker, and not all of them: a worker that wakes looks through all keys that
wait. A worker that finds a key while more wait wakes the next worker.
"""

from __future__ import annotations

import asyncio
from collections import deque

AGAIN_SECONDS = 1.0
"""How soon a worker looks again at keys of which it might take none."""


class IdleWorkers:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._turns: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, *, look_again: bool) -> None:
        """Return when this worker should look for a key.

        Args:
            look_again: keys wait of which none may be taken now. One may be taken later without
                anything that wakes a worker, because a call has become one that hangs.
        """
        loop = asyncio.get_running_loop()
        if look_again and self._timer is None:
            self._timer = loop.call_later(AGAIN_SECONDS, self._due)
        turn = loop.create_future()
        self._turns.append(turn)
        await turn

    def wake(self) -> None:
        """Let one worker look, if there is one."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def wake_all(self) -> None:
        """Let all workers look, for the last time."""
        if self._timer is not None:
            self._timer.cancel()
        while self._turns:
            self.wake()

    def _due(self) -> None:
        self._timer = None
        self.wake()
