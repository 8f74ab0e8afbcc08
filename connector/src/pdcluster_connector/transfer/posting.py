"""The transfers of all receives: posted one after the other, polled, never forgotten.

A transfer leaves in one of three ways: it landed, the transport broke it, or it became
*unseen*: it may still write, but NIXL no longer reports its state. Only destroying the agent
ends an unseen one. Lease words are read by transfers like the others.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Container, Hashable, Iterator
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import OF_PEER, AgentInterface, Handle, NixlError
from pdcluster_connector.nixl_io.reading_agent import Connection, Source
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.transfer import receive_machine
from pdcluster_connector.transfer.planned_reads import Job

if TYPE_CHECKING:
    from pdcluster_connector.transfer.receive_executor import ReceiveExecutor

logger = logging.getLogger(__name__)

POST_SECONDS = 0.002  # posting for longer would leave what has landed unnoticed
LOOKS = 512  # at transfers in one turn; on an H100, one took 1.5 to 2 microseconds [make gpu]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    job: Job
    connection: Connection
    source: Source
    handle: Handle
    word: int | None


class Looks:
    """Which transfers to look at in a turn: ``LOOKS`` at most, each once.

    A link carries transfers one after the other. So half of the looks go to the oldest transfer of
    each link, and to the next one where that has ended. The other half go to all transfers in
    turn, because the oldest may hang. So each of n is looked at once in ``2 * n / LOOKS`` turns.

    ``under_way``: the numbers of transfers that have not ended. It changes during a turn.
    """

    def __init__(self, under_way: Container[int]) -> None:
        self._under_way = under_way
        self._links: OrderedDict[Hashable, deque[int]] = OrderedDict()
        self._all: deque[int] = deque()

    def add(self, number: int, link: Hashable) -> None:
        """Take in a transfer that was posted."""
        self._links.setdefault(link, deque()).append(number)
        self._all.append(number)

    def turn(self) -> Iterator[int]:
        """Return this turn's numbers. Whoever looks says by ``under_way`` which have ended."""
        looked = set[int]()
        links = deque(self._links)
        while links and len(looked) < LOOKS // 2:
            link = links.popleft()
            queue = self._links[link]
            while queue and queue[0] not in self._under_way:
                queue.popleft()
            if not queue:
                del self._links[link]
                continue
            looked.add(queue[0])
            yield queue[0]
            self._links.move_to_end(link)  # the others come first in the next turn
            if queue[0] not in self._under_way:
                links.append(link)
        for _ in range(len(self._all)):
            number = self._all.popleft()
            if number not in self._under_way:
                continue
            self._all.append(number)
            if number not in looked:
                looked.add(number)
                yield number
            if len(looked) >= LOOKS:
                return


class Transfers:
    """Posts and polls for all jobs.

    Attributes:
        unseen: transfers that may still write and that nobody can observe.
    """

    def __init__(self, executor: ReceiveExecutor) -> None:
        self.unseen = 0
        self._executor = executor
        self._numbers = itertools.count()
        self._posting: deque[Job] = deque()
        self._under_way: dict[int, _UnderWay] = {}
        self._looks = Looks(self._under_way)

    def __bool__(self) -> bool:
        """Whether there is anything to post or to poll."""
        return bool(self._posting or self._under_way)

    @property
    def healthy(self) -> bool:
        """Whether something is under way for a receive that has not failed."""
        return bool(self._posting) or any(
            transfer.job.machine.state is not receive_machine.State.QUARANTINE
            for transfer in self._under_way.values()
        )

    def queue_moved_at(self, job: Job) -> float:
        """Return when a transfer last landed from a source that still owes ``job`` one.

        If a later transfer of the same source has landed, the job's does not wait in a queue: it
        does not count.
        """
        sources = (
            self._under_way[number].source
            for number in job.machine.open
            if number in self._under_way and self._under_way[number].source.newest_landed < number
        )
        return max((source.moved_at for source in sources), default=-inf)

    def add(self, job: Job) -> None:
        """Post ``job``'s reads when their turn comes. A fence is one word, and ends a receive."""
        if job.machine.state is receive_machine.State.FENCE:
            self._posting.appendleft(job)
        else:
            self._posting.append(job)

    def clear(self) -> None:
        """Forget everything: the agent is destroyed, so nothing can write any more."""
        for job in self._posting:
            job.reads.clear()
        self._posting.clear()
        self._under_way.clear()
        self._looks = Looks(self._under_way)
        self.unseen = 0

    def post_some(self) -> bool:
        """Post for a while, one read of each job in turn; returns whether there was any."""
        if not self._posting:
            return False
        until = self._executor.clock() + POST_SECONDS
        while self._posting:
            job = self._posting.popleft()
            if not job.machine.posting or job.connection is None:
                self.drop_reads(job)  # it failed meanwhile: none of its other reads follows
                continue
            if job.connection.broken and job.machine.state is receive_machine.State.POSTED:
                self._executor.dispatch(job, receive_machine.Failed(job.connection.broken))
                continue
            self._post(job, job.connection)
            if job.reads:  # also if it has failed: they are dropped
                self.add(job)
            elif job.machine.posting:
                self._executor.dispatch(job, receive_machine.Signal.POSTED)
            if self._executor.clock() >= until:
                break
        return True

    def _post(self, job: Job, connection: Connection) -> None:
        indices = None
        with self._executor.guarded(job):  # nothing is posted yet: its reads are dropped next turn
            indices = job.reads[0].indices()
        if indices is None:
            return
        (theirs, ours), read = indices, job.reads.popleft()
        word = read.word
        number = next(self._numbers)
        # Before the call: whatever it does, the transfer counts as able to write.
        self._executor.dispatch(job, receive_machine.Opened(number))
        if number not in job.machine.open:
            self._give_back(word)
            if word is not None:
                self._ended(connection)
            return  # the lease has just ended
        if word is None:
            connection.transfers += 1
        try:
            source = connection.sources[read.source]
            if word is None:
                local, remote = source.local, source.remote
            else:
                local, remote = source.local_words, source.remote_words
            handle = source.agent.read(local, ours, remote, theirs)
        except NixlError as error:
            if not error.flying:
                self._give_back(word)
            self._failed(number, job, connection, error)
        except BaseException as error:  # noqa: BLE001 - it may have been posted, so it is unseen
            self._lost(job, f"posting failed: {type(error).__name__}: {error}")
        else:
            self._under_way[number] = _UnderWay(job, connection, source, handle, word)
            self._looks.add(number, (source, word is None))  # lease words overtake KV
            source.under_way += 1

    def poll(self) -> bool:
        """Look at transfers under way, as many as one turn has time for; whether any ended."""
        moved = False
        for number in self._looks.turn():
            transfer = self._under_way[number]
            job, connection, source = transfer.job, transfer.connection, transfer.source
            try:
                if source.agent.state(transfer.handle) != "DONE":
                    continue
            except NixlError as error:
                self._take_away(number)
                if not error.flying:
                    release(source.agent, transfer.handle)
                    self._give_back(transfer.word)
                self._failed(number, job, connection, error)
            except BaseException as error:  # noqa: BLE001 - its state is unknown
                self._take_away(number)
                self._lost(job, f"polling failed: {type(error).__name__}: {error}")
            else:
                self._take_away(number)
                release(source.agent, transfer.handle)
                source.moved_at = self._executor.clock()
                if transfer.word is None:  # lease words are small and come first anyway
                    source.newest_landed = max(source.newest_landed, number)
                self._executor.dispatch(job, self._landed(number, transfer))
                self._ended(connection)  # after its fence was planned
            moved = True
        return moved

    def _take_away(self, number: int) -> None:
        self._under_way.pop(number).source.under_way -= 1

    def _landed(
        self, number: int, transfer: _UnderWay
    ) -> receive_machine.Landed | receive_machine.Broken:
        """Judge a transfer that has landed.

        Any data is accepted. A lease word is accepted only if it is the ticket's token.
        """
        if transfer.word is None:
            return receive_machine.Landed(number)
        word = self._executor.connections.fence_words.read(transfer.word)
        self._give_back(transfer.word)
        ticket = transfer.job.request.ticket
        if word == ticket.token:
            return receive_machine.Landed(number)
        message = (
            f"lease word {ticket.fence_slot} of rank {transfer.source.rank} of {ticket.engine_id}"
            " is no longer the ticket's: the blocks were given up while they were read"
        )
        return receive_machine.Broken(number, Failure(Reason.LEASE_LOST, message))

    def drop_reads(self, job: Job) -> None:
        """Forget reads of a job that were never posted."""
        for read in job.reads:
            self._give_back(read.word)
            if read.word is not None and job.connection is not None:
                self._ended(job.connection)
        job.reads.clear()

    def _give_back(self, word: int | None) -> None:
        if word is not None:
            self._executor.connections.fence_words.give_back(word)

    def _failed(self, number: int, job: Job, connection: Connection, error: NixlError) -> None:
        if error.flying:
            self._lost(job, str(error))
            return
        failure = Failure(Reason.BACKEND_ERROR, f"reading {connection.engine_id}: {error}")
        if error.kind in OF_PEER:
            self._executor.connections.broken(connection, failure)
        self._ended(connection)
        self._executor.dispatch(job, receive_machine.Broken(number, failure))

    def _lost(self, job: Job, message: str) -> None:
        self.unseen += 1
        what_follows = "request %s: %s; its blocks stay until the agent is rebuilt"
        logger.error(what_follows, job.request.request_id, message)
        self._executor.dispatch(job, receive_machine.Failed(Failure(Reason.BACKEND_ERROR, message)))

    def _ended(self, connection: Connection) -> None:
        connection.transfers -= 1
        if connection.broken is not None:
            self._executor.connections.settle(connection)


def release(agent: AgentInterface, handle: Handle) -> None:
    """Free the handle of a transfer that has ended. Does not raise."""
    try:
        agent.release(handle)
    except NixlError as error:
        logger.warning("a NIXL handle stays until the agent is rebuilt: %s", error)
