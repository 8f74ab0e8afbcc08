"""Carries out what the receive machines decide: connects, posts, polls, reports.

Everything here runs on the transfer thread. A cause that belongs to one request fails that
request; what belongs to none is left to the thread, which destroys the agent and goes on.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import AgentSurvivedError, NixlError
from pdcluster_connector.nixl_io.probe import ProbeResult
from pdcluster_connector.nixl_io.reading_agent import Link
from pdcluster_connector.plan.transfer import PlanError
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.protocol.receive import (
    Abandoned,
    Action,
    AgentDestroyed,
    Connected,
    Event,
    Failed,
    Posted,
    Receive,
    Started,
    State,
    Tick,
)
from pdcluster_connector.sidechannel.peer_source import PeerSource
from pdcluster_connector.transfer.connections import Closed, Links, Warmed
from pdcluster_connector.transfer.receive_job import (
    Job,
    ReceiveRequest,
    ReceiverOptions,
    plan_pieces,
)
from pdcluster_connector.transfer.results import Outbox
from pdcluster_connector.transfer.ticks import Ticks
from pdcluster_connector.transfer.transfers import Flights

logger = logging.getLogger(__name__)

HANDSHAKE_GRACE_SECONDS = 0.25  # the peer source knows better than the clock why it failed

Answer = Callable[[int, EngineMetadata | Failure], None]


class ReceiveExecutor:
    """All receives of one worker.

    Args:
        make_links: makes the links over the reading agent, given who hears of warm-ups and ends.
        peers: where handshakes come from.
        answer: takes a handshake's answer for one job to the transfer thread's queue.
        outbox: where ended requests go.
    """

    def __init__(
        self,
        make_links: Callable[[Warmed, Closed], Links],
        peers: PeerSource,
        outbox: Outbox,
        options: ReceiverOptions,
        *,
        clock: Callable[[], float],
        answer: Answer,
    ) -> None:
        self._links = make_links(self._warmed, self._link_closed)
        self._flights = Flights(self._links, self._tell, self._link_broken, clock)
        self._peers = peers
        self._outbox = outbox
        self._options = options
        self._clock = clock
        self._answer = answer
        self._serials = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._by_id: dict[str, int] = {}
        self._held: list[Job] = []
        self._ticks = Ticks()
        self._destroy = False
        self._renew = False
        self._closed: Failure | None = None

    # Commands.

    def receive(self, requests: Iterable[ReceiveRequest]) -> None:
        """Take requests over from the engine step."""
        for request in requests:
            if self._closed is not None:
                self._outbox.fail(request.request_id, self._closed)
                continue
            if request.request_id in self._by_id:
                logger.warning("request %s is being received already", request.request_id)
                continue
            machine = Receive(
                request.request_id, request.deadline, self._options.drain_deadline_seconds
            )
            job = Job(next(self._serials), request, machine)
            self._jobs[job.serial] = job
            self._by_id[request.request_id] = job.serial
            if len(self._jobs) > self._options.max_requests:
                message = f"{self._options.max_requests} receives are under way already"
                self._tell(job, Failed(Failure(Reason.BACKEND_ERROR, message)))
            else:
                self._tell(job, Started())

    def abandon(self, request_ids: Iterable[str]) -> None:
        """Give requests up; those that have ended already are none of ours any more."""
        for request_id in request_ids:
            serial = self._by_id.get(request_id)
            if serial is not None:
                self._tell(self._jobs[serial], Abandoned())

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
                self._held.append(job)
            else:
                self._join(job, self._links.open(answer))

    def gone(self, engine_id: str, failure: Failure) -> None:
        """Take in that a peer's incarnation has vanished, or does not answer any more.

        Only another incarnation in its place proves that it is dead: until then what is
        posted may end well.
        """
        link = self._links.get(engine_id)
        if link is not None:
            self._links.break_link(link, failure)
        dead = failure.reason is Reason.PEER_RESTARTED
        for job in list(self._jobs.values()):
            if job.request.ticket.engine_id == engine_id and (dead or job.machine.may_post):
                self._tell(job, Failed(failure))

    def probe(
        self, metadata: EngineMetadata, future: Future[ProbeResult], *, check: bool = False
    ) -> None:
        """Read a peer's probe regions; ``check``: only see whether data still comes through."""
        if self._closed is not None:
            future.set_result(ProbeResult(metadata.engine_id, (), self._closed))
        elif check:
            self._links.check(metadata, future)
        else:
            self._links.probe(metadata, future)

    # Turns.

    def turn(self) -> bool:
        """Post, poll and let time pass; returns whether anything moved."""
        moved = self._flights.post_some()
        moved = self._flights.poll() or moved
        if self._links.busy:
            moved = self._links.step() or moved
        self._let_time_pass()
        if self._destroy or (self._draining and not self._flights):
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
        return bool(self._flights) or self._links.busy or self._draining

    @property
    def next_tick(self) -> float:
        """When the next receive's time is up (clock of the constructor)."""
        return self._ticks.next

    @property
    def _draining(self) -> bool:
        """Whether the agent is to be destroyed as soon as what is healthy has landed."""
        return self._destroy or self._renew or self._flights.unseen > 0

    def rebuild(self, failure: Failure, *, final: bool = False) -> None:
        """Destroy the agent and fail what ran on it; its peers connect anew when needed.

        ``final`` fails everything else too, now and from now on.
        """
        self._destroy = self._renew = False
        if final:
            self._closed = failure
        writing = any(job.machine.open for job in self._jobs.values())
        try:
            cut = self._links.destroy_agent(failure, writing=writing, final=final)
        except AgentSurvivedError as error:
            self._flights.unseen = 0
            self._options.fatal(str(error))
            return
        self._flights.clear()
        again = [self._jobs[serial] for link in cut for serial in link.waiting or ()]
        again, self._held = again + self._held, []
        for job in list(self._jobs.values()):
            if final:
                self._tell(job, Failed(failure))
            self._tell(job, AgentDestroyed(failure))
        for job in again:
            if job.machine.state is State.HANDSHAKE:
                self._connect(job)
        if not final:
            with suppress(NixlError):  # the next request tries again, and tells
                _ = self._links.agent

    # One job.

    def _tell(self, job: Job, event: Event) -> None:
        for action in job.machine.on(event, self._clock()):
            match action:
                case Action.CONNECT:
                    self._connect(job)
                case Action.POST:
                    self._prepare(job)
                case Action.DESTROY_AGENT:
                    logger.error(
                        "request %s still has transfers under way %.1f s after it failed (%s):"
                        " the reading agent is rebuilt",
                        job.request.request_id,
                        self._options.drain_deadline_seconds,
                        job.machine.failure,
                    )
                    self._destroy = True
                case Action.REPORT:
                    self._report(job)
        self._schedule(job)

    def _connect(self, job: Job) -> None:
        ticket = job.request.ticket
        with self._guarded(job):
            if job.request.start >= job.request.stop:
                self._tell(job, Connected())
                return
            link = self._links.get(ticket.engine_id)
            if link is not None and link.broken is None and not self._draining:
                self._join(job, link)
                return
            host, port = ticket.side_channel
            serial, answer = job.serial, self._answer
            self._peers.connect(
                ticket.engine_id,
                host,
                port,
                job.request.deadline,
                lambda result: answer(serial, result),
            )

    def _join(self, job: Job, link: Link) -> None:
        job.link = link
        if link.broken is not None and not link.closing:
            self._tell(job, Failed(link.broken))
        elif link.broken is not None or link.waiting is not None:
            link.waiting = [*(link.waiting or ()), job.serial]
        else:
            self._tell(job, Connected())

    def _warmed(self, link: Link, failure: Failure | None) -> None:
        """Let those go on that waited for a link to prove itself, or forget one that is lost."""
        if failure is not None:
            logger.warning("link to %s failed: %s", link.engine_id, failure)
            self._peers.forget(link.engine_id, failure)
        for serial in link.waiting or ():
            job = self._jobs.get(serial)
            if job is not None:
                self._tell(job, Connected() if failure is None else Failed(failure))

    def _link_closed(self, link: Link) -> None:
        """Let those connect anew that waited for a broken link to close."""
        waiting, link.waiting = link.waiting or (), None
        for serial in waiting:
            job = self._jobs.get(serial)
            if job is not None:
                self._connect(job)

    def _link_broken(self, link: Link, failure: Failure) -> None:
        self._links.break_link(link, failure)
        self._peers.forget(link.engine_id, failure)

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

    def _prepare(self, job: Job) -> None:
        with self._guarded(job):
            failure = None
            if job.link is not None:
                failure = plan_pieces(job, job.link, self._options.descriptors_per_transfer)
            if failure is not None:
                self._tell(job, Failed(failure))
            elif job.pieces:
                self._flights.add(job)
            else:
                self._tell(job, Posted())

    def _report(self, job: Job) -> None:
        self._jobs.pop(job.serial, None)
        self._by_id.pop(job.request.request_id, None)
        job.pieces.clear()
        job.link = None
        self._outbox.report(job.machine, job.nbytes, job.descriptors)

    def _schedule(self, job: Job) -> None:
        at = job.machine.next_tick
        if job.machine.state is State.HANDSHAKE:
            at += HANDSHAKE_GRACE_SECONDS
        self._ticks.set(job.serial, at)

    def _let_time_pass(self) -> None:
        now = self._clock()
        for serial in self._ticks.due(now):
            self._tell(self._jobs[serial], Tick())
        hanging = self._links.hanging_since
        if hanging is not None and now >= hanging + self._options.drain_deadline_seconds:
            self._renew = True  # no KV is at stake: once what is healthy has landed
