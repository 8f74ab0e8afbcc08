"""What the ranks of one engine tell each other about peers that are gone.

Only the first rank asks its peers often whether they live (sidechannel.peers). It tells the
scheduler with its step report, and the scheduler tells the other ranks with the next orders.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.sidechannel.peers import CONCERNS_ALL_RANKS, FIRST_RANK, PeerBook

# An engine without requests makes no steps. What was found gone before may be back by the next one.
NEWS_SECONDS: Final = 5.0


class PeerNews:
    """One rank's end. ``clock`` gives monotonic seconds."""

    def __init__(
        self, rank: tuple[int, int], peers: PeerBook, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first = rank == FIRST_RANK
        self._peers = peers
        self._clock = clock
        self._found: deque[tuple[float, str, Failure]] = deque()  # thread-safe at both ends
        if self._first:
            peers.listen(self._on_gone)

    def _on_gone(self, engine_id: str, failure: Failure) -> None:
        if failure.reason in CONCERNS_ALL_RANKS:
            self._found.append((self._clock(), engine_id, failure))

    def take(self) -> dict[str, Failure]:
        """Return what this rank has found since the last call, for the other ranks."""
        oldest = self._clock() - NEWS_SECONDS
        gone: dict[str, Failure] = {}
        while self._found:
            at, engine_id, failure = self._found.popleft()
            if at >= oldest:
                gone[engine_id] = failure
        return gone

    def hear(self, gone: Mapping[str, Failure]) -> None:
        """Take in what the first rank has found."""
        if self._first:
            return
        for engine_id, failure in gone.items():
            self._peers.hear(engine_id, failure)
