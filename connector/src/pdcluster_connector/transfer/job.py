"""A job: one receive on the transfer thread, and what has to be read for it.

That is its KV, and then the lease words of its fence. The fence is a read of one lease word from
each rank that KV came from. It is planned when all the KV was seen to land: a word that is read
earlier proves nothing. ``receives.py`` has the reads posted, and reports the job when it has ended.
"""

import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import Indices
from pdcluster_connector.nixl_io.probe_memory import HostMemory, ProbeMemory
from pdcluster_connector.nixl_io.reading_agent import Connection
from pdcluster_connector.nixl_io.serving_agent import WORD_BYTES, one_row
from pdcluster_connector.plan.descriptors import Rows
from pdcluster_connector.plan.geometry import MemoryRange
from pdcluster_connector.plan.pairing import EngineBlocks, GroupBlocks
from pdcluster_connector.plan.request_descriptors import plan_request
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.lease import CLEARED
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.transfer.receive import Event, Failed, Receive, Signal, State

logger = logging.getLogger(__name__)

FENCE_WORDS = 16_384
HANDSHAKE_GRACE_SECONDS = 0.25  # time for the peer source to say why the handshake failed


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


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """One NIXL READ to post: descriptor indices of both sides, into source ``source``.

    ``word``: the slot of :class:`FenceWords` that a lease word is read into; None for KV.
    """

    source: int
    decode: Indices
    prefill: Indices
    word: int | None = None


@dataclass(eq=False, slots=True)
class Job:
    """One receive on the transfer thread.

    Attributes:
        request: from the engine step.
        machine: the state machine of the receive.
        connection: to the prefill engine, once there is one.
        reads: those that are not yet posted.
        sources: the connection's sources that KV is read from.
        nbytes: of all that is read for it.
    """

    request: ReceiveRequest
    machine: Receive
    connection: Connection | None = None
    reads: deque[Read] = field(default_factory=deque)
    sources: set[int] = field(default_factory=set)
    nbytes: int = 0

    @property
    def due(self) -> float:
        """When the next ``TICK`` of its machine is due, in seconds of the receiver's clock."""
        connecting = self.machine.state is State.HANDSHAKE
        return self.machine.next_tick + (HANDSHAKE_GRACE_SECONDS if connecting else 0.0)

    @property
    def tick(self) -> Event:
        """Return the event at :attr:`due`: what it waits for may be why it has waited so long."""
        stalled = self.connection and self.connection.stalled
        connecting = self.machine.state is State.HANDSHAKE
        return Failed(stalled) if connecting and stalled else Signal.TICK

    def begin(self) -> None:
        """Forget what was planned over an agent that is destroyed."""
        self.connection = None
        self.reads.clear()
        self.sources.clear()
        self.nbytes = 0


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
    if not connection.plan.sources:
        return None  # no layer of this rank has KV
    if not connection.sources:
        return connection.broken or Failure(Reason.BACKEND_ERROR, "the connection has ended")
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
        for first in range(0, count, limit):
            cut = slice(first, first + limit)
            job.reads.append(Read(part.source, part.decode_indices[cut], part.prefill_indices[cut]))
    return None


class Slots:
    """Registered memory that reads go into, in ``count`` slots of ``size`` bytes.

    A slot is given back only when no transfer can write into it any more.
    """

    def __init__(self, size: int, count: int, memory: ProbeMemory) -> None:
        self._size, self._count = size, count
        self._buffer = memory.allocate(size * count)
        self.reset()

    @property
    def memory(self) -> MemoryRange:
        """Return the range to register."""
        return self._buffer.memory

    @property
    def rows(self) -> Rows:
        """Return the descriptor list of all slots; a slot is the index of its descriptor."""
        whole, size = self._buffer.memory, self._size
        return one_row(whole.address, size, whole.device, self._count)

    def reset(self) -> None:
        """Take all slots back: the agent that could write into them is destroyed."""
        self.free = list(range(self._count))

    def take(self) -> int | None:
        """Return a free slot; None when all are taken."""
        return self.free.pop() if self.free else None

    def give_back(self, slot: int) -> None:
        """Return a slot."""
        self.free.append(slot)

    def cleared(self, slot: int, length: int) -> MemoryRange:
        """Write zeros to the first ``length`` bytes of a slot; return where they are."""
        self._buffer.clear(slot * self._size, length)
        whole = self._buffer.memory
        return replace(whole, address=whole.address + slot * self._size, length=length)

    def bytes_of(self, slot: int, length: int) -> NDArray[np.uint8]:
        """Return ``length`` bytes from the start of a slot, in host memory."""
        return self._buffer.read(slot * self._size, length)


class FenceWords(Slots):
    """Registered host memory that lease words are read into, one in each slot."""

    def __init__(self) -> None:
        super().__init__(WORD_BYTES, FENCE_WORDS, HostMemory())
        self._words = self.bytes_of(0, self.memory.length).view(np.uint64)

    def take(self) -> int | None:
        """Return a free slot, which holds no lease word now; None when all are taken."""
        slot = super().take()
        if slot is not None:  # this job may have read its word into it before
            self._words[slot] = CLEARED
        return slot

    def read(self, slot: int) -> int:
        """Return the lease word that was read into a slot."""
        return int(self._words[slot])


def plan_fence(job: Job, connection: Connection, words: FenceWords) -> Failure | None:
    """Fill ``job.reads`` with the fence: one lease word of each rank that was read.

    The reads count as transfers of the connection from now on: it must not close before them.
    Returns a failure when there is no room for all of them.
    """
    prefill = np.array([job.request.ticket.fence_slot], np.int32)
    for source in sorted(job.sources):
        slot = words.take()
        if slot is None:
            message = "too many lease words are being read at the same time"
            return Failure(Reason.BACKEND_ERROR, message)
        job.reads.append(Read(source, np.array([slot], np.int32), prefill, slot))
        connection.transfers += 1
    return None
