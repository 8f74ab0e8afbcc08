"""The requests, limits and results that engine step and transfer thread hand to each other."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.plan.held_blocks import EngineBlocks
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.transfer.receive import Receive, State

logger = logging.getLogger(__name__)


def exit_process(message: str) -> None:
    """End this worker: its blocks can neither be kept forever nor be freed safely."""
    logger.critical("the worker ends: %s", message)
    sys.stderr.flush()
    os._exit(70)  # EX_SOFTWARE; the launcher starts the engine anew


@dataclass(frozen=True, slots=True)
class ReceiveRequest:
    """One request whose KV is to be read from a prefill engine.

    Attributes:
        request_id: this engine's id; reported exactly once.
        ticket: what the prefill engine handed over.
        decode_blocks: this engine's KV cache groups, and the request's blocks in each.
        start, stop: tokens wanted, counted from the prompt's start.
        deadline: when the lease ends unless it is renewed, monotonic seconds.
        claimed: whether prefill has acknowledged the lease for this engine.
    """

    request_id: str
    ticket: Ticket
    decode_blocks: EngineBlocks
    start: int
    stop: int
    deadline: float
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """Limits of the receiving side.

    Attributes:
        drain_deadline_seconds: how long a failed request may wait for its transfers before
            the reading agent is destroyed.
        transfer_stall_seconds: how long a request may have transfers under way of which none
            lands. One transfer may be slow: it waits behind those of other requests.
        descriptors_per_transfer: larger requests are posted in several transfers, so that other
            requests are served in between; posting takes about 10 microseconds a descriptor.
        probe_seconds: how long a warm-up or a probe may take.
        check_seconds: how long a check may take: a small read over an idle connection.
        max_requests: requests under way at once.
        stall_seconds: how long one call of NIXL may last before the worker ends.
        fatal: called when transfers can no longer be stopped; must not return in production.
    """

    drain_deadline_seconds: float = 30.0
    transfer_stall_seconds: float = 300.0
    descriptors_per_transfer: int = 1024
    probe_seconds: float = 10.0
    check_seconds: float = 5.0
    max_requests: int = 65536
    stall_seconds: float = 120.0
    fatal: Callable[[str], None] = exit_process


@dataclass(frozen=True, slots=True)
class Received:
    """What this rank read for one request that arrived whole, and how long it took."""

    nbytes: int
    descriptors: int
    seconds: float


@dataclass(slots=True)
class ReceiveStats:
    """Counters since the last take. Adds up over steps and ranks.

    Attributes:
        nbytes: bytes read by requests that arrived whole.
        phase_seconds: one value a request under ``handshake``, ``post``, ``transfer``, ``fence``,
            ``total``.
        failures: requests failed, by reason; not those that the engine gave up.
    """

    nbytes: int = 0
    phase_seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class ReceiveResults:
    """What has ended since the last take.

    Attributes:
        finished: every request that ended, well or not; each id once.
        failed: requests whose blocks hold no valid KV, with the cause. No transfer can write into
            the blocks any more. Abandoned requests are among them.
        abandoned: the requests of ``failed`` that the engine gave up. They are not failures of the
            KV path.
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

    def add(self, receive: Receive, nbytes: int, descriptors: int) -> None:
        """Count a receive that is DONE or FAILED, and what was read for it."""
        self.finished.add(receive.request_id)
        if receive.state is State.DONE:
            self._count_received(receive, nbytes, descriptors)
            return
        failure = receive.failure or Failure(Reason.BACKEND_ERROR, "no cause is known")
        self.failed[receive.request_id] = failure
        if receive.abandoned:
            self.abandoned.add(receive.request_id)
        else:
            self.stats.failures[failure.reason] = self.stats.failures.get(failure.reason, 0) + 1

    def _count_received(self, receive: Receive, nbytes: int, descriptors: int) -> None:
        phases = _phases(receive)
        self.received[receive.request_id] = Received(nbytes, descriptors, phases["total"])
        self.stats.nbytes += nbytes
        for phase, seconds in phases.items():
            self.stats.phase_seconds.setdefault(phase, []).append(seconds)


def _phases(receive: Receive) -> dict[str, float]:
    entered = receive.entered
    posted = entered[State.POSTED]
    return {
        "handshake": posted - entered[State.HANDSHAKE],
        "post": (receive.posted_at or posted) - posted,
        "transfer": entered[State.FENCE] - posted,
        "fence": entered[State.DONE] - entered[State.FENCE],
        "total": entered[State.DONE] - entered[State.HANDSHAKE],
    }
