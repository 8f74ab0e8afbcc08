"""Judges what became of requests by one history: what each prompt's KV is.

The connector may fail a request, and a policy may have it computed anew; it must never go on with
bytes that are not the request's own. :class:`Judge` counts what it saw, in one table.
"""

from collections import Counter
from enum import StrEnum

from pdcluster_connector.testing.engines import DecodeEngine, Fetch


class Verdict(StrEnum):
    """What became of a request. The last two are faults."""

    RIGHT = "right"  # its KV was fetched, and every byte or token is its own
    FAILED = "failed"  # a named reason, and nothing of it is used
    RECOMPUTED = "recomputed"  # not fetched, but computed as the policy says: all of it is right
    LOST = "lost with its engine"  # whoever waits for it sees the connection end
    WRONG = "WRONG"  # bytes were believed, or tokens answered, that are not its own
    HANGING = "HANGING"  # it never ended


FAULTS = frozenset({Verdict.WRONG, Verdict.HANGING})


class Judge:
    """Gives verdicts and counts them. ``counts`` has (situation, verdict, reason) as keys."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, Verdict, str]] = Counter()

    def judge(
        self,
        situation: str,
        engine: DecodeEngine,
        request_id: str,
        *,
        recompute: bool = False,
        lost: bool = False,
    ) -> Verdict:
        """Judge one request, and free the blocks of one that has ended.

        Args:
            situation: what the request is counted under.
            recompute: the policy: compute its KV anew when it could not be fetched.
            lost: its engine is dead.
        """
        fetch = engine.fetches[request_id]
        if lost:
            verdict = Verdict.LOST
        elif not fetch.ended:
            verdict = Verdict.HANGING
        elif fetch.failure is None:
            verdict = Verdict.RIGHT if engine.right(request_id) else Verdict.WRONG
        elif recompute:
            _compute(engine, fetch)
            verdict = Verdict.RECOMPUTED if engine.right(request_id) else Verdict.WRONG
        else:
            verdict = Verdict.FAILED
        reason = fetch.failure.reason.value if fetch.failure is not None and not lost else ""
        self.count(situation, verdict, reason)
        if fetch.ended and not lost:
            engine.forget(request_id)
        return verdict

    def count(self, situation: str, verdict: Verdict, reason: str = "") -> None:
        """Count a verdict that was reached elsewhere."""
        self.counts[situation, verdict, reason] += 1

    @property
    def faults(self) -> dict[tuple[str, Verdict, str], int]:
        """Return what must not be."""
        return {key: count for key, count in self.counts.items() if key[1] in FAULTS}

    def table(self) -> str:
        """Return the counts as a table in Markdown."""
        rows: dict[str, list[str]] = {}
        for (situation, verdict, reason), count in sorted(self.counts.items()):
            named = f"{count} {verdict}" + (f" ({reason})" if reason else "")
            rows.setdefault(situation, []).append(named)
        lines = [f"| {situation} | {', '.join(found)} |" for situation, found in rows.items()]
        return "\n".join(["| situation | requests |", "|---|---|", *lines])


def _compute(engine: DecodeEngine, fetch: Fetch) -> None:
    if not fetch.blocks:  # it was refused before it got any
        fetch.blocks = [engine.free.pop() for _ in range(engine.size.blocks_of(fetch.tokens))]
    for cache in engine.caches:
        cache.write(fetch.seed, fetch.blocks, fetch.tokens)
