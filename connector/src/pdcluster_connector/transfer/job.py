"""A job: one receive on the transfer thread, and what has to be read for it.

That is its KV, and then the lease words of its fence. The fence is a read of one lease word from
each rank that KV came from. It is planned when all the KV was seen to land: a word that is read
earlier proves nothing. ``receives.py`` has the reads posted, and reports the job when it has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import Indices
from pdcluster_connector.nixl_io.probe import WORD_BYTES, Scratch
from pdcluster_connector.nixl_io.reading_agent import Connection
from pdcluster_connector.plan.errors import PlanError
from pdcluster_connector.plan.request import EngineBlocks, GroupBlocks, plan_request
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive import Receive
from pdcluster_connector.protocol.receive_events import Event, Failed, State
from pdcluster_connector.transfer.handover import ReceiveRequest

HANDSHAKE_GRACE_SECONDS = 0.25  # the peer source knows better than the clock why it failed


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """One NIXL READ to post: descriptor indices of both sides, into source ``source``.

    ``word``: the scratch slot that a lease word is read into; None for a read of KV.
    """

    source: int
    decode: Indices
    prefill: Indices
    word: int | None = None


@dataclass(eq=False, slots=True)
class Job:
    """One receive on the transfer thread.

    Attributes:
        serial: tells requests of one id apart.
        request: what the engine step asked for.
        machine: where the receive stands.
        connection: to the prefill engine, once there is one.
        reads: what is still to be posted.
        sources: the connection's sources that KV is read from.
        nbytes, descriptors: of all that is read for it.
    """

    serial: int
    request: ReceiveRequest
    machine: Receive
    connection: Connection | None = None
    reads: deque[Read] = field(default_factory=deque)
    sources: set[int] = field(default_factory=set)
    nbytes: int = 0
    descriptors: int = 0

    @property
    def due(self) -> float:
        """When its machine is to be told the time."""
        connecting = self.machine.state is State.HANDSHAKE
        return self.machine.next_tick + (HANDSHAKE_GRACE_SECONDS if connecting else 0.0)

    def begin(self) -> None:
        """Forget what was planned over an agent that is destroyed."""
        self.connection = None
        self.reads.clear()
        self.sources.clear()
        self.nbytes = self.descriptors = 0


Tell = Callable[[Job, Event], None]
"""Tells a job's machine what happened."""


@contextmanager
def guarded(job: Job, tell: Tell) -> Iterator[None]:
    """Let any exception fail this job and nothing else."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001
        if isinstance(error, PlanError):
            failure = Failure(error.reason, error.message)
        else:
            failure = Failure(Reason.BACKEND_ERROR, f"{type(error).__name__}: {error}")
    else:
        return
    tell(job, Failed(failure))


def plan_reads(job: Job, connection: Connection, limit: int) -> Failure | None:
    """Fill ``job.reads``, each of at most ``limit`` descriptors.

    Returns why the ticket does not fit this engine.

    Raises:
        PlanError: the blocks do not cover the tokens, or lie outside of the caches.
    """
    request, ticket = job.request, job.request.ticket
    size = connection.metadata.shape.block_size
    if ticket.block_size != size:
        message = f"the ticket's blocks hold {ticket.block_size} tokens, the engine's {size}"
        return Failure(Reason.TICKET_INVALID, message)
    if not connection.sources:
        return None  # no layer of this rank has KV
    slots = min(source.word_slots for source in connection.sources)
    if not 0 <= ticket.fence_slot < slots:
        message = f"the ticket names lease word {ticket.fence_slot}, the engine has {slots}"
        return Failure(Reason.TICKET_INVALID, message)
    prefill = EngineBlocks(connection.groups, [GroupBlocks(ids) for ids in ticket.blocks])
    for part in plan_request(
        connection.plan,
        prefill,
        request.decode_blocks,
        start=request.start,
        stop=request.stop,
        tokens=ticket.tokens,
    ):
        count = len(part.decode_indices)
        job.sources.add(part.source)
        job.nbytes += part.nbytes
        job.descriptors += count
        for first in range(0, count, limit):
            cut = slice(first, first + limit)
            job.reads.append(Read(part.source, part.decode_indices[cut], part.prefill_indices[cut]))
    return None


def plan_fence(job: Job, connection: Connection, scratch: Scratch) -> Failure | None:
    """Fill ``job.reads`` with the fence: one lease word of each rank that was read.

    The reads count as transfers of the connection from now on: it must not close before them.
    Returns a failure when the scratch memory has no room for all of them.
    """
    prefill = np.array([job.request.ticket.fence_slot], np.int32)
    for source in sorted(job.sources):
        slot = scratch.take(WORD_BYTES)
        if slot is None:
            message = "too many lease words are being read at the same time"
            return Failure(Reason.BACKEND_ERROR, message)
        scratch.clear_word(slot)  # which may hold this ticket's word, of an earlier beginning
        decode = np.array([scratch.word_index(slot)], np.int32)
        job.reads.append(Read(source, decode, prefill, slot))
        connection.transfers += 1
    return None
