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
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

from pdcluster_connector.protocol.engine_id import parse_engine_id
from pdcluster_connector.protocol.messages import CLEARED, SLOTS, LeaseReply, LeaseRequest, Standing


@dataclass(slots=True)
class _Lease:
    token: int
    slot: int | None
    deadline: float = 0.0  # once it is granted
    engine: str = ""  # the decode engine that has claimed it
    readers: set[str] = field(default_factory=set)  # its ranks that have not released it


@dataclass(frozen=True, slots=True)
class LeaseChanges:
    """What has changed since the last step.

    Attributes:
        released, expired: requests whose leases have ended, by prefill's id.
        words: what every rank has to write into its table of lease words, by slot. The ends of
            ``released`` and ``expired`` are among them, or were in an earlier step's.
        handovers: of each lease that was claimed, the seconds since it was granted.
    """

    released: list[str] = field(default_factory=list)
    expired: list[str] = field(default_factory=list)
    words: dict[int, int] = field(default_factory=dict)
    handovers: list[float] = field(default_factory=list)


class LeaseDesk:
    """All leases of one prefill engine. The scheduler and the side channel use it, each on its own
    thread, so decode engines get an answer however long the engine step lasts.

    Each call is atomic: a lease that the side channel has renewed does not expire in the same
    moment. No call waits for longer than another thread's call.

    Args:
        lease_seconds: how long a lease stands after it was granted or renewed.
        clock: monotonic seconds.
        slots: lease words of a rank.
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
        self._armed: dict[str, _Lease] = {}
        # In the order of their deadlines: every lease stands equally long, so one that is granted
        # or renewed now ends after all others.
        self._granted: OrderedDict[str, _Lease] = OrderedDict()
        self._free = list(range(slots - 1, -1, -1))
        self._words: dict[int, int] = {}
        self._released: list[str] = []
        self._handovers: list[float] = []
        self._expired: OrderedDict[str, int] = OrderedDict()  # the tokens of the latest ones

    @property
    def held(self) -> int:
        """Leases granted and neither released nor expired: each keeps blocks from reuse."""
        return len(self._granted)

    # The scheduler's thread.

    def arm(self, request_id: str, token: int) -> None:
        """Note a scheduled request's token; scheduled again, the new token replaces the old.

        Nothing changes if the lease was already granted. Where all slots are taken, the lease has
        none.
        """
        with self._lock:
            if request_id in self._granted:
                return
            lease = self._armed.get(request_id)
            slot = None if lease is None else lease.slot
            if slot is None and self._free:
                slot = self._free.pop()
            if slot is not None:
                self._words[slot] = token
            self._armed[request_id] = _Lease(token, slot)

    def place(self, request_id: str) -> tuple[int, int | None] | None:
        """Return (token, slot) of a request's lease; None without one."""
        with self._lock:
            lease = self._find(request_id)
            return None if lease is None else (lease.token, lease.slot)

    def grant(self, request_id: str) -> bool:
        """Start the lease of a finished request now. False without an armed lease."""
        with self._lock:
            lease = self._armed.pop(request_id, None)
            if lease is None:
                return False
            lease.deadline = self._clock() + self._seconds
            self._granted[request_id] = lease
            return True

    def drop(self, request_id: str) -> None:
        """Forget a request's lease, if any, whatever its token."""
        with self._lock:
            self._end(request_id)

    def take(self, words: dict[int, int] | None = None) -> LeaseChanges:
        """Expire what is due, and return what has changed; each change once.

        The lease words are added to ``words``: none is lost if this raises. It may be lost which
        leases have ended; :meth:`place` then does not find them.
        """
        words = {} if words is None else words
        with self._lock:
            now = self._clock()
            due = takewhile(lambda item: item[1].deadline <= now, self._granted.items())
            expired = [request_id for request_id, _ in due]
            for request_id in expired:
                self._expired[request_id] = self._granted[request_id].token
                self._end(request_id)
            while len(self._expired) > SLOTS:
                self._expired.popitem(last=False)
            words |= self._words
            released, self._released, self._words = self._released, [], {}
            handovers, self._handovers = self._handovers, []
            return LeaseChanges(released, expired, words, handovers)

    # The side channel's thread.

    def answer(self, asked: LeaseRequest) -> LeaseReply:
        """Take a decode engine's releases and renewals in."""
        with self._lock:
            for request_id, token in asked.releases:
                self._release(request_id, token, asked.holder)
            standing = {key: self._renew(*key, asked.holder) for key in asked.renewals}
        return LeaseReply(
            seconds=self._seconds,
            renewed=tuple(key for key in standing if standing[key] is Standing.HELD),
            claimed=tuple(key for key in standing if standing[key] is Standing.CLAIMED),
            expired=tuple(key for key in standing if standing[key] is Standing.EXPIRED),
        )

    # From here on: with the lock.

    def _renew(self, request_id: str, token: int, holder: str) -> Standing:
        """Move a lease's deadline for the engine that holds it: that of the first ``holder``."""
        lease, engine = self._granted.get(request_id), parse_engine_id(holder).engine
        if lease is None or lease.token != token:
            return Standing.EXPIRED if self._expired.get(request_id) == token else Standing.GONE
        if lease.readers and lease.engine != engine:
            return Standing.CLAIMED
        now = self._clock()
        if not lease.engine:
            self._handovers.append(now - (lease.deadline - self._seconds))
        lease.engine = engine
        lease.readers.add(holder)
        lease.deadline = now + self._seconds
        self._granted.move_to_end(request_id)
        return Standing.HELD

    def _release(self, request_id: str, token: int, holder: str) -> None:
        """Note that ``holder`` has stopped reading. End the lease if nobody else reads.

        Somebody else may be another engine, which has claimed it, or another rank.
        """
        lease = self._find(request_id)
        if lease is not None and lease.token == token:
            lease.readers.discard(holder)
            if not lease.readers:
                self._end(request_id)
                self._released.append(request_id)

    def _find(self, request_id: str) -> _Lease | None:
        return self._granted.get(request_id) or self._armed.get(request_id)

    def _end(self, request_id: str) -> None:
        lease = self._find(request_id)
        if lease is None:
            return
        if lease.slot is not None:  # first: no word may stand without its lease
            self._words[lease.slot] = CLEARED
        (self._granted if request_id in self._granted else self._armed).pop(request_id)
        if lease.slot is not None:
            self._free.append(lease.slot)
