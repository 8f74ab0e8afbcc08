"""How much was read for each receive and how long its phases took, as the engine step takes it.

The bytes come from ``planned_reads.py``, which sums them up when the reads are planned. The seconds
are those between the states that ``receive_machine.py`` enters. ``vllm/worker_side/worker.py``
counts both in the metrics.

:class:`ReceiveRates` says how fast the receives of each link were. The probe of a new link cannot
show that the link has become slow since.
"""

from collections import deque
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.load_report import ReceiveRate
from pdcluster_connector.protocol.receive_order import Receipt
from pdcluster_connector.transfer.receive_machine import Receive, State


@dataclass(slots=True)
class ReceiveResults:
    """What has ended since the last take.

    Attributes:
        finished: every request that ended, well or not; each id once.
        failed: requests whose blocks hold no valid KV, with the cause. No transfer can write into
            the blocks any more. Abandoned requests are among them.
        abandoned: the requests of ``failed`` that the engine gave up. They are not failures of the
            KV path.
        received: those that arrived whole: bytes of this rank, and seconds from the connect on.
        phase_seconds: one value for each of them under ``handshake``, ``post``, ``transfer``,
            ``fence``, ``total``.
        links: bytes, and seconds of the phase ``transfer``, of those from each prefill engine.
    """

    finished: set[str] = field(default_factory=set)
    failed: dict[str, Failure] = field(default_factory=dict)
    abandoned: set[str] = field(default_factory=set)
    received: dict[str, Receipt] = field(default_factory=dict)
    phase_seconds: dict[str, list[float]] = field(default_factory=dict)
    links: dict[str, tuple[int, float]] = field(default_factory=dict)

    def add(self, receive: Receive, nbytes: int, prefill: str) -> None:
        """Count a receive that is DONE or FAILED, and the bytes that were read for it.

        ``prefill`` is the id of the engine that they were read from.
        """
        self.finished.add(receive.request_id)
        if receive.state is not State.DONE:
            failure = receive.failure or Failure(Reason.BACKEND_ERROR, "no cause is known")
            self.failed[receive.request_id] = failure
            if receive.abandoned:
                self.abandoned.add(receive.request_id)
            return
        entered, posted = receive.entered, receive.entered[State.POSTED]
        phases = {
            "handshake": posted - entered[State.HANDSHAKE],
            "post": (receive.posted_at or posted) - posted,
            "transfer": entered[State.FENCE] - posted,
            "fence": entered[State.DONE] - entered[State.FENCE],
            "total": entered[State.DONE] - entered[State.HANDSHAKE],
        }
        for phase, seconds in phases.items():
            self.phase_seconds.setdefault(phase, []).append(seconds)
        before, seconds = self.links.get(prefill, (0, 0.0))
        self.links[prefill] = before + nbytes, seconds + phases["transfer"]
        self.received[receive.request_id] = Receipt(nbytes, phases["total"])


LARGE_BYTES = 8 * 1024 * 1024
"""A smaller receive waits for latencies rather than for bytes. A probe reads as much."""
LEAST_SECONDS = 0.02
"""In less, the pauses between two looks and the turns of other threads are a large part."""
POSTING_BOUND = 0.9
"""A receive that was being posted for this share of its time says nothing of the wire."""
AHEAD = 4
"""In a measurement, this many times the bytes land that are under way when it begins or ends. So
those change it by a quarter at most, whatever part of them moved within it."""
MEASUREMENTS, LEAST_MEASUREMENTS, STANDS_SECONDS = 16, 8, 3600.0


@dataclass(slots=True, eq=False)
class _Link:
    under_way: dict[str, int] = field(default_factory=dict)  # bytes of large receives
    small: dict[str, int] = field(default_factory=dict)  # and of others
    since: float = 0.0  # when the measurement began
    busy: float = 0.0  # this link's share of the seconds since then
    landed: int = 0
    carried: int = 0  # bytes that were under way when it began
    shows: bool = True  # that it is slow, if it is
    measured: deque[tuple[float, float, int, bool]] = field(  # when, how fast, bytes, shows
        default_factory=lambda: deque(maxlen=MEASUREMENTS)
    )
    told: ReceiveRate | UnsetType = UNSET


class ReceiveRates:
    """How fast large receives move KV from each prefill engine. Pure; times are in seconds.

    A measurement is the bytes that land while large receives are under way from an engine, divided
    by the time. Receives that run side by side share that time. If they run from several engines,
    each engine gets an equal part of it, because this rank's network is shared, too. What other
    ranks do to the network is not known here. So a link may be called slow only if its fastest
    measurement is.

    A measurement that was too short, or that waited for posting, shows how fast a link is at least,
    and not that it is slow. While half of the latest are such, nothing is told.
    """

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}
        self._now = 0.0

    def began(self, prefill: str, request_id: str, nbytes: int, now: float) -> None:
        """Note that a receive of ``nbytes`` is about to be posted."""
        self._pass(now)
        link = self._links.setdefault(prefill, _Link())
        if nbytes < LARGE_BYTES:
            link.small[request_id] = nbytes
            return
        if not link.under_way:
            _begin(link, now)
        link.under_way[request_id] = nbytes

    def landed(self, prefill: str, receive: Receive, now: float) -> None:
        """Note that all KV of a receive has landed."""
        link = self._links.get(prefill)
        if link is None:
            return
        self._pass(now)
        link.landed += link.small.pop(receive.request_id, 0)
        if receive.request_id not in link.under_way:  # or it is one beside which one failed
            return
        link.landed += link.under_way.pop(receive.request_id)
        posted, entered = receive.posted_at or now, receive.entered[State.POSTED]
        link.shows &= posted - entered < POSTING_BOUND * (now - entered)
        around = max(link.carried, _ahead(link))
        if link.busy > 1e-6 and link.landed >= AHEAD * around:
            shows = link.shows and now - link.since >= LEAST_SECONDS
            link.measured.append((now, link.landed / link.busy, link.landed, shows))
            _begin(link, now)

    def failed(self, prefill: str, request_id: str, now: float) -> None:
        """Note that a receive has ended. If it had not landed, those beside it are not measured."""
        link = self._links.get(prefill)
        if link is not None and (request_id in link.small or request_id in link.under_way):
            self._pass(now)
            link.small.pop(request_id, None)
            link.under_way.clear()

    def told(self, prefill: str, now: float) -> ReceiveRate | UnsetType:
        """Return what the latest measurements say. It stays the same until that differs by a tenth.

        They are MEASUREMENTS at most, and none is older than STANDS_SECONDS.
        """
        link = self._links.get(prefill, _Link())
        while link.measured and link.measured[0][0] < now - STANDS_SECONDS:
            link.measured.popleft()
        count = len(link.measured)
        if count < LEAST_MEASUREMENTS or 2 * sum(one[3] for one in link.measured) <= count:
            link.told = UNSET
            return UNSET
        rates = sorted(one[1] for one in link.measured)
        rate = ReceiveRate(
            rates[-1], rates[count // 2], count, sum(one[2] for one in link.measured)
        )
        if (
            link.told is UNSET
            or not 0.9 < rate.best / link.told.best < 1.1
            or not 0.9 < rate.median / link.told.median < 1.1
        ):
            link.told = rate
        return link.told

    def forget(self, prefill: str) -> None:
        """Forget a link that was probed anew, or whose connection has ended."""
        self._links.pop(prefill, None)

    def _pass(self, now: float) -> None:
        busy = [link for link in self._links.values() if link.under_way]
        for link in busy:
            link.busy += (now - self._now) / len(busy)
        self._now = now


def _begin(link: _Link, now: float) -> None:
    link.since, link.busy, link.landed, link.shows = now, 0.0, 0, True
    link.carried = _ahead(link)


def _ahead(link: _Link) -> int:
    return sum(link.under_way.values()) + sum(link.small.values())
