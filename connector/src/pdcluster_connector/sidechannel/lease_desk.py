"""The leases of a prefill engine: blocks that it holds until decode has read them.

A lease is *armed* when its request is scheduled, with a new token. It is *granted* when the request
finishes: from then on it has a deadline. The first decode engine that renews it has *claimed* it,
and no other engine may use it. The data-parallel ranks of that engine may all read under it, since
vLLM spreads one request with ``n=4`` over them. A lease ends when the last of its readers has
released it, when its deadline has passed, or when it is dropped (the request was aborted). Then
``vllm/scheduler_side/prefill.py`` has the ranks report its request as sent, and vLLM frees the
blocks.

Each lease has a *slot*: the place of its token in every rank's table of lease words. When a lease
has ended, its slot is written with 0, or with the token of the next lease that gets the slot.

:class:`LeaseTable` has no clock, no thread and no lock. The scheduler and the side channel use it
through :class:`LeaseDesk`, each on its own thread. The side channel answers decode engines at once,
however long the engine step lasts.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdcluster_connector.protocol.engine_id import parse_engine_id
from pdcluster_connector.protocol.lease import CLEARED, SLOTS, Standing
from pdcluster_connector.protocol.messages import LeaseReply, LeaseRequest


@dataclass(slots=True)
class _Lease:
    token: int
    slot: int | None
    deadline: float | None = None
    serial: int = 0
    engine: str = ""  # the decode engine that has claimed it
    readers: set[str] = field(default_factory=set)  # its ranks that have not released it

    def is_free_for(self, holder: str) -> bool:
        return not self.readers or self.engine == parse_engine_id(holder).engine


class LeaseTable:
    """All leases of one prefill engine. Times are seconds of one monotonic clock.

    The heap holds one entry a granted lease with the deadline it had when it was pushed;
    renewals change only the table, and an entry that comes up too early goes back with
    the real deadline. Entries of released leases disappear when their time comes.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._leases: dict[str, _Lease] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._serial = 0
        self._held = 0
        self._free = list(range(slots - 1, -1, -1))
        self._words: dict[int, int] = {}

    @property
    def held(self) -> int:
        """Leases granted and neither released nor expired: each keeps blocks from reuse."""
        return self._held

    @property
    def armed(self) -> int:
        """Leases of requests that still run."""
        return len(self._leases) - self._held

    def arm(self, request_id: str, token: int) -> bool:
        """Note a scheduled request's token; scheduled again, the new token replaces the old.

        False, and no change, when the lease was already granted. Where all slots are taken, the
        lease has none.
        """
        lease = self._leases.get(request_id)
        if lease is not None and lease.deadline is not None:
            return False
        slot = None if lease is None else lease.slot
        if slot is None and self._free:
            slot = self._free.pop()
        self._leases[request_id] = _Lease(token, slot)
        if slot is not None:
            self._words[slot] = token
        return True

    def place(self, request_id: str) -> tuple[int, int | None] | None:
        """Return (token, slot) of a request's lease; None without one."""
        lease = self._leases.get(request_id)
        return None if lease is None else (lease.token, lease.slot)

    def grant(self, request_id: str, deadline: float) -> bool:
        """Start the lease of a finished request. False without an armed lease."""
        lease = self._leases.get(request_id)
        if lease is None or lease.deadline is not None:
            return False
        self._serial += 1
        lease.deadline, lease.serial = deadline, self._serial
        heapq.heappush(self._heap, (deadline, lease.serial, request_id))
        self._held += 1
        return True

    def renew(self, request_id: str, token: int, holder: str, deadline: float) -> Standing:
        """Move a granted lease's deadline later, never earlier, for the engine that holds it.

        The engine of the first ``holder`` that asks is the one.
        """
        lease = self._leases.get(request_id)
        if lease is None or lease.token != token or lease.deadline is None:
            return Standing.GONE
        if not lease.is_free_for(holder):
            return Standing.CLAIMED
        lease.engine = parse_engine_id(holder).engine
        lease.readers.add(holder)
        lease.deadline = max(lease.deadline, deadline)
        return Standing.HELD

    def release(self, request_id: str, token: int, holder: str) -> bool:
        """Note that ``holder`` has stopped reading. End the lease if nobody else reads.

        Returns:
            True if the lease has ended now. False if it is not known, if the token differs, or if
            somebody else still reads: another engine that has claimed it, or another rank.
        """
        lease = self._leases.get(request_id)
        if lease is None or lease.token != token:
            return False
        lease.readers.discard(holder)
        if lease.readers:
            return False
        self._remove(request_id)
        return True

    def drop(self, request_id: str) -> None:
        """Forget a request's lease, if any, whatever its token."""
        if request_id in self._leases:
            self._remove(request_id)

    def expire(self, now: float) -> list[str]:
        """End every lease whose deadline is not after ``now``; return their request ids."""
        expired: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            _, serial, request_id = heapq.heappop(self._heap)
            lease = self._leases.get(request_id)
            if lease is None or lease.serial != serial or lease.deadline is None:
                continue
            if lease.deadline > now:
                heapq.heappush(self._heap, (lease.deadline, serial, request_id))
                continue
            self._remove(request_id)
            expired.append(request_id)
        return expired

    def take_words(self) -> dict[int, int]:
        """Return what every rank has to write, by slot: the changes since the last call."""
        words, self._words = self._words, {}
        return words

    def _remove(self, request_id: str) -> None:
        lease = self._leases.pop(request_id)
        if lease.deadline is not None:
            self._held -= 1
        if lease.slot is not None:
            self._words[lease.slot] = CLEARED
            self._free.append(lease.slot)


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
    """The lease table, shared by the scheduler and the side channel.

    Each call is atomic: a lease that the side channel has renewed does not expire in the same
    moment. No call waits for longer than another thread's call.
    """

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
