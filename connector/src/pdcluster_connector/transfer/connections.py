"""The connections of one worker: which prefill engines can be read right now.

A connection is opened when a handshake has answered. It proves itself with a warm-up read. It
closes when it is broken and no transfer runs over it any more. All connections live and die with
the reading agent. Everything here runs on the transfer thread.
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
from pdcluster_connector.nixl_io.reading_agent import Connection, ReadingAgent
from pdcluster_connector.plan.cost import cost_notice
from pdcluster_connector.plan.geometry import Shard
from pdcluster_connector.plan.peer_plan import plan_peer
from pdcluster_connector.plan.slices import seams
from pdcluster_connector.plan.transfer import PeerPlan
from pdcluster_connector.protocol.conversion import to_shard
from pdcluster_connector.protocol.engine_id import parse_engine_id
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.transfer.probe_run import NO_ROOM, ProbeRun

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
MAX_PROBES = 1024

Warmed = Callable[[Connection, Failure | None], None]
Closed = Callable[[Connection], None]


class Connections:
    """Owns the reading agent and the connections over it.

    Args:
        shard: this rank's KV.
        memory: what to register for reading into.
        warmed: told when a connection has proven itself, or has failed to, be it at a later probe.
        closed: told when a broken connection is gone, so that a new one may be opened.

    Attributes:
        by_engine: every connection, whatever its state, by the peer's engine id.
        scratch: memory that probes and lease words are read into.
        runs: warm-ups, probes and checks that have to be polled.
        probes: probes that wait for their turn.
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
        self.scratch = Scratch()
        self._agent: ReadingAgent | None = None
        self.by_engine: dict[str, Connection] = {}
        self._plans: dict[str, PeerPlan] = {}
        self.runs: list[ProbeRun] = []
        self.probes: deque[tuple[EngineMetadata, Future[ProbeResult]]] = deque()
        self._probing: tuple[ProbeRun, Future[ProbeResult]] | None = None
        self._over: Failure | None = None

    @property
    def agent(self) -> ReadingAgent:
        """Return the reading agent; made when there is none. Raises NixlError."""
        if self._agent is None:
            self._agent = ReadingAgent(self._port_factory, self._memory, self.scratch)
        return self._agent

    @property
    def hanging_since(self) -> float | None:
        """Return when the oldest read should have landed that nobody waits for any more."""
        return min((run.deadline for run in self.runs if run.reported), default=None)

    def open(self, metadata: EngineMetadata) -> Connection:
        """Return the peer's connection; a new one begins with its warm-up.

        Raises:
            PlanError: the shards do not fit together.
            NixlError: NIXL refused the peer.
        """
        connection = self.by_engine.get(metadata.engine_id)
        if connection is not None:
            if connection.broken and connection.broken.reason is Reason.SIDE_CHANNEL_UNREACHABLE:
                connection.broken = None  # it was only suspect, and has just answered again
            return connection
        self._retire_predecessors(metadata.engine_id)
        if len(self.by_engine) >= MAX_CONNECTIONS:
            self._make_room()
        plan = self._plans.get(metadata.engine_id)
        if plan is None:
            plan = plan_peer(self._shard, [to_shard(shard) for shard in metadata.shards])
        connection = self.agent.open(metadata, plan)
        connection.notice = cost_notice(plan, metadata.shape.layout)
        if connection.notice:
            logger.warning("%s: %s", metadata.engine_id, connection.notice)
        self.by_engine[metadata.engine_id] = connection
        self._plans[metadata.engine_id] = plan
        if len(self._plans) > 2 * MAX_CONNECTIONS:
            del self._plans[next(iter(self._plans))]
        self._start(connection, WARM_UP_BYTES, self._warm_up_done)
        return connection

    def break_off(self, connection: Connection, failure: Failure) -> None:
        """Start nothing new over ``connection``; it closes when its last transfer has ended."""
        if connection.broken is None or failure.reason is not Reason.SIDE_CHANNEL_UNREACHABLE:
            connection.broken = failure
        if failure.reason is Reason.PEER_RESTARTED:
            self._plans.pop(connection.engine_id, None)
        self.settle(connection)

    def settle(self, connection: Connection) -> None:
        """Close ``connection`` if it is broken and no transfer runs over it."""
        if connection.broken is not None and connection.transfers == 0 and self._agent is not None:
            if self.by_engine.get(connection.engine_id) is connection:
                del self.by_engine[connection.engine_id]
            self._agent.close_connection(connection)
            self._closed(connection)

    def probe(self, metadata: EngineMetadata, future: Future[ProbeResult]) -> None:
        """Probe a peer when its turn comes: one at a time, or they would slow each other."""
        if self._over is not None:
            _answer(future, ProbeResult(metadata.engine_id, (), self._over))
        elif len(self.probes) >= MAX_PROBES:
            _answer(future, _no_probe(metadata, "too many probes are waiting"))
        else:
            self.probes.append((metadata, future))

    def check(self, metadata: EngineMetadata, future: Future[ProbeResult]) -> None:
        """See whether a connection still carries data: a small read where KV has not just landed.

        A connection that is not there, because the agent was destroyed, is opened: its warm-up
        will tell.
        """
        if self._over is not None:
            _answer(future, ProbeResult(metadata.engine_id, (), self._over))
            return
        try:
            connection = self.open(metadata)
            if connection.broken is not None or connection.waiting is not None:
                _answer(future, ProbeResult(metadata.engine_id, (), connection.broken))
                return
            self._start(
                connection,
                WARM_UP_BYTES,
                lambda connection, result: self._probed(connection, result, future),
                True,
            )
        except Exception as error:  # noqa: BLE001 - one check fails, whatever the cause
            _answer(future, _no_probe(metadata, f"{type(error).__name__}: {error}"))

    def step(self) -> bool:
        """Go on with warm-ups and probes; returns whether to come back soon."""
        moved = False
        for run in list(self.runs):
            try:
                over = not run.step()
            except Exception as error:  # its slot and its place on the connection are lost
                logger.exception("a probe failed in an unforeseen way")
                run.report(Failure(Reason.BACKEND_ERROR, f"{type(error).__name__}: {error}"))
                over = True
            if over:
                moved = True
                self.runs.remove(run)
                self.settle(run.connection)
            elif not run.reported and not run.check:
                moved = True  # it is being timed: look again soon
        return self._next_probe() or moved

    def _next_probe(self) -> bool:
        if not self.probes or (self._probing and not self._probing[1].done()):
            return False
        metadata, future = self.probes[0]
        try:
            connection = self.open(metadata)
            if connection.waiting is not None and connection.broken is None:
                return False  # its warm-up comes first
            self.probes.popleft()
            if connection.broken is not None:
                _answer(future, ProbeResult(metadata.engine_id, (), connection.broken))
            else:
                run = self._start(
                    connection,
                    PROBE_BYTES,
                    lambda connection, result: self._probed(connection, result, future),
                )
                self._probing = (run, future)
        except Exception as error:  # noqa: BLE001 - one probe fails, whatever the cause
            if self.probes and self.probes[0][1] is future:
                self.probes.popleft()
            _answer(future, _no_probe(metadata, f"{type(error).__name__}: {error}"))
        return True

    def _probed(
        self, connection: Connection, result: ProbeResult, future: Future[ProbeResult]
    ) -> None:
        """Answer a probe; a connection that has failed it is used no more."""
        failure = result.failure
        if failure is not None and failure is not NO_ROOM and connection.broken is None:
            self.break_off(connection, failure)
            self._warmed(connection, failure)
        _answer(future, result)

    def _start(
        self,
        connection: Connection,
        size: int,
        done: Callable[[Connection, ProbeResult], None],
        check: bool = False,
    ) -> ProbeRun:
        run = ProbeRun(
            self.agent,
            connection,
            self.scratch,
            size=size,
            seconds=self._check_seconds if check else self._probe_seconds,
            clock=self._clock,
            done=done,
            check=check,
        )
        self.runs.append(run)
        return run

    def _warm_up_done(self, connection: Connection, result: ProbeResult) -> None:
        failure = connection.broken or result.failure
        if failure is not None:
            self.break_off(connection, failure)
        self._warmed(connection, failure)
        connection.waiting = None

    def _retire_predecessors(self, engine_id: str) -> None:
        """Break off connections to earlier incarnations of the engine that has just answered."""
        answered = parse_engine_id(engine_id)
        for connection in list(self.by_engine.values()):
            if answered.succeeds(parse_engine_id(connection.engine_id)):
                message = f"{engine_id} has taken the place of {connection.engine_id}"
                self.break_off(connection, Failure(Reason.PEER_RESTARTED, message))

    def _make_room(self) -> None:
        """Close the oldest connection that nothing flies over."""
        for connection in self.by_engine.values():
            if connection.transfers == 0:
                self.break_off(connection, Failure(Reason.BACKEND_ERROR, "closed for a newer peer"))
                return

    def destroy_agent(
        self, failure: Failure, *, writing: bool, final: bool = False
    ) -> list[Connection]:
        """Destroy the agent and with it every connection; returns those whose warm-up was cut.

        Args:
            failure: what its probes are told.
            writing: whether transfers into KV blocks may be under way.
            final: also end the probes that have not begun, and begin no further ones.

        Raises:
            AgentSurvivedError: nothing was changed, and its transfers may still write.
        """
        if final:
            self._over = failure
        self._destroy(writing)
        cut = [
            connection for connection in self.by_engine.values() if connection.waiting is not None
        ]
        connections, self.by_engine = self.by_engine, {}
        runs, self.runs = self.runs, []
        for connection in connections.values():
            connection.broken = connection.broken or failure
            connection.sources.clear()
        for run in runs:
            if self._probing is not None and run is self._probing[0]:
                run.report(failure)
            elif run.check:
                run.report(failure if final else None)  # nothing is known; the next one will tell
            run.reported = True  # a cut warm-up starts anew with its connection
        self._probing = None
        self.scratch.reset()
        if final:
            while self.probes:
                metadata, future = self.probes.popleft()
                _answer(future, ProbeResult(metadata.engine_id, (), failure))
        return cut

    def _destroy(self, writing: bool) -> None:
        try:
            if self._agent is not None:
                self._agent.destroy()
        except AgentSurvivedError:
            if writing:
                raise
            logger.exception("a reading agent stays behind; it writes nothing")
        self._agent = None


def _no_probe(metadata: EngineMetadata, message: str) -> ProbeResult:
    return ProbeResult(metadata.engine_id, (), Failure(Reason.BACKEND_ERROR, message))


def _answer(future: Future[ProbeResult], result: ProbeResult) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(result)
