"""What has to be read for one receive: its KV, and then the lease words of its fence.

The fence is a read of one lease word from each rank that KV came from. It is planned when all the
KV was seen to land: a word that is read earlier proves nothing. A :class:`Job` is one receive on
the transfer thread, with the reads that are planned for it. ``posting.py`` posts them.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import GroupShape
from pdcluster_connector.nixl_io import interface, probe_memory, reading_agent, serving_agent
from pdcluster_connector.plan import descriptors, geometry, request_descriptors
from pdcluster_connector.plan.block_pairs import EngineBlocks, GroupBlocks, groups_of
from pdcluster_connector.protocol import messages, receive_order
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.transfer.receive_machine import Event, Failed, Receive, Signal, State

logger = logging.getLogger(__name__)

FENCE_WORDS = 16_384
HANDSHAKE_GRACE_SECONDS = 0.25  # time for the peer source to say why the handshake failed


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """One NIXL READ to post: descriptors of both sides, into source ``source``.

    ``indices`` makes them: (prefill, decode), paired one with one.
    ``word``: the slot of :class:`FenceWords` that a lease word is read into; None for KV.
    """

    source: int
    indices: Callable[[], tuple[interface.Indices, interface.Indices]]
    word: int | None = None


@dataclass(eq=False, slots=True)
class Job:
    """One receive on the transfer thread.

    Attributes:
        request: what the engine step ordered.
        machine: the state machine of the receive.
        connection: to the prefill engine, once there is one.
        reads: those that are not yet posted.
        sources: the connection's sources that KV is read from.
        nbytes: of all that is read for it.
    """

    request: receive_order.ReceiveOrder
    machine: Receive
    connection: reading_agent.Connection | None = None
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


def plan_reads(
    job: Job, connection: reading_agent.Connection, groups: Sequence[GroupShape], limit: int
) -> Failure | None:
    """Fill ``job.reads``, each of at most ``limit`` descriptors; ``groups`` are this engine's.

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
    theirs = groups_of(connection.metadata.shape)
    prefill = EngineBlocks(theirs, [GroupBlocks(ids) for ids in ticket.blocks])
    for part in request_descriptors.plan_request(
        connection.plan,
        prefill,
        EngineBlocks(groups, request.blocks),
        start=request.start,
        stop=request.stop,
        tokens=ticket.tokens,
    ):
        job.sources.add(part.source)
        job.nbytes += part.nbytes
        for first in range(0, part.count, limit):
            job.reads.append(Read(part.source, partial(part.between, first, first + limit)))
    return None


def _word_indices(prefill: int, decode: int) -> tuple[interface.Indices, interface.Indices]:
    return np.array([prefill], np.int32), np.array([decode], np.int32)


class Slots:
    """Registered memory that reads go into, in ``count`` slots of ``size`` bytes.

    A slot is given back only when no transfer can write into it any more.
    """

    def __init__(self, size: int, count: int, memory: probe_memory.ProbeMemory) -> None:
        self._size, self._count = size, count
        self._buffer = memory.allocate(size * count)
        self.reset()

    @property
    def memory(self) -> geometry.MemoryRange:
        """Return the range to register."""
        return self._buffer.memory

    @property
    def rows(self) -> descriptors.Rows:
        """Return the descriptor list of all slots; a slot is the index of its descriptor."""
        whole, size = self._buffer.memory, self._size
        return serving_agent.one_row(whole.address, size, whole.device, self._count)

    def reset(self) -> None:
        """Take all slots back: the agent that could write into them is destroyed."""
        self.free = list(range(self._count))

    def take(self) -> int | None:
        """Return a free slot; None when all are taken."""
        return self.free.pop() if self.free else None

    def give_back(self, slot: int) -> None:
        """Return a slot."""
        self.free.append(slot)

    def cleared(self, slot: int, length: int) -> geometry.MemoryRange:
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
        super().__init__(serving_agent.WORD_BYTES, FENCE_WORDS, probe_memory.HostMemory())
        self._words = self.bytes_of(0, self.memory.length).view(np.uint64)

    def take(self) -> int | None:
        """Return a free slot, which holds no lease word now; None when all are taken."""
        slot = super().take()
        if slot is not None:  # this job may have read its word into it before
            self._words[slot] = messages.CLEARED
        return slot

    def read(self, slot: int) -> int:
        """Return the lease word that was read into a slot."""
        return int(self._words[slot])


def plan_fence(job: Job, connection: reading_agent.Connection, words: FenceWords) -> Failure | None:
    """Fill ``job.reads`` with the fence: one lease word of each rank that was read.

    The reads count as transfers of the connection from now on: it must not close before them.
    Returns a failure when there is no room for all of them.
    """
    theirs = job.request.ticket.fence_slot
    for source in sorted(job.sources):
        slot = words.take()
        if slot is None:
            message = "too many lease words are being read at the same time"
            return Failure(Reason.BACKEND_ERROR, message)
        job.reads.append(Read(source, partial(_word_indices, theirs, slot), slot))
        connection.transfers += 1
    return None
