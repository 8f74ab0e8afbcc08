"""Lease messages on their way from the side channel's thread to the scheduler's step."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from pdcluster_connector.protocol.messages import LeaseKey, LeaseRequest

MAX_PENDING = 65_536


@dataclass(frozen=True, slots=True)
class LeaseNews:
    """What arrived since the last step: (prefill's request id, token) each."""

    releases: tuple[LeaseKey, ...] = ()
    renewals: tuple[LeaseKey, ...] = ()


_NONE = LeaseNews()


class LeaseInbox:
    """A bounded, thread-safe inbox; the scheduler role drains it each step."""

    def __init__(self, limit: int = MAX_PENDING) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._releases: list[LeaseKey] = []
        self._renewals: list[LeaseKey] = []

    def put(self, request: LeaseRequest) -> bool:
        """Add a message, all of it or nothing. False when full: the sender shall retry."""
        with self._lock:
            held = len(self._releases) + len(self._renewals)
            if held + len(request.releases) + len(request.renewals) > self._limit:
                return False
            self._releases.extend(request.releases)
            self._renewals.extend(request.renewals)
            return True

    def drain(self) -> LeaseNews:
        """Take everything out. Costs next to nothing when there is nothing."""
        if not self._releases and not self._renewals:
            return _NONE
        with self._lock:
            news = LeaseNews(tuple(self._releases), tuple(self._renewals))
            self._releases, self._renewals = [], []
            return news
