"""The links of one worker: which peers can be read right now, and over which agent.

A link is opened when a handshake has answered, proves itself with a warm-up read, and closes
when it is broken and nothing flies over it any more. All of them live and die with the
reading agent. Carried out by the transfer thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import AgentInterface, AgentSurvivedError, MemoryRange
from pdcluster_connector.nixl_io.probe import PROBE_BYTES, WARM_UP_BYTES, ProbeResult, Scratch
from pdcluster_connector.nixl_io.reading_agent import Link, ReadingAgent
from pdcluster_connector.plan.cost import cost_notice
from pdcluster_connector.plan.geometry import Shard
from pdcluster_connector.plan.slices import seams
from pdcluster_connector.plan.transfer import PeerPlan, plan_peer
from pdcluster_connector.protocol.conversion import to_shard
from pdcluster_connector.protocol.engine_id import parse_engine_id
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.transfer.probe_run import NO_ROOM, ProbeRun

logger = logging.getLogger(__name__)

MAX_LINKS = 1024
MAX_PROBES = 1024

Warmed = Callable[[Link, Failure | None], None]
Closed = Callable[[Link], None]


class Links:
    """Owns the reading agent and the links over it.

    Args:
        shard: this rank's KV.
        memory: what to register for reading into.
        warmed: told when a link has proven itself, or has failed to, be it at a later probe.
        closed: told when a broken link is gone, so that a new one may be opened.
    """

    def __init__(
        self,
        shard: Shard,
        memory: Sequence[MemoryRange],
        make_agent: Callable[[], AgentInterface],
        *,
        clock: Callable[[], float],
        probe_seconds: float,
        check_seconds: float,
        warmed: Warmed,
        closed: Closed,
    ) -> None:
        self._shard = replace(shard, seams=seams(item.span for item in memory))
        self._memory = memory
        self._port_factory = make_agent
        self._clock = clock
        self._probe_seconds = probe_seconds
        self._check_seconds = check_seconds
        self._warmed = warmed
        self._closed = closed
        self._scratch = Scratch()
        self._agent: ReadingAgent | None = None
        self._links: dict[str, Link] = {}
        self._plans: dict[str, PeerPlan] = {}
        self._runs: list[ProbeRun] = []
        self._probes: deque[tuple[EngineMetadata, Future[ProbeResult]]] = deque()
        self._probing: tuple[ProbeRun, Future[ProbeResult]] | None = None

    @property
    def agent(self) -> ReadingAgent:
        """Return the reading agent; made when there is none. Raises NixlError."""
        if self._agent is None:
            self._agent = ReadingAgent(self._port_factory, self._memory, self._scratch)
        return self._agent

    @property
    def busy(self) -> bool:
        """Whether anything has to be polled."""
        return bool(self._runs or self._probes)

    @property
    def hanging_since(self) -> float | None:
        """Return when the oldest read should have landed that nobody waits for any more."""
        return min((run.deadline for run in self._runs if run.reported), default=None)

    def get(self, engine_id: str) -> Link | None:
        """Return the peer's link, whatever its state."""
        return self._links.get(engine_id)

    def open(self, metadata: EngineMetadata) -> Link:
        """Return the peer's link; a new one begins with its warm-up.

        Raises:
            PlanError: the shards do not fit together.
            NixlError: NIXL refused the peer.
        """
        link = self._links.get(metadata.engine_id)
        if link is not None:
            if link.broken and link.broken.reason is Reason.SIDE_CHANNEL_UNREACHABLE:
                link.broken = None  # it was only suspect, and has just answered again
            return link
        self._retire_predecessors(metadata.engine_id)
        if len(self._links) >= MAX_LINKS:
            self._make_room()
        plan = self._plans.get(metadata.engine_id)
        if plan is None:
            plan = plan_peer(self._shard, [to_shard(shard) for shard in metadata.shards])
        link = self.agent.open(metadata, plan)
        link.notice = cost_notice(plan, metadata.shape.layout)
        if link.notice:
            logger.warning("%s: %s", metadata.engine_id, link.notice)
        self._links[metadata.engine_id] = link
        self._plans[metadata.engine_id] = plan
        if len(self._plans) > 2 * MAX_LINKS:
            del self._plans[next(iter(self._plans))]
        self._start(link, WARM_UP_BYTES, self._warm_up_done)
        return link

    def break_link(self, link: Link, failure: Failure) -> None:
        """Start nothing new over ``link``; it closes when its last transfer has ended."""
        if link.broken is None or failure.reason is not Reason.SIDE_CHANNEL_UNREACHABLE:
            link.broken = failure
        if failure.reason is Reason.PEER_RESTARTED:
            self._plans.pop(link.engine_id, None)
        self.settle(link)

    def settle(self, link: Link) -> None:
        """Close ``link`` if it is broken and nothing flies over it."""
        if link.broken is not None and link.flying == 0 and self._agent is not None:
            if self._links.get(link.engine_id) is link:
                del self._links[link.engine_id]
            self._agent.close_link(link)
            self._closed(link)

    def probe(self, metadata: EngineMetadata, future: Future[ProbeResult]) -> None:
        """Probe a peer when its turn comes: one at a time, or they would slow each other."""
        if len(self._probes) >= MAX_PROBES:
            _answer(future, _no_probe(metadata, "too many probes are waiting"))
        else:
            self._probes.append((metadata, future))

    def check(self, metadata: EngineMetadata, future: Future[ProbeResult]) -> None:
        """See whether a link still carries data, by a small read where KV has not just landed.

        A link that is not there, because the agent was destroyed, is opened: its warm-up will
        tell.
        """
        try:
            link = self.open(metadata)
            if link.broken is not None or link.waiting is not None:
                _answer(future, ProbeResult(metadata.engine_id, (), link.broken))
                return
            self._start(
                link, WARM_UP_BYTES, lambda link, result: self._probed(link, result, future), True
            )
        except Exception as error:  # noqa: BLE001 - one check fails, whatever the cause
            _answer(future, _no_probe(metadata, f"{type(error).__name__}: {error}"))

    def step(self) -> bool:
        """Go on with warm-ups and probes; returns whether to come back soon."""
        moved = False
        for run in list(self._runs):
            try:
                over = not run.step()
            except Exception as error:  # its slot and its place on the link are lost
                logger.exception("a probe failed in an unforeseen way")
                run.report(Failure(Reason.BACKEND_ERROR, f"{type(error).__name__}: {error}"))
                over = True
            if over:
                moved = True
                self._runs.remove(run)
                self.settle(run.link)
            elif not run.reported and not run.check:
                moved = True  # it is being timed: look again soon
        return self._next_probe() or moved

    def _next_probe(self) -> bool:
        if not self._probes or (self._probing and not self._probing[1].done()):
            return False
        metadata, future = self._probes[0]
        try:
            link = self.open(metadata)
            if link.waiting is not None and link.broken is None:
                return False  # its warm-up comes first
            self._probes.popleft()
            if link.broken is not None:
                _answer(future, ProbeResult(metadata.engine_id, (), link.broken))
            else:
                run = self._start(
                    link, PROBE_BYTES, lambda link, result: self._probed(link, result, future)
                )
                self._probing = (run, future)
        except Exception as error:  # noqa: BLE001 - one probe fails, whatever the cause
            if self._probes and self._probes[0][1] is future:
                self._probes.popleft()
            _answer(future, _no_probe(metadata, f"{type(error).__name__}: {error}"))
        return True

    def _probed(self, link: Link, result: ProbeResult, future: Future[ProbeResult]) -> None:
        """Answer a probe; a link that has failed it is used no more."""
        failure = result.failure
        if failure is not None and failure is not NO_ROOM and link.broken is None:
            self.break_link(link, failure)
            self._warmed(link, failure)
        _answer(future, result)

    def _start(
        self,
        link: Link,
        size: int,
        done: Callable[[Link, ProbeResult], None],
        check: bool = False,
    ) -> ProbeRun:
        run = ProbeRun(
            self.agent,
            link,
            self._scratch,
            size=size,
            seconds=self._check_seconds if check else self._probe_seconds,
            clock=self._clock,
            done=done,
            check=check,
        )
        self._runs.append(run)
        return run

    def _warm_up_done(self, link: Link, result: ProbeResult) -> None:
        failure = link.broken or result.failure
        if failure is not None:
            self.break_link(link, failure)
        self._warmed(link, failure)
        link.waiting = None

    def _retire_predecessors(self, engine_id: str) -> None:
        """Break links to earlier incarnations of the engine that has just answered."""
        answered = parse_engine_id(engine_id)
        for link in list(self._links.values()):
            if answered.succeeds(parse_engine_id(link.engine_id)):
                message = f"{engine_id} has taken the place of {link.engine_id}"
                self.break_link(link, Failure(Reason.PEER_RESTARTED, message))

    def _make_room(self) -> None:
        """Close the oldest link that nothing flies over."""
        for link in self._links.values():
            if link.flying == 0:
                self.break_link(link, Failure(Reason.BACKEND_ERROR, "closed for a newer peer"))
                return

    def destroy_agent(self, failure: Failure, *, writing: bool, final: bool = False) -> list[Link]:
        """Destroy the agent and with it every link; returns the links whose warm-up was cut.

        Args:
            failure: what its probes are told.
            writing: whether transfers into KV blocks may be under way.
            final: also end the probes that have not begun.

        Raises:
            AgentSurvivedError: nothing was changed, and its transfers may still write.
        """
        if self._agent is not None:
            try:
                self._agent.destroy()
            except AgentSurvivedError:
                if writing:
                    raise
                logger.exception("a reading agent stays behind; it writes nothing")
        self._agent = None
        cut = [link for link in self._links.values() if link.waiting is not None]
        links, self._links = self._links, {}
        runs, self._runs = self._runs, []
        for link in links.values():
            link.broken = link.broken or failure
            link.sources.clear()
        for run in runs:
            if self._probing is not None and run is self._probing[0]:
                run.report(failure)
            elif run.check:
                run.report(failure if final else None)  # nothing is known; the next one will tell
            run.reported = True  # a cut warm-up starts anew with its link
        self._probing = None
        self._scratch.reset()
        if final:
            while self._probes:
                metadata, future = self._probes.popleft()
                _answer(future, ProbeResult(metadata.engine_id, (), failure))
        return cut


def _no_probe(metadata: EngineMetadata, message: str) -> ProbeResult:
    return ProbeResult(metadata.engine_id, (), Failure(Reason.BACKEND_ERROR, message))


def _answer(future: Future[ProbeResult], result: ProbeResult) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(result)
