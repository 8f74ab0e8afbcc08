"""One warm-up or probe of one connection, carried out step by step by the transfer thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import NixlError
from pdcluster_connector.nixl_io.probe import (
    ProbeResult,
    Scratch,
    SourceProbe,
    describe_difference,
    pattern,
)
from pdcluster_connector.nixl_io.reading_agent import Connection, ReadingAgent, Source
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.transfer.transfers import release

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

    ``done`` is called exactly once, ``seconds`` after the first read at the latest. While KV lands
    from the same source, the probe may be queued behind it, so the seconds count from the last KV.
    While KV is under way and does not land, they are at least BEHIND_KV_SECONDS. The run goes on
    until none of its transfers can write any more. Only then is its scratch slot free.

    A ``check`` is a run over a connection in use. It leaves out sources from which KV has landed
    within the last RECENT_SECONDS.
    """

    def __init__(
        self,
        agent: ReadingAgent,
        connection: Connection,
        scratch: Scratch,
        *,
        size: int,
        seconds: float,
        clock: Callable[[], float],
        done: Callable[[Connection, ProbeResult], None],
        check: bool = False,
    ) -> None:
        self.connection = connection
        self.check = check
        self.reported = False
        self.deadline = clock() + seconds
        self._seconds = seconds
        self._reading: Source | None = None
        self._since = 0.0  # when the present source's read began
        self._agent = agent
        self._scratch = scratch
        self._size = size
        self._clock = clock
        self._done = done
        self._offset = scratch.take(size)
        self._probes: list[SourceProbe] = []
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
            over = True
        except Exception as error:
            logger.exception("a probe failed in an unforeseen way")
            self._stuck = True  # its read may still write: only the end of the agent ends the run
            self.report(Failure(Reason.BACKEND_ERROR, f"{type(error).__name__}: {error}"))
            return True
        else:
            over = False
            if not self.reported:
                self._watch_the_time()
        if over:
            if self._offset is not None:
                self._scratch.give_back(self._size, self._offset)
            self.connection.transfers -= 1
        return not over

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
            self.report(Failure(Reason.TRANSFER_STALLED, message))

    def report(self, failure: Failure | None) -> None:
        """Tell the result. Later calls do nothing."""
        if not self.reported:
            self.reported = True
            connection, probes = self.connection, tuple(self._probes)
            result = ProbeResult(connection.engine_id, probes, failure, connection.notice)
            self._done(connection, result)

    def _run(self) -> Iterator[None]:
        if self._offset is None:
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
            except NixlError as error:
                flying = error.flying
                self.report(Failure(Reason.BACKEND_ERROR, f"reading {source.peer}: {error}"))
            while flying:  # only the end of the agent ends the run
                yield
            if self.reported:  # it failed or took too long
                return
        self.report(None)

    def _read(self, source: Source, length: int) -> Iterator[None]:
        assert self._offset is not None  # noqa: S101 - checked by _run
        found = self._scratch.view(self._offset, length)
        found[:] = 0
        lists = self._agent.probe_lists(source, self._offset, length)
        started = self._clock()
        handle, flying = None, True
        try:
            handle = self._agent.read_probe(lists)
            while source.agent.state(handle) != "DONE":
                yield
            seconds = self._clock() - started
            flying = False
        except NixlError as error:
            flying = error.flying
            raise
        finally:
            if not flying:
                if handle is not None:
                    release(source.agent, handle)
                self._agent.release_dlists(lists)
        expected = pattern(self.connection.engine_id, source.rank, length)
        wrong = describe_difference(expected, found, source.rank)
        if wrong is None:
            self._probes.append(SourceProbe(source.rank, length, seconds))
        else:
            self.report(Failure(Reason.PROBE_CORRUPTED, wrong))
