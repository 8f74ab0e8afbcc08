"""Leases that prefill holds on blocks until decode has read them.

A lease is *armed* when its request is scheduled (the token is minted then) and *granted*
when the request finishes: from then on it has a deadline. It ends by release, by expiry,
or by being dropped (the request was aborted). The table owns no clock and no thread; the
scheduler role passes times in and acts on what comes out.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(slots=True)
class _Lease:
    token: int
    since: float
    deadline: float | None = None
    serial: int = 0


class LeaseTable:
    """All leases of one prefill engine. Times are seconds of one monotonic clock.

    The heap holds one entry a granted lease with the deadline it had when it was pushed;
    renewals change only the table, and an entry that comes up too early goes back with
    the real deadline. Entries of released leases disappear when their time comes.
    """

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._serial = 0
        self._held = 0

    @property
    def held(self) -> int:
        """Leases granted and neither released nor expired: each keeps blocks from reuse."""
        return self._held

    @property
    def armed(self) -> int:
        """Leases of requests that still run."""
        return len(self._leases) - self._held

    def arm(self, request_id: str, token: int, now: float) -> bool:
        """Note a scheduled request's token; scheduled again, the new token replaces the old.

        False, and no change, when the lease was already granted.
        """
        lease = self._leases.get(request_id)
        if lease is not None and lease.deadline is not None:
            return False
        self._leases[request_id] = _Lease(token, now)
        return True

    def token(self, request_id: str) -> int | None:
        """Return the token of a request's lease, or None without one."""
        lease = self._leases.get(request_id)
        return None if lease is None else lease.token

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

    def renew(self, request_id: str, token: int, deadline: float) -> bool:
        """Move a granted lease's deadline later, never earlier. False for any other lease."""
        lease = self._leases.get(request_id)
        if lease is None or lease.token != token or lease.deadline is None:
            return False
        lease.deadline = max(lease.deadline, deadline)
        return True

    def release(self, request_id: str, token: int) -> bool:
        """End a lease, armed or granted. False when it is unknown or the token differs."""
        lease = self._leases.get(request_id)
        if lease is None or lease.token != token:
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

    def _remove(self, request_id: str) -> None:
        if self._leases.pop(request_id).deadline is not None:
            self._held -= 1
