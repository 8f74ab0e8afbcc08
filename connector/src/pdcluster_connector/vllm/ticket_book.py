"""The tickets that a decode engine holds: renewed while in use, released once, never reused.

One ticket can come with several requests (``n=4``, a list of prompts): it is released when the
last of them needs it no more. Afterwards prefill may reuse the blocks at any time, so a
released ticket is remembered and refused.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Use:
    """A ticket in use, the length of its lease in seconds, and when it is renewed next."""

    ticket: Ticket
    length: float
    renew_at: float


class TicketBook:
    """Not thread-safe. ``clock`` gives monotonic seconds."""

    def __init__(
        self, leases: LeaseSender, lease_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._leases = leases
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._users: dict[_Key, int] = {}
        self._tickets: dict[_Key, _Use] = {}
        self._spent: OrderedDict[_Key, None] = OrderedDict()
        self._renew_at = math.inf

    def __len__(self) -> int:
        """Tickets in use."""
        return len(self._tickets)

    def is_spent(self, ticket: Ticket) -> bool:
        """Whether the ticket was released already."""
        return _key(ticket) in self._spent

    def use(self, ticket: Ticket) -> None:
        """Count one more request that came with the ticket, and renew its lease.

        The shorter of the ticket's lease and ours counts.
        """
        key = _key(ticket)
        self._users[key] = self._users.get(key, 0) + 1
        length = min(self._lease_seconds, ticket.lease_seconds)
        self._tickets[key] = _Use(ticket, length, self._clock() + length / RENEWALS_PER_LEASE)
        self._renew_at = min(self._renew_at, self._tickets[key].renew_at)
        self.renew(ticket)

    def lease_seconds(self, ticket: Ticket) -> float:
        """Length of the ticket's lease, counted from each renewal."""
        known = self._tickets.get(_key(ticket))
        return self._lease_seconds if known is None else known.length

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
        """Extend each lease in use a few times in its length; otherwise do nothing.

        Each has its own times: one short lease does not make all others be renewed.
        """
        now = self._clock()
        if now < self._renew_at:
            return
        for use in self._tickets.values():
            if use.renew_at <= now:
                use.renew_at = now + use.length / RENEWALS_PER_LEASE
                self.renew(use.ticket)
        self._renew_at = min((use.renew_at for use in self._tickets.values()), default=math.inf)


def _key(ticket: Ticket) -> _Key:
    return ticket.engine_id, ticket.request_id, ticket.token


def _address(ticket: Ticket) -> tuple[str, int, str]:
    return ticket.host, ticket.port, ticket.engine_id
