"""The leases that a decode engine holds: when each is renewed, and when it is released.

Each lease has a ticket. One ticket can come with several requests (``n=4``, a list of prompts): it
is released when the last of them no longer needs it. Afterwards prefill may reuse the blocks at any
time, so a released ticket is remembered and refused.

Prefill answers each renewal. The first answer claims the lease for this engine, and a ticket
may be used only while the last one stands.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import Standing
from pdcluster_connector.protocol.receive_order import IDLE_SECONDS
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.sidechannel.lease_client import LeaseClient

MAX_SPENT: Final = 65536
RENEWALS_PER_LEASE: Final = 4
CLAIM_SECONDS: Final = 0.5  # for the answer to a claim, by an engine that did not answer before

_Key = tuple[str, str, int]

_LOST: Final = {
    Standing.GONE: Failure(
        Reason.LEASE_LOST, "prefill holds no such lease: it was released, or it has expired"
    ),
    Standing.EXPIRED: Failure(
        Reason.LEASE_EXPIRED, "prefill's lease had ended before this engine asked for it"
    ),
    Standing.CLAIMED: Failure(Reason.LEASE_CLAIMED, "another decode engine used this ticket first"),
}
_EXPIRED: Final = Failure(
    Reason.LEASE_EXPIRED, "prefill acknowledged no renewal for as long as the lease lasts"
)


@dataclass(eq=False, slots=True)
class _Lease:
    """The lease of one ticket in use.

    Attributes:
        seconds: how long it lasts after each renewal.
        until: when it ends, unless it is renewed; guessed until it is claimed.
        renew_at: when it is renewed next.
        users: requests that came with the ticket and still need it.
        claimed: whether prefill has acknowledged it for this engine.
        doubtful: whether it had ended by prefill's clock when the ticket came, as far as is known.
        lost: why it is not this engine's any more.
        parked: requests that wait for its KV.
    """

    ticket: Ticket
    seconds: float
    until: float
    renew_at: float = 0.0
    users: set[str] = field(default_factory=set)
    claimed: bool = False
    doubtful: bool = False
    lost: Failure | None = None
    parked: set[str] = field(default_factory=set)


@dataclass(eq=False)
class DecodeLeases:
    """Not thread-safe. ``clock`` gives monotonic seconds. ``held`` are the tickets in use."""

    leases: LeaseClient
    lease_seconds: float
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.held: dict[_Key, _Lease] = {}
        self._spent: OrderedDict[_Key, None] = OrderedDict()
        self._renewed: dict[str, float] = {}
        self._lost: dict[str, Failure] = {}
        self._ahead: dict[str, float] = {}  # prefill's Unix clock of our monotonic one, at least
        self._renew_at = math.inf

    def is_spent(self, ticket: Ticket) -> bool:
        """Whether the ticket was released already."""
        return _key(ticket) in self._spent

    def use(self, ticket: Ticket, request_id: str) -> None:
        """Note a request that came with the ticket, and renew its lease.

        The shorter of the ticket's lease and ours counts.
        """
        key, now = _key(ticket), self.clock()
        length = min(self.lease_seconds, ticket.lease_seconds)
        # A ticket was made before it came here. So prefill's clock is at least so far ahead.
        least, ahead = ticket.expires_at - ticket.lease_seconds - now, self._ahead
        doubtful = ticket.expires_at <= now + ahead.get(ticket.engine_id, -math.inf)
        if len(ahead) >= MAX_SPENT:
            ahead.clear()
        ahead[ticket.engine_id] = max(least, ahead.get(ticket.engine_id, least))
        lease = self.held.setdefault(key, _Lease(ticket, length, now + length, doubtful=doubtful))
        lease.users.add(request_id)
        self._renew_at = min(self._renew_at, lease.renew_at)
        self._renew(lease)

    def objection(self, ticket: Ticket) -> Failure | None:
        """Why the KV of a ticket in use must not be read any more; None if it may be."""
        self.hear()
        lease = self.held.get(_key(ticket))
        if lease is None or lease.lost is not None:
            return _LOST[Standing.GONE] if lease is None else lease.lost
        return _EXPIRED if self.clock() >= lease.until else None

    def waits_for_claim(self, ticket: Ticket, *, shared: bool) -> bool:
        """Whether a ticket in use waits until prefill has acknowledged its lease.

        ``shared``: another engine may use it up. If prefill does not answer soon, and did not
        before, a receive finds out why, and ends as soon as that of any other request.
        """
        lease = self.held[_key(ticket)]
        late = self.clock() >= lease.until - lease.seconds + CLAIM_SECONDS
        answers = ticket.engine_id not in self.leases.unanswered
        return not lease.claimed and (shared or lease.doubtful) and (answers or not late)

    def park(self, ticket: Ticket, request_id: str) -> tuple[float, bool]:
        """Note a request that waits for the ticket's KV.

        Returns (seconds until the lease ends, whether it is claimed).
        """
        lease = self.held[_key(ticket)]
        lease.parked.add(request_id)
        return lease.until - self.clock(), lease.claimed

    def done(self, ticket: Ticket, request_id: str) -> None:
        """Note that a request no longer needs the ticket; the last one releases it.

        If this raises, it can be called again, and :meth:`renew_all` does what is left.
        """
        key = _key(ticket)
        lease = self.held.get(key)
        if lease is not None:
            lease.parked.discard(request_id)
            lease.users.discard(request_id)
        if lease is None or not lease.users:
            self._release(key, ticket)

    def end_receives(self) -> None:
        """Send the releases, unless receives are under way, whose releases come soon.

        vLLM makes steps on a prefill engine, also without anything to compute, until its last lease
        has ended. So a lease that stands for longer takes processor time there.
        """
        if not any(lease.parked for lease in self.held.values()):
            self.leases.send(releases=True)

    def _release(self, key: _Key, ticket: Ticket) -> None:
        if key not in self._spent:
            self.leases.release(ticket, self.clock() + self.lease_seconds)
        self._spent[key] = None
        while len(self._spent) > MAX_SPENT:
            self._spent.popitem(last=False)
        self.held.pop(key, None)

    def hear(self) -> None:
        """Take in what prefill engines have answered."""
        for answer in self.leases.answers():
            lease = self.held.get((answer.engine_id, answer.request_id, answer.token))
            if lease is None or lease.lost is not None:
                continue
            if answer.standing is Standing.HELD:
                if lease.doubtful and not lease.claimed:  # prefill's clock was set back
                    self._ahead.pop(answer.engine_id, None)
                lease.until = max(lease.until, answer.until) if lease.claimed else answer.until
                lease.claimed = True
                self._renewed.update(dict.fromkeys(lease.parked, lease.until))
            else:
                lease.lost = _LOST[answer.standing]
                self._lost.update(dict.fromkeys(lease.parked, lease.lost))

    def take_news(self, *, wait: bool = False) -> tuple[dict[str, float], dict[str, Failure]]:
        """Send the claims of this step; return what has changed for parked requests meanwhile.

        Seconds until the lease ends, for those whose lease was renewed, and why the others have
        none any more. ``wait``: for ``IDLE_SECONDS``, if one of them waits for the answer to its
        claim, and its prefill engine is not silent.
        """
        self.leases.send()
        if wait and any(
            lease.parked
            and not lease.claimed
            and lease.lost is None
            and lease.ticket.engine_id not in self.leases.unanswered
            for lease in self.held.values()
        ):
            self.leases.wait(IDLE_SECONDS)
        self.hear()
        now = self.clock()
        renewed, self._renewed = self._renewed, {}
        lost, self._lost = self._lost, {}
        return {request_id: until - now for request_id, until in renewed.items()}, lost

    def renew_all(self) -> None:
        """Extend each lease in use a few times in its length; otherwise do nothing.

        Each has its own times: one short lease does not make all others be renewed.
        """
        now = self.clock()
        if now < self._renew_at:
            return
        for key, lease in list(self.held.items()):
            if not lease.users:
                self._release(key, lease.ticket)
            elif lease.renew_at <= now:
                self._renew(lease)
        self._renew_at = min((lease.renew_at for lease in self.held.values()), default=math.inf)

    def _renew(self, lease: _Lease) -> None:
        ticket, period = lease.ticket, lease.seconds / RENEWALS_PER_LEASE
        lease.renew_at = self.clock() + period
        if lease.lost is None and not self.is_spent(ticket):
            self.leases.renew(ticket, lease.renew_at)


def _key(ticket: Ticket) -> _Key:
    return ticket.engine_id, ticket.request_id, ticket.token
