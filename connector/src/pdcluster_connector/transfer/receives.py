"""All receives of one worker, from the engine step's request to the report.

``transfer/receive.py`` decides what comes next for a receive; this module carries it out.

The way of one receive: :meth:`Receives.receive` starts its machine, which asks for a connection;
``_connect`` finds one, or has :class:`Connections` make one; ``_prepare`` has the reads planned;
:class:`Transfers` posts and polls them; ``_report`` hands the result over. ``_dispatch``
passes events to the machine and carries out its actions.

Everything here runs on the transfer thread. An error of one request fails that request. Any other
error is left to the thread, which destroys the agent and goes on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import AgentInterface, MemoryRange
from pdcluster_connector.nixl_io.reading_agent import Connection
from pdcluster_connector.plan.geometry import Shard
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.sidechannel.peers import PeerBook
from pdcluster_connector.transfer.agent_rebuild import AgentRebuild
from pdcluster_connector.transfer.connections import Answer, Connections
from pdcluster_connector.transfer.job import (
    Job,
    ReceiveRequest,
    ReceiverOptions,
    guarded,
    plan_fence,
    plan_reads,
)
from pdcluster_connector.transfer.receive import (
    Acknowledged,
    Action,
    Event,
    Failed,
    Receive,
    Signal,
)
from pdcluster_connector.transfer.transfers import Transfers

logger = logging.getLogger(__name__)


class Receives:
    """All receives of one worker.

    Args:
        shard, memory, make_agent, peers, answer: those of :class:`Connections`.
        ended: where ended jobs go; the engine step takes them from there.

    Attributes:
        connections: to prefill engines, and the reading agent.
        due: when :meth:`tick` has something to do, at the earliest.
    """

    def __init__(
        self,
        shard: Shard,
        memory: Sequence[MemoryRange],
        make_agent: Callable[[], AgentInterface],
        peers: PeerBook,
        ended: deque[Job],
        options: ReceiverOptions,
        *,
        clock: Callable[[], float],
        answer: Answer,
    ) -> None:
        self._jobs: dict[str, Job] = {}
        self.connections = connections = Connections(
            shard,
            memory,
            make_agent,
            peers,
            self._jobs,
            options,
            clock=clock,
            dispatch=self._dispatch,
            connect=self._connect,
            hold=self._hold,
            answer=answer,
        )
        self._transfers = Transfers(
            connections.fence_words,
            dispatch=self._dispatch,
            broken=connections.broken,
            settle=connections.settle,
            clock=clock,
        )
        self._ended = ended
        self._options = options
        self._drain_seconds = options.drain_deadline_seconds
        self._clock = clock
        self.due = inf
        self._rebuild = AgentRebuild(
            self.connections,
            self._transfers,
            self._jobs,
            dispatch=self._dispatch,
            connect=self._connect,
            fatal=options.fatal,
            stall_seconds=options.transfer_stall_seconds,
            clock=clock,
        )

    # Commands.

    def receive(self, requests: Iterable[ReceiveRequest]) -> None:
        """Take requests over from the engine step."""
        for request in requests:
            if request.request_id in self._jobs:
                logger.warning("request %s is being received already", request.request_id)
                continue
            limits = (self._drain_seconds, self._options.transfer_stall_seconds)
            machine = Receive(request.request_id, request.deadline, *limits, request.claimed)
            job = self._jobs[request.request_id] = Job(request, machine)
            if self._rebuild.over is not None:
                self._dispatch(job, Failed(self._rebuild.over))
            elif len(self._jobs) > self._options.max_requests:
                message = f"{self._options.max_requests} receives are under way already"
                self._dispatch(job, Failed(Failure(Reason.BACKEND_ERROR, message)))
            else:
                self._dispatch(job, Signal.STARTED)

    def abandon(self, request_ids: Iterable[str]) -> None:
        """Give requests up."""
        self._dispatch_each((request_id, Signal.ABANDONED) for request_id in request_ids)

    def acknowledge(self, until: Mapping[str, float]) -> None:
        """Take in until when prefill has promised to hold the KV of requests."""
        self._dispatch_each((request_id, Acknowledged(end)) for request_id, end in until.items())

    def refuse(self, failures: Mapping[str, Failure]) -> None:
        """Take in which requests have no lease any more, and why."""
        self._dispatch_each((request_id, Failed(why)) for request_id, why in failures.items())

    def rebuild(self, failure: Failure, *, final: bool = False) -> None:
        """Destroy the agent, because the thread failed; see :meth:`AgentRebuild.carry_out`."""
        self._rebuild.carry_out(failure, crashed=True, final=final)

    def _dispatch_each(self, events: Iterable[tuple[str, Event]]) -> None:
        """Pass events to machines by request id. Requests that have ended already are left out."""
        for request_id, event in events:
            if (job := self._jobs.get(request_id)) is not None:
                self._dispatch(job, event)

    # Turns of the transfer thread.

    def tick(self) -> None:
        """Let time pass for the receives whose deadlines have come."""
        now = self._clock()
        if now < self.due:
            return
        for job in list(self._jobs.values()):
            if job.due <= now:
                self._dispatch(job, Signal.TICK)
        self.due = min((job.due for job in self._jobs.values()), default=inf)

    def turn(self) -> bool:
        """Post and poll; returns whether anything moved."""
        moved = self._transfers.post_some()
        moved = self._transfers.poll() or moved
        if self._probing:
            moved = self.connections.step() or moved
            self._rebuild.look_at_probes(self._drain_seconds)
        if self._draining:
            moved = self._rebuild.carry_out_if_due() or moved
        return moved

    @property
    def busy(self) -> bool:
        """Whether turns are needed before the next tick."""
        return bool(self._transfers) or self._probing or self._draining

    @property
    def _probing(self) -> bool:
        return bool(self.connections.runs or self.connections.probes)

    @property
    def _draining(self) -> bool:
        """Whether the agent is to be destroyed soon, so that nothing new begins on it."""
        rebuild = self._rebuild
        return rebuild.by is not None or rebuild.renew_by is not None or self._transfers.unseen > 0

    # One receive, in the order of its way.

    def _dispatch(self, job: Job, event: Event) -> None:
        """Pass an event to the machine of a job, and carry out its actions in order."""
        now = self._clock()
        if now >= job.machine.next_tick and job.machine.open:
            job.machine.queue_moved(self._transfers.queue_moved_at(job))
        for action in job.machine.on(event, now):
            match action:
                case Action.CONNECT:
                    self._connect(job)
                case Action.POST:
                    self._prepare(job)
                case Action.FENCE:
                    self._fence(job)
                case Action.DESTROY_AGENT:
                    self._rebuild.ask(job)
                case Action.REPORT:
                    self._report(job)
        self.due = min(self.due, job.due)

    def _connect(self, job: Job) -> None:
        job.begin()
        with guarded(job, self._dispatch):
            if job.request.start >= job.request.stop:
                self._dispatch(job, Signal.CONNECTED)
                return
            connection = self.connections.by_engine.get(job.request.ticket.engine_id)
            if connection is None or connection.broken is not None or self._draining:
                self.connections.shake_hands(job)
            elif connection.waiting is not None:
                self.connections.join(job, connection)
            else:
                job.connection = connection
                self._dispatch(job, Signal.CONNECTED)

    def _hold(self, job: Job) -> bool:
        """Keep a job for the next agent if this one is about to be destroyed."""
        if self._draining:
            self._rebuild.held.append(job)
        return self._draining

    def _prepare(self, job: Job) -> None:
        self._read(job, partial(plan_reads, job, limit=self._options.descriptors_per_transfer))

    def _fence(self, job: Job) -> None:
        self._read(job, partial(plan_fence, job, words=self.connections.fence_words))

    def _read(self, job: Job, plan: Callable[[Connection], Failure | None]) -> None:
        """Plan reads and post them. Without a connection there is nothing to read."""
        with guarded(job, self._dispatch):
            failure = None if job.connection is None else plan(job.connection)
            if failure is not None:
                self._dispatch(job, Failed(failure))
            elif job.reads:
                self._transfers.add(job)
            else:
                self._dispatch(job, Signal.POSTED)

    def _report(self, job: Job) -> None:
        self._jobs.pop(job.request.request_id, None)
        self._transfers.drop_reads(job)
        job.connection = None
        self._ended.append(job)
