"""One warm-up or probe of one link, carried out step by step by the transfer thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.runtime.nixl_port import PortError
from pdcluster_connector.runtime.probe import (
    ProbeResult,
    Scratch,
    SourceProbe,
    describe_difference,
    pattern,
)
from pdcluster_connector.runtime.reading_agent import Link, ReadingAgent, Source


class ProbeRun:
    """Reads ``size`` bytes of each source's probe region, one source after the other.

    ``done`` is called exactly once, at the deadline at the latest. The run itself goes on
    until no transfer of it can write any more; only then is its scratch slot given back.
    """

    def __init__(
        self,
        agent: ReadingAgent,
        link: Link,
        scratch: Scratch,
        *,
        size: int,
        deadline: float,
        clock: Callable[[], float],
        done: Callable[[Link, ProbeResult], None],
    ) -> None:
        self.link = link
        self.reported = False
        self._agent = agent
        self._scratch = scratch
        self._size = size
        self.deadline = deadline
        self._clock = clock
        self._done = done
        self._offset = scratch.take(size)
        self._probes: list[SourceProbe] = []
        self._steps = self._run()
        link.flying += 1

    def step(self) -> bool:
        """Go on; returns False when the run is over and holds nothing any more."""
        try:
            next(self._steps)
        except StopIteration:
            over = True
        else:
            over = False
            if not self.reported and self._clock() >= self.deadline:
                self.report(Failure(Reason.TRANSFER_STALLED, "a probe read did not land in time"))
        if over:
            if self._offset is not None:
                self._scratch.give_back(self._size, self._offset)
            self.link.flying -= 1
        return not over

    def report(self, failure: Failure | None) -> None:
        """Tell the result, once."""
        if not self.reported:
            self.reported = True
            self._done(self.link, ProbeResult(self.link.engine_id, tuple(self._probes), failure))

    def _run(self) -> Iterator[None]:
        if self._offset is None:
            self.report(Failure(Reason.TRANSFER_STALLED, "earlier probe reads still hang"))
            return
        for source in self.link.sources:
            length = min(self._size, source.probe.length)
            if length == 0:
                continue
            flying = False
            try:
                yield from self._read(source, length)
            except PortError as error:
                flying = error.flying
                self.report(Failure(Reason.BACKEND_ERROR, f"reading {source.peer}: {error}"))
            while flying:  # until the agent is destroyed, and this run with it
                yield
            if self.reported:  # it failed, or landed too late to be believed
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
            while not self._agent.landed(handle):
                yield
            seconds = self._clock() - started
            flying = False
        except PortError as error:
            flying = error.flying
            raise
        finally:
            if not flying:
                if handle is not None:
                    self._agent.release(handle)
                self._agent.release_dlists(lists)
        expected = pattern(self.link.engine_id, source.rank, length)
        wrong = describe_difference(expected, found, source.rank)
        if wrong is None:
            self._probes.append(SourceProbe(source.rank, length, seconds))
        else:
            self.report(Failure(Reason.PROBE_CORRUPTED, wrong))
