"""What the transfer thread hands back to the engine step: results, swapped out at once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive import Receive, State


@dataclass(frozen=True, slots=True)
class Received:
    """One request that arrived whole: what this rank read for it, and in what time."""

    nbytes: int
    descriptors: int
    seconds: float


@dataclass(slots=True)
class ReceiveStats:
    """Counters since the last take. Adds up over steps and ranks.

    Attributes:
        nbytes: bytes read by requests that arrived whole.
        descriptors: descriptors posted for them.
        receives: how many there were.
        phase_seconds: one value a request under ``handshake``, ``post``, ``transfer``, ``total``.
        failures: requests failed, by reason.
        abandoned: requests that the engine gave up.
    """

    nbytes: int = 0
    descriptors: int = 0
    receives: int = 0
    phase_seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    abandoned: int = 0


@dataclass(slots=True)
class ReceiveResults:
    """What has ended since the last take.

    Attributes:
        finished: every request that ended, well or not; each id once.
        failed: those whose blocks hold no valid KV, with the cause. Their blocks are free of
            any transfer. Abandoned requests are among them.
        abandoned: those of ``failed`` that the engine gave up: no fault of the KV path.
        received: those that arrived whole.
        stats: counters.
    """

    finished: set[str] = field(default_factory=set)
    failed: dict[str, Failure] = field(default_factory=dict)
    abandoned: set[str] = field(default_factory=set)
    received: dict[str, Received] = field(default_factory=dict)
    stats: ReceiveStats = field(default_factory=ReceiveStats)

    def __bool__(self) -> bool:
        return bool(self.finished)


class Outbox:
    """Results on their way from the transfer thread to the engine step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results = ReceiveResults()

    def take(self) -> ReceiveResults:
        """Return what has ended since the last call."""
        with self._lock:
            results, self._results = self._results, ReceiveResults()
        return results

    def report(self, receive: Receive, nbytes: int, descriptors: int) -> None:
        """Report a receive that is DONE or FAILED."""
        with self._lock:
            if receive.state is not State.DONE:
                failure = receive.failure or Failure(Reason.BACKEND_ERROR, "no cause is known")
                self._fail(receive.request_id, failure, abandoned=receive.abandoned)
                return
            phases = _phases(receive)
            results, stats = self._results, self._results.stats
            results.finished.add(receive.request_id)
            results.received[receive.request_id] = Received(nbytes, descriptors, phases["total"])
            stats.nbytes += nbytes
            stats.descriptors += descriptors
            stats.receives += 1
            for phase, seconds in phases.items():
                stats.phase_seconds.setdefault(phase, []).append(seconds)

    def fail(self, request_id: str, failure: Failure) -> None:
        """Report a request that never came as far as a state machine."""
        with self._lock:
            self._fail(request_id, failure, abandoned=False)

    def _fail(self, request_id: str, failure: Failure, *, abandoned: bool) -> None:
        results, stats = self._results, self._results.stats
        results.finished.add(request_id)
        results.failed[request_id] = failure
        if abandoned:
            results.abandoned.add(request_id)
            stats.abandoned += 1
        else:
            stats.failures[failure.reason] = stats.failures.get(failure.reason, 0) + 1


def _phases(receive: Receive) -> dict[str, float]:
    entered = receive.entered
    posted = entered[State.POSTED]
    return {
        "handshake": posted - entered[State.HANDSHAKE],
        "post": (receive.posted_at or posted) - posted,
        "transfer": entered[State.FENCE] - posted,
        "total": entered[State.DONE] - entered[State.HANDSHAKE],
    }
