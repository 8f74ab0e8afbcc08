"""The warm-ups, probes and checks of one worker's connections. Runs on the transfer thread.

A *warm-up* shows that a new connection works. A *probe* measures a link, and a *check* shows that a
link in use still carries data. All of them are reads of the peer's probe memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.probe import PROBE_BYTES, WARM_UP_BYTES, ProbeResult, Scratch
from pdcluster_connector.nixl_io.reading_agent import Connection, ReadingAgent
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.transfer.probe_run import NO_ROOM, ProbeRun

logger = logging.getLogger(__name__)

MAX_PROBES = 1024


class Probing:
    """Runs the reads and answers those that asked for them.

    Args:
        agent: returns the reading agent; may raise NixlError.
        open_connection: returns a peer's connection; may raise PlanError and NixlError.
        settle: called when a run is over and its connection may have to close.
        failed: called when a connection has failed a probe or a check.
        probe_seconds, check_seconds: how long one may take.

    Attributes:
        scratch: the memory that they read into.
        runs: reads that have to be polled.
        waiting: probes that wait for their turn.
    """

    def __init__(
        self,
        *,
        agent: Callable[[], ReadingAgent],
        open_connection: Callable[[EngineMetadata], Connection],
        settle: Callable[[Connection], None],
        failed: Callable[[Connection, Failure], None],
        clock: Callable[[], float],
        probe_seconds: float,
        check_seconds: float,
    ) -> None:
        self._agent = agent
        self._open = open_connection
        self._settle = settle
        self._failed = failed
        self._clock = clock
        self._probe_seconds = probe_seconds
        self._check_seconds = check_seconds
        self.scratch = Scratch()
        self.runs: list[ProbeRun] = []
        self.waiting: dict[Future[ProbeResult], EngineMetadata] = {}
        self._probe: tuple[ProbeRun, Future[ProbeResult]] | None = None  # the one under way
        self._over: Failure | None = None

    @property
    def hanging_since(self) -> float | None:
        """Return the earliest deadline of the runs that have failed and whose reads still run."""
        return min((run.deadline for run in self.runs if run.reported), default=None)

    def warm_up(
        self, connection: Connection, done: Callable[[Connection, ProbeResult], None]
    ) -> None:
        """Read a little over a new connection."""
        self._start(connection, WARM_UP_BYTES, done)

    def probe(self, metadata: EngineMetadata, future: Future[ProbeResult]) -> None:
        """Probe a peer when its turn comes. Probes run one at a time, or they would be slower."""
        if self._over is not None:
            answer(future, ProbeResult(metadata.engine_id, (), self._over))
        elif len(self.waiting) >= MAX_PROBES:
            answer(future, _no_probe(metadata, "too many probes are waiting"))
        else:
            self.waiting[future] = metadata

    def not_warmed(self, engine_id: str, failure: Failure) -> None:
        """Answer the probes that wait for a warm-up which has failed.

        Its connection may close at once, and the next one would begin with the same warm-up.
        """
        for future, metadata in list(self.waiting.items()):
            if metadata.engine_id == engine_id:
                del self.waiting[future]
                answer(future, ProbeResult(engine_id, (), failure))

    def check(self, metadata: EngineMetadata, future: Future[ProbeResult]) -> None:
        """Check with a small read that a connection still carries data.

        If there is no connection, because the agent was destroyed, it is opened. Its warm-up then
        shows the same.
        """
        if self._over is not None:
            answer(future, ProbeResult(metadata.engine_id, (), self._over))
            return
        try:
            connection = self._open(metadata)
            if connection.broken is not None or connection.waiting is not None:
                answer(future, ProbeResult(metadata.engine_id, (), connection.broken))
            else:
                self._start(connection, WARM_UP_BYTES, self._answering(future), check=True)
        except Exception as error:  # noqa: BLE001 - one check fails, whatever the cause
            answer(future, _no_probe(metadata, f"{type(error).__name__}: {error}"))

    def step(self) -> bool:
        """Go on with all runs; return whether to come back soon."""
        moved = False
        for run in list(self.runs):
            if not run.step():
                moved = True
                self.runs.remove(run)
                self._settle(run.connection)
            elif not run.reported and not run.check:
                moved = True  # its time is measured, so look again soon
        return self._next_probe() or moved

    def cut(self, failure: Failure, *, final: bool) -> None:
        """End all runs: the agent that made their reads is destroyed.

        Warm-ups are not answered, because they start again with their connections.

        Args:
            failure: the answer to the probe under way, and with ``final`` to checks, too.
            final: whether the probes that wait are answered, too.
        """
        runs = list(self.runs)
        self.runs.clear()
        for run in runs:
            if self._probe is not None and run is self._probe[0]:
                run.report(failure)
            elif run.check:
                run.report(failure if final else None)  # unknown; the next check will tell
            run.reported = True
        self._probe = None
        self.scratch.reset()
        while final and self.waiting:
            future, metadata = self.waiting.popitem()
            answer(future, ProbeResult(metadata.engine_id, (), failure))

    def refuse(self, failure: Failure) -> None:
        """Answer all further probes and checks with ``failure``."""
        self._over = failure

    def _next_probe(self) -> bool:
        """Begin what can begin of the probes that wait; return whether to come back soon.

        That is one probe, or the warm-up of a connection. Warm-ups run side by side: of a peer
        that is cut off, each lasts until it fails, and peers behind it would wait for all of them.
        """
        if self._probe and not self._probe[1].done():
            return False
        for future, metadata in list(self.waiting.items()):
            if future.cancelled():
                del self.waiting[future]
                continue
            runs = len(self.runs)
            try:
                connection = self._open(metadata)
                if connection.waiting is not None and connection.broken is None:
                    if len(self.runs) > runs:
                        return True
                    continue
                del self.waiting[future]
                if connection.broken is not None:
                    answer(future, ProbeResult(metadata.engine_id, (), connection.broken))
                else:
                    run = self._start(connection, PROBE_BYTES, self._answering(future))
                    self._probe = (run, future)
            except Exception as error:  # noqa: BLE001 - one probe fails, whatever the cause
                self.waiting.pop(future, None)
                answer(future, _no_probe(metadata, f"{type(error).__name__}: {error}"))
            return True
        return False

    def _answering(self, future: Future[ProbeResult]) -> Callable[[Connection, ProbeResult], None]:
        """Return what answers ``future``. A connection that has failed is not used any more."""

        def done(connection: Connection, result: ProbeResult) -> None:
            failure = result.failure
            if failure is not None and failure is not NO_ROOM and connection.broken is None:
                self._failed(connection, failure)
            answer(future, result)

        return done

    def _start(
        self,
        connection: Connection,
        size: int,
        done: Callable[[Connection, ProbeResult], None],
        *,
        check: bool = False,
    ) -> ProbeRun:
        run = ProbeRun(
            self._agent(),
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


def _no_probe(metadata: EngineMetadata, message: str) -> ProbeResult:
    return ProbeResult(metadata.engine_id, (), Failure(Reason.BACKEND_ERROR, message))


def answer(future: Future[ProbeResult], result: ProbeResult) -> None:
    """Answer who asked, unless nobody waits any more."""
    if future.set_running_or_notify_cancel():
        future.set_result(result)
