"""The link table: many workers' reports become one row for each prefill engine. Pure.

Time comes in as an argument, in seconds of any monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from msgspec.structs import replace

from pdcluster_connector.protocol.links import (
    LinkReport,
    LinkState,
    PeerEntry,
    PeersDocument,
    RankReport,
)

REPORT_LIFETIME: Final = 15.0
MAX_MESSAGE: Final = 1000

CanaryState = Literal["Pending", "Passed", "Failed"]
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """What became of the latest request that was sent through a link. ``bytes`` of KV moved."""

    state: CanaryState = "Pending"
    bytes: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class LinkRow:
    """One link (prefill engine, this decode engine), over all of this engine's workers.

    Attributes:
        peer: the prefill engine as the operator named it.
        engine_id: its incarnation as the workers see it, else the operator's.
        state: Established only when every worker said so of one incarnation; Failed when any did.
        reason: of the lowest rank that failed.
        message: its message, or what the link waits for.
        shards: ``2/4``: workers that are established, of all.
        bytes_per_second: the slowest worker's, since a request waits for the slowest.
        canary: the latest canary's result since the link was established.
        establishment: the workers' numbers of it, another each time; empty while it is not.
    """

    peer: PeerEntry
    engine_id: str
    state: LinkState
    reason: str
    message: str
    shards: str
    bytes_per_second: float
    canary: CanaryResult
    establishment: tuple[int, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the row as ``GET /v1/links`` shows it."""
        return {
            "prefill": self.peer.engine,
            "prefill_engine_id": self.engine_id,
            "state": self.state.value,
            "reason": self.reason,
            "message": self.message[:MAX_MESSAGE],
            "shards": self.shards,
            "bytes_per_second": self.bytes_per_second,
            "canary": {
                "state": self.canary.state,
                "bytes": self.canary.bytes,
                "message": self.canary.message[:MAX_MESSAGE],
            },
        }


@dataclass(frozen=True, slots=True)
class _Kept:
    at: float
    links: dict[str, LinkReport]


@dataclass(slots=True)
class LinkTable:
    """Peers from the operator, reports from the workers, results from the canary.

    Attributes:
        shards: (pipeline, tensor) sizes of this engine; a report of other sizes is refused.
        peers: the operator's latest document.
    """

    shards: Place
    peers: PeersDocument = field(default_factory=lambda: PeersDocument(0, ()))
    _reports: dict[Place, _Kept] = field(default_factory=dict)
    _canaries: dict[str, tuple[str, tuple[int, ...], CanaryResult]] = field(default_factory=dict)

    def set_peers(self, document: PeersDocument) -> bool:
        """Take the operator's document; False if it says what is known already.

        The kept generation grows with every change, also when a restarted operator counts from
        anew: workers wait for a generation other than theirs.
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
        self._reports[rank] = _Kept(now, {link.engine: link for link in report.links})
        return None

    def set_canary(self, row: LinkRow, result: CanaryResult) -> None:
        """Keep the result of a canary that was sent while the link stood as ``row`` says.

        It counts for that incarnation and that establishment: a link that was lost meanwhile,
        or is lost later, needs another canary.
        """
        engine = row.peer.engine
        if row.establishment and any(peer.engine == engine for peer in self.peers.peers):
            self._canaries[engine] = row.engine_id, row.establishment, result

    def rows(self, now: float) -> list[LinkRow]:
        """One row for each peer, in the operator's order."""
        return [self._row(peer, now) for peer in self.peers.peers]

    def _row(self, peer: PeerEntry, now: float) -> LinkRow:
        pipeline, tensor = self.shards
        places = [(p, t) for p in range(pipeline) for t in range(tensor)]
        fresh: dict[Place, LinkReport] = {}
        for place in places:
            kept = self._reports.get(place)
            if kept is not None and now - kept.at <= REPORT_LIFETIME and peer.engine in kept.links:
                fresh[place] = kept.links[peer.engine]
        established = [link for link in fresh.values() if link.state is LinkState.ESTABLISHED]
        failed = [link for link in fresh.values() if link.state is LinkState.FAILED]
        seen = {link.engine_id for link in established} or {link.engine_id for link in failed}
        state, reason, message = LinkState.PENDING, "", ""
        if failed:
            state, reason, message = LinkState.FAILED, failed[0].reason, failed[0].message
        elif len(established) == len(places) and len(seen) == 1:
            state = LinkState.ESTABLISHED
        elif len(seen) > 1:
            message = f"the workers see several incarnations: {', '.join(sorted(seen))}"
        else:
            pending = [link for link in fresh.values() if link.state is LinkState.PENDING]
            reason = pending[0].reason if pending else ""
            message = _waits_for([place for place in places if place not in fresh], pending)
        engine_id = seen.pop() if len(seen) == 1 else peer.engine_id
        establishment: tuple[int, ...] = ()
        if state is LinkState.ESTABLISHED:
            establishment = tuple(fresh[place].establishment for place in places)
        *tried, canary = self._canaries.get(peer.engine, ("", (), CanaryResult()))
        return LinkRow(
            peer,
            engine_id,
            state,
            reason,
            message,
            f"{len(established)}/{len(places)}",
            min((link.bytes_per_second for link in established), default=0.0),
            canary if tried == [engine_id, establishment] else CanaryResult(),
            establishment,
        )


def _waits_for(silent: list[Place], pending: list[LinkReport]) -> str:
    if not silent:
        messages = (link.message for link in pending if link.message)
        return next(messages, "the handshake is under way")
    named = ", ".join(f"{p},{t}" for p, t in silent[:8])
    more = f" and {len(silent) - 8} more" if len(silent) > 8 else ""
    return (
        f"no report in the last {REPORT_LIFETIME:.0f} s from worker (pipeline,tensor) {named}{more}"
    )
