"""All receives of one worker, from the engine step's request to the report.

The way of one receive: :meth:`Receives.receive` starts its machine, which asks for a connection;
``_connect`` finds or makes one; ``_prepare`` has the reads planned; :class:`Transfers` posts and
polls them; ``_report`` hands the result over. The machine decides what comes next
(:mod:`pdcluster_connector.protocol.receive`); ``_tell`` carries it out.

Everything here runs on the transfer thread. A cause that belongs to one request fails that
request; what belongs to none is left to the thread, which destroys the agent and goes on.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.reading_agent import Connection
from pdcluster_connector.plan.errors import PlanError
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.protocol.receive import Receive
from pdcluster_connector.protocol.receive_events import (
    Abandoned,
    Acknowledged,
    Action,
    Connected,
    Event,
    Failed,
    Posted,
    Started,
    State,
    Tick,
)
from pdcluster_connector.sidechannel.peer_source import PeerSource
from pdcluster_connector.transfer.agent_rebuild import AgentRebuild
from pdcluster_connector.transfer.connections import Closed, Connections, Warmed
from pdcluster_connector.transfer.handover import ReceiveRequest, ReceiverOptions
from pdcluster_connector.transfer.reads import Job, plan_fence, plan_reads
from pdcluster_connector.transfer.transfer_thread import Timers
from pdcluster_connector.transfer.transfers import Transfers

logger = logging.getLogger(__name__)

HANDSHAKE_GRACE_SECONDS = 0.25  # the peer source knows better than the clock why it failed

Answer = Callable[[int, EngineMetadata | Failure], None]


class Receives:
    """All receives of one worker.

    Args:
        make_connections: makes the connections, given who hears of warm-ups and of ends.
        peers: where handshakes come from.
        ended: where ended jobs go; the engine step takes them from there.
        timers: of the transfer thread; they call :meth:`time_is_up`.
        answer: takes a handshake's answer for one job to the transfer thread's queue.
    """

    def __init__(
        self,
        make_connections: Callable[[Warmed, Closed], Connections],
        peers: PeerSource,
        ended: deque[Job],
        options: ReceiverOptions,
        timers: Timers,
        *,
        clock: Callable[[], float],
        answer: Answer,
    ) -> None:
        self._connections = make_connections(self._warmed, self._closed)
        self._transfers = Transfers(
            self._connections.scratch,
            tell=self._tell,
            broken=self._broken,
            settle=self._connections.settle,
            clock=clock,
        )
        self._peers = peers
        self._ended = ended
        self._options = options
        self._drain_seconds = options.drain_deadline_seconds
        self._timers = timers
        self._clock = clock
        self._answer = answer
        self._serials = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._by_id: dict[str, int] = {}
        self._rebuild = AgentRebuild(
            self._connections,
            self._transfers,
            tell=self._tell,
            connect=self._connect,
            fatal=options.fatal,
            clock=clock,
        )
        self._over: Failure | None = None

    # Commands.

    def receive(self, requests: Iterable[ReceiveRequest]) -> None:
        """Take requests over from the engine step."""
        for request in requests:
            if request.request_id in self._by_id:
                logger.warning("request %s is being received already", request.request_id)
                continue
            machine = Receive(
                request.request_id, request.deadline, self._drain_seconds, request.claimed
            )
            job = Job(next(self._serials), request, machine)
            self._jobs[job.serial] = job
            self._by_id[request.request_id] = job.serial
            if self._over is not None:
                self._tell(job, Failed(self._over))
            elif len(self._jobs) > self._options.max_requests:
                message = f"{self._options.max_requests} receives are under way already"
                self._tell(job, Failed(Failure(Reason.BACKEND_ERROR, message)))
            else:
                self._tell(job, Started())

    def abandon(self, request_ids: Iterable[str]) -> None:
        """Give requests up."""
        self._tell_each((request_id, Abandoned()) for request_id in request_ids)

    def acknowledge(self, until: Mapping[str, float]) -> None:
        """Take in until when prefill has promised to hold the KV of requests."""
        self._tell_each((request_id, Acknowledged(end)) for request_id, end in until.items())

    def refuse(self, failures: Mapping[str, Failure]) -> None:
        """Take in which requests have no lease any more, and why."""
        self._tell_each((request_id, Failed(why)) for request_id, why in failures.items())

    def _tell_each(self, events: Iterable[tuple[str, Event]]) -> None:
        """Tell machines by request id; those that have ended already are none of ours any more."""
        for request_id, event in events:
            serial = self._by_id.get(request_id)
            if serial is not None:
                self._tell(self._jobs[serial], event)

    def answered(self, serial: int, answer: EngineMetadata | Failure) -> None:
        """Take in how a handshake ended."""
        job = self._jobs.get(serial)
        if job is None or job.machine.state is not State.HANDSHAKE:
            return
        if isinstance(answer, Failure):
            self._tell(job, Failed(answer))
            return
        with self._guarded(job):
            if answer.engine_id != job.request.ticket.engine_id:
                message = f"{answer.engine_id} answered for {job.request.ticket.engine_id}"
                self._tell(job, Failed(Failure(Reason.PEER_RESTARTED, message)))
            elif self._draining:
                self._rebuild.held.append(job)
            else:
                self._join(job, self._connections.open(answer))

    def gone(self, engine_id: str, failure: Failure) -> None:
        """Take in that a peer's incarnation has vanished, or does not answer any more.

        Only another incarnation in its place proves that it is dead: until then what is
        posted may end well.
        """
        connection = self._connections.by_engine.get(engine_id)
        if connection is not None:
            self._connections.break_off(connection, failure)
        dead = failure.reason is Reason.PEER_RESTARTED
        for job in list(self._jobs.values()):
            posting = job.machine.may_post and job.machine.state is State.POSTED
            if job.request.ticket.engine_id == engine_id and (dead or posting):
                self._tell(job, Failed(failure))

    def time_is_up(self, serial: int) -> None:
        """Take in that a job's timer has run out."""
        job = self._jobs.get(serial)
        if job is not None:
            self._tell(job, Tick())

    # Turns of the transfer thread.

    def turn(self) -> bool:
        """Post and poll; returns whether anything moved."""
        moved = self._transfers.post_some()
        moved = self._transfers.poll() or moved
        if self._probing:
            moved = self._connections.step() or moved
            self._rebuild.look_at_probes(self._drain_seconds)
        if self._draining and self._rebuild.is_due():
            self.rebuild(
                Failure(
                    Reason.BACKEND_ERROR,
                    "the reading agent was rebuilt to stop a transfer that hung",
                )
            )
            moved = True
        return moved

    @property
    def busy(self) -> bool:
        """Whether turns are needed before the next tick."""
        return bool(self._transfers) or self._probing or self._draining

    @property
    def _probing(self) -> bool:
        return bool(self._connections.runs or self._connections.probes)

    @property
    def _draining(self) -> bool:
        """Whether the agent is to be destroyed as soon as what is healthy has landed."""
        rebuild = self._rebuild
        return rebuild.by is not None or rebuild.renew or self._transfers.unseen > 0

    def rebuild(self, failure: Failure, *, final: bool = False) -> None:
        """Destroy the agent; healthy receives that ran on it begin again over a new one.

        ``final`` fails everything instead, now and from now on.
        """
        if final:
            self._over = failure
        self._rebuild.carry_out(failure, self._jobs, final=final)

    # One receive, in the order of its way.

    def _tell(self, job: Job, event: Event) -> None:
        """Tell a machine what happened, and carry out what it decides."""
        for action in job.machine.on(event, self._clock()):
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
        self._schedule(job)

    def _connect(self, job: Job) -> None:
        ticket = job.request.ticket
        job.begin()
        with self._guarded(job):
            if job.request.start >= job.request.stop:
                self._tell(job, Connected())
                return
            connection = self._connections.by_engine.get(ticket.engine_id)
            if connection is not None and connection.broken is None and not self._draining:
                self._join(job, connection)
                return
            host, port = ticket.side_channel
            serial, answer = job.serial, self._answer
            self._peers.connect(
                ticket.engine_id,
                host,
                port,
                job.machine.deadline,
                lambda result: answer(serial, result),
            )

    def _join(self, job: Job, connection: Connection) -> None:
        """Go on over ``connection``, or wait for it."""
        job.connection = connection
        if connection.broken is not None and not connection.closing:
            self._tell(job, Failed(connection.broken))
        elif connection.broken is not None or connection.waiting is not None:
            connection.waiting = [*(connection.waiting or ()), job.serial]
        else:
            self._tell(job, Connected())

    def _prepare(self, job: Job) -> None:
        with self._guarded(job):
            failure = None
            if job.connection is not None:
                limit = self._options.descriptors_per_transfer
                failure = plan_reads(job, job.connection, limit)
            self._post(job, failure)

    def _fence(self, job: Job) -> None:
        with self._guarded(job):
            failure = None
            if job.connection is not None:
                failure = plan_fence(job, job.connection, self._connections.scratch)
            self._post(job, failure)

    def _post(self, job: Job, failure: Failure | None) -> None:
        """Post what was planned, if planning went well."""
        if failure is not None:
            self._tell(job, Failed(failure))
        elif job.reads:
            self._transfers.add(job)
        else:
            self._tell(job, Posted())

    def _report(self, job: Job) -> None:
        self._jobs.pop(job.serial, None)
        self._by_id.pop(job.request.request_id, None)
        self._transfers.drop_reads(job)
        job.connection = None
        self._ended.append(job)

    @contextmanager
    def _guarded(self, job: Job) -> Iterator[None]:
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
        self._tell(job, Failed(failure))

    # What connections and time have to say.

    def _warmed(self, connection: Connection, failure: Failure | None) -> None:
        """Let those go on that waited for a warm-up, or fail them with it."""
        if failure is not None:
            logger.warning("the connection to %s failed: %s", connection.engine_id, failure)
            self._peers.forget(connection.engine_id, failure)
        for serial in connection.waiting or ():
            job = self._jobs.get(serial)
            if job is not None:
                self._tell(job, Connected() if failure is None else Failed(failure))

    def _closed(self, connection: Connection) -> None:
        """Let those connect anew that waited for a broken connection to close."""
        waiting, connection.waiting = connection.waiting or (), None
        for serial in waiting:
            job = self._jobs.get(serial)
            if job is not None:
                self._connect(job)

    def _broken(self, connection: Connection, failure: Failure) -> None:
        self._connections.break_off(connection, failure)
        self._peers.forget(connection.engine_id, failure)

    def _schedule(self, job: Job) -> None:
        at = job.machine.next_tick
        if job.machine.state is State.HANDSHAKE:
            at += HANDSHAKE_GRACE_SECONDS
        self._timers.set(job.serial, at)
