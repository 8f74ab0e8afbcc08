"""The link table: many workers' reports become one row for each prefill engine. Pure.

Time comes in as an argument, in seconds of any monotonic clock.
"""

import itertools
from dataclasses import dataclass, field
from typing import Final

from msgspec import UNSET
from msgspec.structs import replace

from pdcluster_connector.protocol.launcher_documents import (
    CanaryReport,
    CanaryState,
    LinkReport,
    LinkState,
    PeerEntry,
    PeersDocument,
    RankLink,
    RankReport,
)

REPORT_LIFETIME: Final = 15.0

Place = tuple[int, int]  # (pipeline, tensor)
Worker = tuple[int, int, int]  # (data, pipeline, tensor)
_Establishment = tuple[str, tuple[int, ...]]  # of which incarnation, and its numbers


@dataclass(frozen=True, slots=True)
class LinkRow:
    """One link of this decode engine: what the operator named, and what the workers report.

    Attributes:
        establishment: numbers that differ each time the link is established; empty while it is not.
    """

    peer: PeerEntry
    report: LinkReport
    establishment: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Kept:
    at: float
    links: dict[tuple[str, int], RankLink]  # by engine and data-parallel rank of the peer


@dataclass(slots=True)
class LinkTable:
    """Peers from the operator, reports from the workers, results from the canary.

    Attributes:
        shards: (pipeline, tensor) sizes of this engine; a report with other sizes is refused.
        data: its data-parallel size; a report of a higher rank is refused.
        peers: the operator's latest document.
    """

    shards: Place
    data: int = 1
    peers: PeersDocument = field(default_factory=lambda: PeersDocument(0, ()))
    _reports: dict[Worker, _Kept] = field(default_factory=dict)
    _canaries: dict[str, tuple[_Establishment, CanaryReport, float]] = field(default_factory=dict)

    def set_peers(self, document: PeersDocument) -> bool:
        """Take the operator's document; returns False if it changes nothing.

        The table's generation grows with every change, because workers wait for a new generation.
        It also grows if the operator has restarted and counts from the beginning again.
        """
        if document == replace(self.peers, generation=document.generation):
            return False
        generation = max(document.generation, self.peers.generation + 1)
        self.peers = replace(document, generation=generation)
        wanted = {peer.engine for peer in document.peers}
        self._canaries = {key: kept for key, kept in self._canaries.items() if key in wanted}
        return True

    def add(self, report: RankReport, now: float) -> str | None:
        """Take one worker's report; returns what is wrong with it, or None."""
        rank, of = report.rank, report.of
        if of != self.shards:
            return f"of is {list(of)}, but this engine has {list(self.shards)} workers"
        if any(not 0 <= place < size for place, size in zip(rank, of, strict=True)):
            return f"rank {list(rank)} is outside of {list(of)}"
        if report.data_rank >= self.data:
            return f"data_rank is {report.data_rank}, but data_parallel_size is {self.data}"
        links = {(link.engine, link.data_rank): link for link in report.links}
        self._reports[report.data_rank, *rank] = _Kept(now, links)
        return None

    def set_canary(self, row: LinkRow, result: CanaryReport, now: float) -> None:
        """Keep the result of a canary that was sent while the link was as in ``row``.

        The result counts only for that incarnation and that establishment. A link that was lost in
        the meantime, or that is lost later, needs another canary. A canary without a result
        changes nothing: the result before stands, and its age is reported.
        """
        engine, key = row.peer.engine, (row.report.prefill_engine_id, row.establishment)
        if not row.establishment or all(peer.engine != engine for peer in self.peers.peers):
            return
        tried, last, at = self._canaries.get(engine, (None, result, now))
        pending, passed = CanaryState.PENDING, CanaryState.PASSED
        if tried == key and result.state is pending and last.state is not pending:
            newer = f"no newer result: {result.message}"
            message = newer if last.state is passed else last.message
            result, now = replace(last, message=message, age_seconds=0), at
        self._canaries[engine] = key, result, now

    def rows(self, now: float) -> list[LinkRow]:
        """One row for each peer, in the operator's order."""
        return [self._row(peer, now) for peer in self.peers.peers]

    def why_none_works(self, now: float) -> str:
        """Return why no link brings KV; empty if one does or may, or if there is no peer."""
        reason = ""
        for peer, report in ((row.peer, row.report) for row in self.rows(now)):
            # Some data-parallel ranks may have failed, and others still bring KV.
            partly = self.data * peer.data_parallel_size > 1 and not report.shards.startswith("0/")
            if report.state is not LinkState.FAILED or partly:
                return ""
            reason = reason or report.reason
        return reason

    def _row(self, peer: PeerEntry, now: float) -> LinkRow:
        pipeline, tensor = map(range, self.shards)
        workers = itertools.product(range(self.data), pipeline, tensor)
        pairs = list(itertools.product(workers, peer.data_ranks))
        fresh: dict[tuple[Worker, int], RankLink] = {}
        late = now - REPORT_LIFETIME
        for worker, theirs in pairs:
            kept = self._reports.get(worker)
            if kept is not None and kept.at >= late:
                link = kept.links.get((peer.engine, theirs))
                if link is not None:
                    fresh[worker, theirs] = link
        established = [link for link in fresh.values() if link.state is LinkState.ESTABLISHED]
        failed = [pair for pair, link in fresh.items() if link.state is LinkState.FAILED]
        seen = {link.engine_id for link in established} or {fresh[p].engine_id for p in failed}
        state, reason, message = LinkState.PENDING, "", ""
        if failed:
            first = fresh[failed[0]]
            state, reason = LinkState.FAILED, first.reason
            message = self._ranks_named(peer, failed[0]) + first.message
        elif len(established) == len(pairs) and len(seen) == 1:
            state = LinkState.ESTABLISHED
            message = next((link.message for link in established if link.message), "")
        elif len(seen) > 1:
            message = f"the workers see several incarnations: {', '.join(sorted(seen))}"
        else:
            pending = [link for link in fresh.values() if link.state is LinkState.PENDING]
            reason = pending[0].reason if pending else ""
            unheard = dict.fromkeys(worker for worker, n in pairs if (worker, n) not in fresh)
            # They have reported before, but not lately.
            silent = [one for one in unheard if (kept := self._reports.get(one)) and kept.at < late]
            message = _waits_for(silent, list(unheard), pending)
        engine_id = seen.pop() if len(seen) == 1 else peer.engine_id
        establishment: tuple[int, ...] = ()
        if state is LinkState.ESTABLISHED:
            establishment = tuple(fresh[pair].establishment for pair in pairs)
        tried, canary, at = self._canaries.get(peer.engine, (None, CanaryReport(), 0.0))
        if tried != (engine_id, establishment):
            canary = CanaryReport()
        elif canary.age_seconds is not UNSET:
            canary = replace(canary, age_seconds=int(now - at))
        skews = [one for link in fresh.values() if (one := link.clock_skew_seconds) is not UNSET]
        rates = [link.receives for link in established if link.receives is not UNSET]
        report = LinkReport(
            peer.engine,
            engine_id,
            state,
            reason,
            f"{len(established)}/{len(pairs)}",
            min((link.bytes_per_second for link in established), default=0.0),
            canary,
            max(skews, key=abs, default=UNSET),
            max((link.descriptors or 0 for link in established), default=0) or UNSET,
            min(rates, key=lambda rate: rate.best, default=UNSET),
            message=message,
        )
        return LinkRow(peer, report, establishment)

    def _ranks_named(self, peer: PeerEntry, pair: tuple[Worker, int]) -> str:
        """Say which data-parallel ranks a message is about; empty if there is only one."""
        (own, _, _), theirs = pair
        ends = []
        if peer.data_parallel_size > 1:
            ends.append(f"prefill's data-parallel rank {theirs}")
        if self.data > 1:
            ends.append(f"decode's data-parallel rank {own}")
        return f"{', '.join(ends)}: " if ends else ""


def _waits_for(silent: list[Worker], unheard: list[Worker], pending: list[RankLink]) -> str:
    """Say what a link waits for: workers that stopped reporting, a first report, or a handshake."""
    if silent:
        return f"no report in the last {REPORT_LIFETIME:.0f} s from {_named(silent)}"
    if unheard:
        return f"first report pending from {_named(unheard)}"
    messages = (link.message for link in pending if link.message)
    return next(messages, "the handshake is under way")


def _named(workers: list[Worker]) -> str:
    named = ", ".join(",".join(map(str, worker)) for worker in workers[:8])
    more = f" and {len(workers) - 8} more" if len(workers) > 8 else ""
    return f"worker (data,pipeline,tensor) {named}{more}"
