"""The warm-ups, probes and checks of one worker's connections. Runs on the transfer thread.

A *warm-up* shows that a new connection works. A *probe* measures a link, and a *check* shows that a
link in use still carries data. All of them are reads of the peer's probe memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io import interface, probe_memory, reading_agent, serving_agent
from pdcluster_connector.nixl_io.reading_agent import Connection, ProbeResult, ReadingAgent, Source
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.planned_reads import Slots
from pdcluster_connector.transfer.posting import release

if TYPE_CHECKING:
    from pdcluster_connector.transfer.connections import Connections

logger = logging.getLogger(__name__)

RECENT_SECONDS = 2.0
BEHIND_KV_SECONDS = 30.0
"""How long a read may wait behind KV of which nothing lands: one transfer may be slow."""
NO_ROOM = Failure(Reason.BACKEND_ERROR, "nothing can be probed: earlier probe reads still hang")
REMEDY = (
    "Allow every port between the two engines' pods in network policies and firewalls, not only the"
    " port of the side channel"
)


class ProbeRun:
    """Reads ``size`` bytes of each source's probe region, one source after the other.

    ``done`` is called when it has ended. If a read does not land within ``seconds``, the connection
    is *stalled* until it lands, and ``done`` is called with that, too: it may still land. While KV
    lands from the same source, the probe may be queued behind it, so the seconds count from the
    last KV. While KV is under way and does not land, they are at least BEHIND_KV_SECONDS. The run
    goes on until none of its transfers can write any more. Only then is its slot free.

    A ``check`` is a run over a connection in use. It leaves out sources from which KV has landed
    within the last RECENT_SECONDS.
    """

    def __init__(
        self,
        probing: Probing,
        agent: ReadingAgent,
        connection: Connection,
        size: int,
        done: Callable[[Connection, ProbeResult], None],
        *,
        check: bool = False,
    ) -> None:
        self.connection = connection
        self.check = check
        self.reported = False  # that it has ended or is late
        self.over = False
        self._late: Failure | None = None
        self._seconds = probing.options.check_seconds if check else probing.options.probe_seconds
        self._clock = probing.clock
        self._rates = probing.rates
        self.deadline = self._clock() + self._seconds
        self._reading: Source | None = None
        self._since = 0.0  # when the present source's read began
        self._agent = agent
        self._slots = probing.scratch[size]
        self._size = size
        self._done = done
        self._slot = self._slots.take()
        self._read_bytes, self._read_seconds = 0, 0.0
        self._stuck = False
        self._steps = self._run()
        connection.transfers += 1

    def step(self) -> bool:
        """Go on; return False when the run is over and holds nothing any more. Does not raise."""
        if self._stuck:
            return True
        try:
            next(self._steps)
        except StopIteration:
            if self._slot is not None:
                self._slots.give_back(self._slot)
            self.connection.transfers -= 1
            return False
        except Exception as error:
            logger.exception("a probe failed in an unforeseen way")
            self._stuck = True  # its read may still write: only the end of the agent ends the run
            self.report(Failure(Reason.BACKEND_ERROR, f"{type(error).__name__}: {error}"))
            return True
        if not self.reported:
            self._watch_the_time()
        elif (
            self._reading is not None
            and self._reading.moved_at > self.deadline
            and self.connection.stalled is self._late  # not what a later run has found
        ):
            self.connection.stalled = None
        return True

    def _watch_the_time(self) -> None:
        if self._reading is None:
            return
        seconds, source = self._seconds, self._reading
        self.deadline = max(self.deadline, source.moved_at + seconds)
        if source.under_way:
            longer = max(seconds, BEHIND_KV_SECONDS)
            self.deadline = max(self.deadline, self._since + longer, source.moved_at + longer)
        if self._clock() >= self.deadline:
            message = (
                f"a read from {self.connection.engine_id} (rank {self._reading.rank}) did not"
                f" land in time: the KV transport is cut or stuck. {REMEDY}"
            )
            logger.warning("%s", message)
            self.report(Failure(Reason.TRANSFER_STALLED, message), is_late=True)

    def report(self, failure: Failure | None, *, is_late: bool = False) -> None:
        """Pass on that it is late, or how it has ended. After that, calls do nothing."""
        if not self.over:
            self.reported, self.over = True, not is_late
            self.connection.stalled = self._late = failure if is_late else None
            read = self._read_bytes, self._read_seconds
            rate = self._rates.told(self.connection.engine_id, self._clock())
            notes = self.connection.notice, self.connection.descriptors
            self._done(self.connection, ProbeResult(failure, *read, *notes, rate))

    def _run(self) -> Iterator[None]:
        if self._slot is None:
            self.report(NO_ROOM)
            return
        for source in self.connection.sources:
            length = min(self._size, source.probe.length)
            recent = self._clock() - source.moved_at < RECENT_SECONDS
            if length == 0 or (self.check and recent):
                continue
            self._since = self._clock()
            if self._reading is None:  # other calls of NIXL may have taken long before
                self.deadline = self._since + self._seconds
            self._reading = source
            flying = False
            try:
                yield from self._read(source, length)
            except interface.NixlError as error:
                flying = error.flying
                self.report(Failure(Reason.BACKEND_ERROR, f"reading {source.peer}: {error}"))
            while flying:  # only the end of the agent ends the run
                yield
            if self.over:  # it failed
                return
        self.report(None)

    def _read(self, source: Source, length: int) -> Iterator[None]:
        assert self._slot is not None  # noqa: S101 - checked by _run
        lists = self._agent.probe_lists(source, self._slots.cleared(self._slot, length))
        started = self._clock()
        handle, flying = None, True
        try:
            handle = source.agent.read(lists[0], reading_agent.FIRST, lists[1], reading_agent.FIRST)
            while source.agent.state(handle) != "DONE":
                yield
            seconds = self._clock() - started
            flying = False
        except interface.NixlError as error:
            flying = error.flying
            raise
        finally:
            if not flying:
                if handle is not None:
                    release(source.agent, handle)
                self._agent.release_dlists(lists)
        found = self._slots.bytes_of(self._slot, length)
        expected = serving_agent.pattern(self.connection.engine_id, source.rank, length)
        wrong = serving_agent.describe_difference(expected, found, source.rank)
        if wrong is None:
            self._read_bytes += length
            self._read_seconds += seconds
        else:
            self.report(Failure(Reason.PROBE_CORRUPTED, wrong))


WARM_UP_SLOTS = 1024
PROBE_SLOTS = 2


class Probing:
    """Runs the reads and answers those that asked for them.

    Args:
        connections: of the same worker.
        options: how long a probe and a check may take.
        memory: what the reads go into: where this engine's KV lives.

    Attributes:
        scratch: the memory that they read into, by the size of a slot.
        runs: reads that have to be polled.
        waiting: probes that wait for their turn.
        over: the answer to all further probes and checks; None while there may be any.
    """

    def __init__(
        self,
        connections: Connections,
        options: ReceiverOptions,
        clock: Callable[[], float],
        memory: probe_memory.ProbeMemory,
    ) -> None:
        self._connections = connections
        self.rates = connections.rates
        self.options = options
        self.clock = clock
        self.scratch = {
            serving_agent.WARM_UP_BYTES: Slots(serving_agent.WARM_UP_BYTES, WARM_UP_SLOTS, memory),
            serving_agent.PROBE_BYTES: Slots(serving_agent.PROBE_BYTES, PROBE_SLOTS, memory),
        }
        self.runs: list[ProbeRun] = []
        self.waiting: dict[Future[ProbeResult], EngineMetadata] = {}
        self._probe: ProbeRun | None = None  # the one under way
        self._asked: Future[ProbeResult] = Future()  # for it
        self.over: Failure | None = None

    @property
    def hanging_since(self) -> float | None:
        """Return the earliest deadline of the runs that failed or are late and still run."""
        return min((run.deadline for run in self.runs if run.reported), default=None)

    def probe(self, metadata: EngineMetadata, future: Future[ProbeResult]) -> None:
        """Probe a peer when its turn comes. Probes run one at a time, or they would be slower."""
        if self.over is not None:
            answer(future, ProbeResult(self.over))
        else:
            self.waiting[future] = metadata

    def not_warmed(self, engine_id: str, failure: Failure) -> None:
        """Answer the probes that wait for a warm-up which has failed.

        Its connection may close at once, and the next one would begin with the same warm-up.
        """
        for future, metadata in list(self.waiting.items()):
            if metadata.engine_id == engine_id:
                del self.waiting[future]
                answer(future, ProbeResult(failure))

    def begin(
        self, metadata: EngineMetadata, future: Future[ProbeResult], *, check: bool = False
    ) -> ProbeRun | None:
        """Begin to read for who asked. If nothing can be read, answer. Does not raise.

        If there is no connection, because the agent was destroyed, it is opened; but none to a peer
        that the peer book has dropped, because its warm-up would hang. While it warms up, a probe
        waits. A check is answered: the warm-up shows the same.
        """
        engine_id, connections, failure = metadata.engine_id, self._connections, self.over
        known = engine_id in connections.by_engine or engine_id in connections.peers
        if failure is None and not known:
            message = f"{engine_id} is gone, or was forgotten"
            failure = Failure(Reason.SIDE_CHANNEL_UNREACHABLE, message)
        try:
            if failure is None:
                # Who probes has just shaken hands, so a silence is over, as for a receive.
                connection = (connections.open if check else connections.answered)(metadata)
                connection.wanted = True
                failure = connection.broken or connection.stalled
                if failure is None and connection.waiting is None:
                    size = serving_agent.WARM_UP_BYTES if check else serving_agent.PROBE_BYTES
                    if not check:
                        self.rates.forget(engine_id)  # the probe measures the link anew
                    return self.start(connection, self._answering(future), size, check=check)
        except Exception as error:  # noqa: BLE001 - of one peer, whatever the cause
            failure = Failure(Reason.BACKEND_ERROR, f"{type(error).__name__}: {error}")
        if failure is not None or check:
            answer(future, ProbeResult(failure))
        return None

    def step(self) -> bool:
        """Go on with all runs; return whether to come back soon."""
        moved = False
        for run in list(self.runs):
            if not run.step():
                moved = True
                self.runs.remove(run)
                self._connections.settle(run.connection)
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
            if run is self._probe:
                run.report(failure)
            elif run.check:
                run.report(failure if final else None)  # unknown; the next check shows it
            run.over = True
        self._probe = None
        for slots in self.scratch.values():
            slots.reset()
        while final and self.waiting:
            answer(self.waiting.popitem()[0], ProbeResult(failure))

    def _next_probe(self) -> bool:
        """Begin what can begin of the probes that wait; return whether to come back soon.

        That is one probe, or the warm-up of a connection. Warm-ups run side by side: of a peer
        that is cut off, each lasts until it fails, and peers behind it would wait for all of them.
        """
        if self._probe is not None and not (self._probe.reported or self._asked.done()):
            return False
        for future, metadata in list(self.waiting.items()):
            if future.cancelled():
                del self.waiting[future]
                continue
            runs, run = len(self.runs), self.begin(metadata, future)
            if run is not None:
                self._probe, self._asked = run, future
            if run is not None or future.done():
                del self.waiting[future]
            if len(self.runs) > runs or future.done():
                return True
        return False

    def _answering(self, future: Future[ProbeResult]) -> Callable[[Connection, ProbeResult], None]:
        """Return what answers ``future``. A connection that has failed is not used any more."""

        def done(connection: Connection, result: ProbeResult) -> None:
            failure, says_nothing = result.failure, result.failure in {NO_ROOM, connection.stalled}
            if failure is not None and not says_nothing and connection.broken is None:
                self._connections.probe_failed(connection, failure)
            answer(future, result)

        return done

    def start(
        self,
        connection: Connection,
        done: Callable[[Connection, ProbeResult], None],
        size: int = serving_agent.WARM_UP_BYTES,
        *,
        check: bool = False,
    ) -> ProbeRun:
        """Begin to read: by default a little, which warms a new connection up."""
        run = ProbeRun(self, self._connections.agent, connection, size, done, check=check)
        self.runs.append(run)
        return run


def answer(future: Future[ProbeResult], result: ProbeResult) -> None:
    """Answer who asked, unless nobody waits any more."""
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_result(result)
