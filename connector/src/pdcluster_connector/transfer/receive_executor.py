"""All receives of one worker, from the engine step's request to the report.

``receive_machine.py`` decides what comes next for a receive; this module carries it out.

The way of one receive: ``receive`` starts its machine, which asks for a connection; ``connect``
finds one, or has :class:`Connections` make one; ``_read`` has the reads planned;
``Transfers`` posts and polls them; ``_report`` hands the result over. ``dispatch``
passes events to the machine and carries out its actions.

Everything here runs on the transfer thread. An error of one request fails that request. Any other
error is left to the thread, which destroys the agent and goes on.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import GroupShape
from pdcluster_connector.nixl_io.reading_agent import Connection
from pdcluster_connector.plan import PlanError
from pdcluster_connector.protocol import messages, receive_order
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.transfer import agent_rebuild, posting, receive_machine
from pdcluster_connector.transfer.connections import Connections
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.planned_reads import Job, plan_fence, plan_reads

logger = logging.getLogger(__name__)


class ReceiveExecutor:
    """All receives of one worker.

    Args:
        groups: this engine's KV cache groups.
        connections: to prefill engines, and the reading agent.
        put: has a function called on the transfer thread.

    Attributes:
        jobs: all receives under way, by request id.
        ended: jobs that the engine step takes from here.
        has_ended: set after each of them.
        due: when :meth:`tick` has something to do, at the earliest.
    """

    def __init__(
        self,
        options: ReceiverOptions,
        clock: Callable[[], float],
        groups: Sequence[GroupShape],
        connections: Connections,
        put: Callable[[Callable[[], None]], None],
    ) -> None:
        self.jobs: dict[str, Job] = {}
        self.options = options
        self.clock = clock
        self._groups = groups
        self.due = inf
        self.connections = connections
        self._put = put
        self.transfers = posting.Transfers(self)
        self._agent_rebuild = agent_rebuild.AgentRebuild(self)
        self.ended: deque[Job] = deque()  # thread-safe at both ends
        self.has_ended = threading.Event()

    # Commands.

    def receive(
        self,
        orders: Iterable[tuple[receive_order.ReceiveOrder, float]],
        events: Iterable[tuple[str, receive_machine.Event]] = (),
    ) -> None:
        """Begin receives, each with the end of its lease, and pass on what is known of them."""
        for order, deadline in orders:
            if order.request_id in self.jobs:
                logger.warning("request %s is being received already", order.request_id)
                continue
            machine = receive_machine.Receive(
                order.request_id,
                deadline,
                self.options.drain_deadline_seconds,
                self.options.transfer_stall_seconds,
                order.claimed,
            )
            job = self.jobs[order.request_id] = Job(order, machine)
            connection = self.connections.by_engine.get(order.ticket.engine_id)
            with self.guarded(job):  # the others start all the same
                why = self.connections.probing.over or (connection and connection.stalled)
                self.dispatch(
                    job, receive_machine.Failed(why) if why else receive_machine.Signal.STARTED
                )
        self.pass_on(events)

    def pass_on(self, events: Iterable[tuple[str, receive_machine.Event]]) -> None:
        """Pass events to machines by request id. Requests that have ended already are left out."""
        for request_id, event in events:
            if (job := self.jobs.get(request_id)) is not None:
                self.dispatch(job, event)

    def rebuild(self, failure: Failure, *, final: bool = False) -> None:
        """Destroy the agent, because the thread failed; see ``AgentRebuild.carry_out``."""
        self._agent_rebuild.carry_out(failure, crashed=True, final=final)

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
        if self.connections.closing:
            self._agent_rebuild.look_at_broken(self.options.drain_deadline_seconds)
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

    def dispatch(self, job: Job, event: receive_machine.Event) -> None:
        """Pass an event to the machine of a job, and carry out its actions in order."""
        now = self.clock()
        if now >= job.machine.next_tick and job.machine.open:
            job.machine.queue_moved(self.transfers.queue_moved_at(job))
        for action in job.machine.on(event, now):
            match action:
                case receive_machine.Action.CONNECT:
                    self.connect(job)
                case receive_machine.Action.POST:
                    limit = self.options.descriptors_per_transfer
                    self._read(job, partial(plan_reads, groups=self._groups, limit=limit))
                case receive_machine.Action.FENCE:
                    engine_id = job.request.ticket.engine_id
                    self.connections.rates.landed(engine_id, job.machine, now)
                    self._read(job, partial(plan_fence, words=self.connections.fence_words))
                case receive_machine.Action.DESTROY_AGENT:
                    self._agent_rebuild.ask(job)
                case receive_machine.Action.REPORT:
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
        self.dispatch(job, receive_machine.Failed(failure))

    def connect(self, job: Job) -> None:
        """Find the job's connection, or have one made."""
        job.begin()
        with self.guarded(job):
            if job.request.start >= job.request.stop:
                self.dispatch(job, receive_machine.Signal.CONNECTED)
                return
            connection = self.connections.by_engine.get(job.request.ticket.engine_id)
            ticket = job.request.ticket
            silent = self.connections.peers.silence.is_long((ticket.host, ticket.port))
            if connection is None or connection.broken is not None or self._draining or silent:
                self._shake_hands(job)
            else:
                self._join(job, connection)

    def _shake_hands(self, job: Job) -> None:
        ticket, machine = job.request.ticket, job.machine
        self.connections.peers.connect(
            ticket.engine_id,
            ticket.host,
            ticket.port,
            lambda: machine.deadline,  # the lease is renewed while the peer takes its time
            lambda answer: self._put(partial(self.answered, job, answer)),
            machine.entered.get(receive_machine.State.HANDSHAKE),
        )

    def answered(self, job: Job, answer: messages.EngineMetadata | Failure) -> None:
        """Take in how a handshake ended."""
        if job.machine.state is not receive_machine.State.HANDSHAKE:
            return
        if isinstance(answer, Failure):
            self.dispatch(job, receive_machine.Failed(answer))
            return
        with self.guarded(job):
            if answer.engine_id != job.request.ticket.engine_id:
                message = f"{answer.engine_id} answered for {job.request.ticket.engine_id}"
                self.dispatch(job, receive_machine.Failed(Failure(Reason.PEER_RESTARTED, message)))
            elif self._draining:
                self._agent_rebuild.held.append(partial(self._go_on, job))
            else:
                self._join(job, self.connections.answered(answer))

    def _join(self, job: Job, connection: Connection) -> None:
        """Go on over ``connection``, or wait for it."""
        job.connection, broken = connection, connection.broken
        # After an error of NIXL, a new connection takes its place when its last transfer has ended.
        if broken is not None and broken.reason is not Reason.BACKEND_ERROR:
            self.dispatch(job, receive_machine.Failed(broken))
        elif broken is not None or connection.waiting is not None:
            connection.waiting = [*(connection.waiting or ()), partial(self._go_on, job)]
        else:
            self.dispatch(job, receive_machine.Signal.CONNECTED)

    def _go_on(self, job: Job, failure: Failure | None) -> None:
        """Take in how the wait for a connection has ended."""
        if failure is not None:
            self.dispatch(job, receive_machine.Failed(failure))
        elif job.connection is not None and job.connection.broken is None:
            self.dispatch(job, receive_machine.Signal.CONNECTED)
        elif job.machine.state is receive_machine.State.HANDSHAKE:  # it may have ended meanwhile
            self.connect(job)

    def gone(self, engine_id: str, failure: Failure) -> None:
        """Take in that a peer's incarnation has vanished, or does not answer any more.

        Another incarnation in its place, or a refused connection, proves that it is dead. Without
        proof, what is posted may end well.
        """
        if (connection := self.connections.by_engine.get(engine_id)) is not None:
            self.connections.break_off(connection, failure)
        if failure.dead or failure.reason is Reason.PEER_RESTARTED:
            for job in list(self.jobs.values()):
                if job.request.ticket.engine_id == engine_id:
                    self.dispatch(job, receive_machine.Failed(failure))

    def _read(self, job: Job, plan: Callable[[Job, Connection], Failure | None]) -> None:
        """Plan reads and post them. Only a request that wants nothing needs no connection."""
        request_id, engine_id = job.request.request_id, job.request.ticket.engine_id
        with self.guarded(job):
            failure = None if job.connection is None else plan(job, job.connection)
            if job.connection is None and job.request.start < job.request.stop:
                failure = Failure(Reason.BACKEND_ERROR, "there is no connection to read over")
            if failure is not None:
                self.dispatch(job, receive_machine.Failed(failure))
            elif job.reads:
                if job.machine.state is receive_machine.State.POSTED:
                    self.connections.rates.began(engine_id, request_id, job.nbytes, self.clock())
                self.transfers.add(job)
            else:
                self.dispatch(job, receive_machine.Signal.POSTED)

    def _report(self, job: Job) -> None:
        request_id, engine_id = job.request.request_id, job.request.ticket.engine_id
        self.jobs.pop(request_id, None)
        self.connections.rates.failed(engine_id, request_id, self.clock())
        self.transfers.drop_reads(job)
        job.connection = None
        self.ended.append(job)
        self.has_ended.set()
