"""What the transfer thread knows of one request, and how its transfers are planned."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import Indices
from pdcluster_connector.nixl_io.reading_agent import Link
from pdcluster_connector.plan.request import EngineBlocks, GroupBlocks, plan_request
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive import Receive
from pdcluster_connector.protocol.ticket import Ticket

logger = logging.getLogger(__name__)


def exit_process(message: str) -> None:
    """End this worker: blocks can be neither kept for ever nor given back safely."""
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
        deadline: when the lease ends, monotonic seconds.
    """

    request_id: str
    ticket: Ticket
    decode_blocks: EngineBlocks
    start: int
    stop: int
    deadline: float


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """Limits of the receiving side.

    Attributes:
        drain_deadline_seconds: how long a failed request may wait for its transfers before
            the reading agent is destroyed under them.
        descriptors_per_transfer: larger requests are posted in pieces, between which
            others are served; posting costs some 10 microseconds a descriptor.
        probe_seconds: how long a warm-up or a probe may take.
        check_seconds: how long the small read may take that shows that an idle link still
            carries data.
        max_requests: requests under way at once.
        fatal: called when transfers can no longer be stopped; must not return in production.
    """

    drain_deadline_seconds: float = 30.0
    descriptors_per_transfer: int = 1024
    probe_seconds: float = 10.0
    check_seconds: float = 5.0
    max_requests: int = 65536
    fatal: Callable[[str], None] = exit_process


@dataclass(frozen=True, slots=True)
class Piece:
    """One transfer to post: descriptor indices into source ``source`` of the link."""

    source: int
    decode: Indices
    prefill: Indices


@dataclass(eq=False, slots=True)
class Job:
    """One request under way. ``serial`` tells requests of one id apart."""

    serial: int
    request: ReceiveRequest
    machine: Receive
    link: Link | None = None
    pieces: deque[Piece] = field(default_factory=deque)
    nbytes: int = 0
    descriptors: int = 0


def plan_pieces(job: Job, link: Link, limit: int) -> Failure | None:
    """Fill ``job.pieces`` with transfers of at most ``limit`` descriptors.

    Returns why the ticket does not fit this engine.

    Raises:
        PlanError: the blocks do not cover the tokens, or lie outside of the caches.
    """
    request, ticket, shape = job.request, job.request.ticket, link.metadata.shape
    if ticket.block_size != shape.block_size:
        return Failure(
            Reason.TICKET_INVALID,
            f"the ticket's blocks hold {ticket.block_size} tokens, the engine's {shape.block_size}",
        )
    prefill = EngineBlocks(link.groups, [GroupBlocks(ids) for ids in ticket.blocks])
    for part in plan_request(
        link.plan,
        prefill,
        request.decode_blocks,
        start=request.start,
        stop=request.stop,
        tokens=ticket.tokens,
    ):
        job.nbytes += part.nbytes
        job.descriptors += len(part.decode_indices)
        job.pieces.extend(_pieces(part.source, part.decode_indices, part.prefill_indices, limit))
    return None


def _pieces(source: int, decode: Indices, prefill: Indices, limit: int) -> Iterator[Piece]:
    for first in range(0, len(decode), limit):
        cut = slice(first, first + limit)
        yield Piece(source, decode[cut], prefill[cut])
