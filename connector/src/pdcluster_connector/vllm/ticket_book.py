"""The tickets that a decode engine holds: renewed while in use, released once, never reused.

One ticket can come with several requests (``n=4``, a list of prompts): it is released when the
last of them needs it no more. Afterwards prefill may reuse the blocks at any time, so a
released ticket is remembered and refused.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from pdcluster_connector.protocol.ticket import Ticket

MAX_SPENT: Final = 65536
RENEWALS_PER_LEASE: Final = 4

_Key = tuple[str, str, int]


class LeaseSender(Protocol):
    """Tells prefill engines about leases; never blocks (sidechannel.lease_client)."""

    def release(
        self, host: str, port: int, engine_id: str, request_id: str, token: int, deadline: float
    ) -> None:
        """Send a release; repeated until the deadline (monotonic seconds)."""

    def renew(
        self, host: str, port: int, engine_id: str, request_id: str, token: int, deadline: float
    ) -> None:
        """Send a renewal; repeated until the deadline."""


class TicketBook:
    """Not thread-safe. ``clock`` gives monotonic seconds."""

    def __init__(
        self, leases: LeaseSender, lease_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._leases = leases
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._users: dict[_Key, int] = {}
        self._tickets: dict[_Key, tuple[Ticket, float]] = {}  # and its lease's length
        self._spent: OrderedDict[_Key, None] = OrderedDict()
        self._renew_at = 0.0

    def __len__(self) -> int:
        """Tickets in use."""
        return len(self._tickets)

    def is_spent(self, ticket: Ticket) -> bool:
        """Whether the ticket was released already."""
        return _key(ticket) in self._spent

    def use(self, ticket: Ticket, lease_seconds: object = None) -> None:
        """Count one more request that came with the ticket, and renew its lease.

        ``lease_seconds`` is what prefill says of its leases; the shorter of its and ours counts.
        """
        key = _key(ticket)
        self._users[key] = self._users.get(key, 0) + 1
        length = self._lease_seconds
        if isinstance(lease_seconds, int | float) and lease_seconds >= 1:
            length = min(length, float(lease_seconds))
        self._tickets[key] = (ticket, length)
        self._renew_at = min(self._renew_at, self._clock() + length / RENEWALS_PER_LEASE)
        self.renew(ticket)

    def lease_seconds(self, ticket: Ticket) -> float:
        """Length of the ticket's lease, counted from each renewal."""
        known = self._tickets.get(_key(ticket))
        return self._lease_seconds if known is None else known[1]

    def done(self, ticket: Ticket) -> None:
        """Count one request less; the last one releases the ticket."""
        key = _key(ticket)
        self._users[key] -= 1
        if self._users[key] > 0:
            return
        del self._users[key], self._tickets[key]
        if key in self._spent:
            return
        self._spent[key] = None
        while len(self._spent) > MAX_SPENT:
            self._spent.popitem(last=False)
        deadline = self._clock() + self._lease_seconds
        self._leases.release(*_address(ticket), ticket.request_id, ticket.token, deadline)

    def renew(self, ticket: Ticket) -> None:
        """Extend the ticket's lease."""
        if not self.is_spent(ticket):
            deadline = self._clock() + self.lease_seconds(ticket) / RENEWALS_PER_LEASE
            self._leases.renew(*_address(ticket), ticket.request_id, ticket.token, deadline)

    def renew_all(self) -> None:
        """Extend every lease in use, a few times in a lease's length; otherwise do nothing."""
        now = self._clock()
        if now < self._renew_at:
            return
        shortest = min((length for _, length in self._tickets.values()), default=math.inf)
        self._renew_at = now + min(shortest, self._lease_seconds) / RENEWALS_PER_LEASE
        for ticket, _ in self._tickets.values():
            self.renew(ticket)


def _key(ticket: Ticket) -> _Key:
    return ticket.engine_id, ticket.request_id, ticket.token


def _address(ticket: Ticket) -> tuple[str, int, str]:
    return ticket.host, ticket.port, ticket.engine_id
