"""Where a prefill engine's scheduler and its side channel meet over the leases.

The scheduler arms, grants and expires; the side channel answers decode engines at once, however
long the engine step lasts. One lock makes each of these whole: a lease that the side channel has
renewed does not expire in the same moment.

``protocol/lease.py`` judges which leases have expired, and who may renew or release one. When a
lease has ended, ``vllm/scheduler_side/prefill.py`` has the ranks report its request as sent. Then
vLLM frees the blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdcluster_connector.protocol.lease import SLOTS, LeaseTable, Standing
from pdcluster_connector.protocol.messages import LeaseReply, LeaseRequest


@dataclass(frozen=True, slots=True)
class LeaseChanges:
    """What has changed since the last step.

    Attributes:
        released, expired: requests whose leases have ended, by prefill's id.
        words: what every rank has to write into its table of lease words, by slot. The ends of
            ``released`` and ``expired`` are among them, or were in an earlier step's.
    """

    released: list[str] = field(default_factory=list)
    expired: list[str] = field(default_factory=list)
    words: dict[int, int] = field(default_factory=dict)


class LeaseDesk:
    """Thread-safe; nothing here waits for longer than another thread's call."""

    def __init__(
        self,
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        slots: int = SLOTS,
    ) -> None:
        self._seconds = lease_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._table = LeaseTable(slots)
        self._released: list[str] = []

    @property
    def held(self) -> int:
        """Leases that keep blocks from reuse."""
        return self._table.held

    @property
    def armed(self) -> int:
        """Leases of requests that still run."""
        return self._table.armed

    # The scheduler's thread.

    def arm(self, request_id: str, token: int) -> None:
        """See :meth:`LeaseTable.arm`."""
        with self._lock:
            self._table.arm(request_id, token)

    def place(self, request_id: str) -> tuple[int, int | None] | None:
        """See :meth:`LeaseTable.place`."""
        with self._lock:
            return self._table.place(request_id)

    def grant(self, request_id: str) -> bool:
        """See :meth:`LeaseTable.grant`; the lease begins now."""
        with self._lock:
            return self._table.grant(request_id, self._clock() + self._seconds)

    def drop(self, request_id: str) -> None:
        """See :meth:`LeaseTable.drop`."""
        with self._lock:
            self._table.drop(request_id)

    def take(self) -> LeaseChanges:
        """Expire what is due, and return what has changed; each change once."""
        with self._lock:
            expired = self._table.expire(self._clock())
            released, self._released = self._released, []
            return LeaseChanges(released, expired, self._table.take_words())

    # The side channel's thread.

    def answer(self, asked: LeaseRequest) -> LeaseReply:
        """Take a decode engine's releases and renewals in."""
        with self._lock:
            for request_id, token in asked.releases:
                if self._table.release(request_id, token, asked.holder):
                    self._released.append(request_id)
            deadline = self._clock() + self._seconds
            standing = {
                key: self._table.renew(*key, asked.holder, deadline) for key in asked.renewals
            }
        return LeaseReply(
            seconds=self._seconds,
            renewed=tuple(key for key in standing if standing[key] is Standing.HELD),
            claimed=tuple(key for key in standing if standing[key] is Standing.CLAIMED),
        )
