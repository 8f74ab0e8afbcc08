"""The transfers of all receives: planned, posted one after the other, polled, never forgotten.

A transfer leaves in one of three ways: it landed, the transport broke it, or it became
*unseen*: it may still write, but NIXL no longer tells how it is. Only destroying the agent
ends an unseen one.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import Handle, Indices, NixlError
from pdcluster_connector.nixl_io.reading_agent import Connection, Source
from pdcluster_connector.plan.request import EngineBlocks, GroupBlocks, plan_request
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive import (
    Broken,
    Event,
    Failed,
    Landed,
    Opened,
    Posted,
    Receive,
)
from pdcluster_connector.transfer.handover import ReceiveRequest

logger = logging.getLogger(__name__)

POST_SECONDS = 0.002  # posting for longer would leave what has landed unnoticed


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """One NIXL READ to post: descriptor indices of both sides, into source ``source``."""

    source: int
    decode: Indices
    prefill: Indices


@dataclass(eq=False, slots=True)
class Job:
    """One receive on the transfer thread.

    Attributes:
        serial: tells requests of one id apart.
        request: what the engine step asked for.
        machine: where the receive stands.
        connection: to the prefill engine, once there is one.
        reads: what is still to be posted.
        nbytes, descriptors: of all that is read for it.
    """

    serial: int
    request: ReceiveRequest
    machine: Receive
    connection: Connection | None = None
    reads: deque[Read] = field(default_factory=deque)
    nbytes: int = 0
    descriptors: int = 0


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
        job.nbytes += part.nbytes
        job.descriptors += count
        for first in range(0, count, limit):
            cut = slice(first, first + limit)
            job.reads.append(Read(part.source, part.decode_indices[cut], part.prefill_indices[cut]))
    return None


@dataclass(frozen=True, slots=True)
class _UnderWay:
    job: Job
    connection: Connection
    source: Source
    handle: Handle


class Transfers:
    """Posts and polls for all jobs.

    Args:
        tell: takes what happened to a job's machine.
        broken: told that a connection cannot be used any more.
        settle: told that a broken connection has one transfer less under way.

    Attributes:
        unseen: transfers that may still write and that nobody can observe.
    """

    def __init__(
        self,
        *,
        tell: Callable[[Job, Event], None],
        broken: Callable[[Connection, Failure], None],
        settle: Callable[[Connection], None],
        clock: Callable[[], float],
    ) -> None:
        self.unseen = 0
        self._tell = tell
        self._broken = broken
        self._settle = settle
        self._clock = clock
        self._numbers = itertools.count()
        self._posting: deque[Job] = deque()
        self._under_way: dict[int, _UnderWay] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to post or to poll."""
        return bool(self._posting or self._under_way)

    def add(self, job: Job) -> None:
        """Post ``job``'s reads when their turn comes."""
        self._posting.append(job)

    def clear(self) -> None:
        """Forget everything: the agent is destroyed."""
        self._posting.clear()
        self._under_way.clear()
        self.unseen = 0

    def post_some(self) -> bool:
        """Post for a while, one read of each job in turn; returns whether there was any."""
        if not self._posting:
            return False
        until = self._clock() + POST_SECONDS
        while self._posting:
            job = self._posting.popleft()
            if not job.machine.may_post or job.connection is None:
                continue  # it failed meanwhile: none of its other reads follows
            if job.connection.broken is not None:
                self._tell(job, Failed(job.connection.broken))
                continue
            self._post(job, job.connection)
            if not job.machine.may_post:
                continue
            if job.reads:
                self._posting.append(job)
            else:
                self._tell(job, Posted())
            if self._clock() >= until:
                break
        return True

    def _post(self, job: Job, connection: Connection) -> None:
        read = job.reads.popleft()
        number = next(self._numbers)
        # Before the call: whatever it does, the transfer counts as able to write.
        self._tell(job, Opened(number))
        if number not in job.machine.open:
            return  # the lease has just ended
        connection.transfers += 1
        try:
            source = connection.sources[read.source]
            handle = source.agent.read(source.local, read.decode, source.remote, read.prefill)
        except NixlError as error:
            self._failed(number, job, connection, error)
        except BaseException as error:  # noqa: BLE001 - it may have been posted, so it is unseen
            self._lost(job, f"posting failed: {type(error).__name__}: {error}")
        else:
            self._under_way[number] = _UnderWay(job, connection, source, handle)

    def poll(self) -> bool:
        """Look at every transfer under way; returns whether any ended."""
        moved = False
        for number, transfer in list(self._under_way.items()):
            if number not in self._under_way:
                continue  # the agent was destroyed while telling
            job, connection, source = transfer.job, transfer.connection, transfer.source
            try:
                if source.agent.state(transfer.handle) != "DONE":
                    continue
            except NixlError as error:
                del self._under_way[number]
                if not error.flying:
                    _release(transfer)
                self._failed(number, job, connection, error)
            except BaseException as error:  # noqa: BLE001 - nobody knows how it is
                del self._under_way[number]
                self._lost(job, f"polling failed: {type(error).__name__}: {error}")
            else:
                del self._under_way[number]
                _release(transfer)
                source.moved_at = self._clock()
                self._ended(connection)
                self._tell(job, Landed(number))
            moved = True
        return moved

    def _failed(self, number: int, job: Job, connection: Connection, error: NixlError) -> None:
        if error.flying:
            self._lost(job, str(error))
            return
        failure = Failure(Reason.BACKEND_ERROR, f"reading {connection.engine_id}: {error}")
        if error.kind.of_peer:
            self._broken(connection, failure)
        self._ended(connection)
        self._tell(job, Broken(number, failure))

    def _lost(self, job: Job, message: str) -> None:
        self.unseen += 1
        logger.error(
            "request %s: %s; its blocks stay until the agent is rebuilt",
            job.request.request_id,
            message,
        )
        self._tell(job, Failed(Failure(Reason.BACKEND_ERROR, message)))

    def _ended(self, connection: Connection) -> None:
        connection.transfers -= 1
        if connection.broken is not None:
            self._settle(connection)


def _release(transfer: _UnderWay) -> None:
    try:
        transfer.source.agent.release(transfer.handle)
    except NixlError as error:
        logger.warning("a NIXL handle stays until the agent is rebuilt: %s", error)
