"""All receives of one worker, from the engine step's request to the report.

``transfer/receive.py`` decides what comes next for a receive; this module carries it out.

The way of one receive: :meth:`Receives.receive` starts its machine, which asks for a connection;
``connect`` finds one, or has :class:`Connections` make one; ``_prepare`` has the reads planned;
:class:`Transfers` posts and polls them; ``_report`` hands the result over. ``dispatch``
passes events to the machine and carries out its actions.

Everything here runs on the transfer thread. An error of one request fails that request. Any other
error is left to the thread, which destroys the agent and goes on.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Self

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.reading_agent import Connection
from pdcluster_connector.plan import PlanError
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.transfer.agent_rebuild import AgentRebuild
from pdcluster_connector.transfer.connections import Connections
from pdcluster_connector.transfer.job import (
    Job,
    ReceiveRequest,
    ReceiverOptions,
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
    State,
)
from pdcluster_connector.transfer.transfers import Transfers

logger = logging.getLogger(__name__)


class Receives:
    """All receives of one worker.

    Args:
        make_connections: makes the connections of these receives.

    Attributes:
        jobs: all receives under way, by request id.
        connections: to prefill engines, and the reading agent.
        ended: jobs that the engine step takes from here.
        due: when :meth:`tick` has something to do, at the earliest.
    """

    def __init__(
        self,
        options: ReceiverOptions,
        clock: Callable[[], float],
        make_connections: Callable[[Self], Connections],
    ) -> None:
        self.jobs: dict[str, Job] = {}
        self.options = options
        self.clock = clock
        self.due = inf
        self.connections = make_connections(self)
        self.transfers = Transfers(self)
        self._agent_rebuild = AgentRebuild(self)
        self.ended: deque[Job] = deque()  # thread-safe at both ends

    # Commands.

    def receive(
        self,
        requests: Iterable[ReceiveRequest],
        renewed: Mapping[str, float] | None = None,
        lost: Mapping[str, Failure] | None = None,
    ) -> None:
        """Take requests over from the engine step, with what is known of their leases already."""
        for request in requests:
            if request.request_id in self.jobs:
                logger.warning("request %s is being received already", request.request_id)
                continue
            machine = Receive(
                request.request_id,
                request.deadline,
                self.options.drain_deadline_seconds,
                self.options.transfer_stall_seconds,
                request.claimed,
            )
            job = self.jobs[request.request_id] = Job(request, machine)
            with self.guarded(job):  # the others start all the same
                if self._agent_rebuild.over is not None:
                    self.dispatch(job, Failed(self._agent_rebuild.over))
                elif len(self.jobs) > self.options.max_requests:
                    message = f"{self.options.max_requests} receives are under way already"
                    self.dispatch(job, Failed(Failure(Reason.BACKEND_ERROR, message)))
                else:
                    self.dispatch(job, Signal.STARTED)
        self.acknowledge(renewed or {})
        self.refuse(lost or {})

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
        self._agent_rebuild.carry_out(failure, crashed=True, final=final)

    def _dispatch_each(self, events: Iterable[tuple[str, Event]]) -> None:
        """Pass events to machines by request id. Requests that have ended already are left out."""
        for request_id, event in events:
            if (job := self.jobs.get(request_id)) is not None:
                self.dispatch(job, event)

    # Turns of the transfer thread.

    def tick(self) -> None:
        """Let time pass for the receives whose deadlines have come."""
        now = self.clock()
        if now < self.due:
            return
        for job in list(self.jobs.values()):
            if job.due <= now:
                self.dispatch(job, job.tick)
        self.due = min((job.due for job in self.jobs.values()), default=inf)

    def turn(self) -> bool:
        """Post and poll; returns whether anything moved."""
        moved = self.transfers.post_some()
        moved = self.transfers.poll() or moved
        if self._probing:
            moved = self.connections.probing.step() or moved
            self._agent_rebuild.look_at_probes(self.options.drain_deadline_seconds)
        if self._draining:
            moved = self._agent_rebuild.carry_out_if_due() or moved
        return moved

    @property
    def busy(self) -> bool:
        """Whether turns are needed before the next tick."""
        return bool(self.transfers) or self._probing or self._draining

    @property
    def _probing(self) -> bool:
        return bool(self.connections.probing.runs or self.connections.probing.waiting)

    @property
    def _draining(self) -> bool:
        """Whether the agent is to be destroyed soon, so that nothing new begins on it."""
        rebuild = self._agent_rebuild
        return rebuild.by is not None or rebuild.renew_by is not None or self.transfers.unseen > 0

    # One receive, in the order of its way.

    def dispatch(self, job: Job, event: Event) -> None:
        """Pass an event to the machine of a job, and carry out its actions in order."""
        now = self.clock()
        if now >= job.machine.next_tick and job.machine.open:
            job.machine.queue_moved(self.transfers.queue_moved_at(job))
        for action in job.machine.on(event, now):
            match action:
                case Action.CONNECT:
                    self.connect(job)
                case Action.POST:
                    self._prepare(job)
                case Action.FENCE:
                    self._fence(job)
                case Action.DESTROY_AGENT:
                    self._agent_rebuild.ask(job)
                case Action.REPORT:
                    self._report(job)
        self.due = min(self.due, job.due)

    @contextmanager
    def guarded(self, job: Job) -> Iterator[None]:
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
        self.dispatch(job, Failed(failure))

    def connect(self, job: Job) -> None:
        """Find the job's connection, or have one made."""
        job.begin()
        with self.guarded(job):
            if job.request.start >= job.request.stop:
                self.dispatch(job, Signal.CONNECTED)
                return
            connection = self.connections.by_engine.get(job.request.ticket.engine_id)
            ticket = job.request.ticket
            began = job.machine.entered[State.HANDSHAKE]
            if connection and connection.stalled and began >= connection.stalled_at:
                self.dispatch(job, Failed(connection.stalled))
                return
            silent = self.connections.peers.silence.is_long((ticket.host, ticket.port))
            if connection is None or connection.broken is not None or self._draining or silent:
                self.connections.shake_hands(job)
            elif connection.waiting is not None:
                self.connections.join(job, connection)
            else:
                job.connection = connection
                self.dispatch(job, Signal.CONNECTED)

    def hold(self, job: Job) -> bool:
        """Keep a job for the next agent if this one is about to be destroyed."""
        if self._draining:
            self._agent_rebuild.held.append(job)
        return self._draining

    def _prepare(self, job: Job) -> None:
        self._read(job, partial(plan_reads, job, limit=self.options.descriptors_per_transfer))

    def _fence(self, job: Job) -> None:
        self._read(job, partial(plan_fence, job, words=self.connections.fence_words))

    def _read(self, job: Job, plan: Callable[[Connection], Failure | None]) -> None:
        """Plan reads and post them. Only a request that wants nothing needs no connection."""
        with self.guarded(job):
            failure = None if job.connection is None else plan(job.connection)
            if job.connection is None and job.request.start < job.request.stop:
                failure = Failure(Reason.BACKEND_ERROR, "there is no connection to read over")
            if failure is not None:
                self.dispatch(job, Failed(failure))
            elif job.reads:
                self.transfers.add(job)
            else:
                self.dispatch(job, Signal.POSTED)

    def _report(self, job: Job) -> None:
        self.jobs.pop(job.request.request_id, None)
        self.transfers.drop_reads(job)
        job.connection = None
        self.ended.append(job)
