"""What the connector counts, in vLLM's connector-stats form.

Both roles fill a :class:`StatsCollector`. vLLM takes a snapshot in each step and sums the snapshots
of all workers and the scheduler side. It hands the sum to the API server as a plain dict. The base
units are bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from pdcluster_connector.protocol.prompt_outcomes import Outcome, is_fault, label_of

PHASES: Final = ("handshake", "post", "transfer", "fence", "total")
MAX_SAMPLES: Final = 4096  # for each phase and interval; more samples are dropped
_COUNTS: Final = ("failures", "local_prompt_tokens", "faults")
_GAUGES: Final = ("leases_held", "local_prompts_waiting")


def _empty() -> dict[str, Any]:
    return {
        "received_bytes": 0,
        "seconds": {phase: [] for phase in PHASES},
        "failures": {},
        "prompts": {},
        "local_prompt_tokens": {},
        "faults": {},
        "leases_expired": 0,
        "leases_held": None,
        "local_prompts_waiting": None,
        "local_prompt_waits": [],
    }


@dataclass
class ConnectorStats(KVConnectorStats):
    """One interval's counts.

    ``data``: ``received_bytes``; ``seconds`` by phase, a list of samples; ``failures`` by
    reason; ``prompts`` by outcome and reason (protocol.prompt_outcomes); ``local_prompt_tokens`` by
    reason; ``faults`` by method (exceptions caught in engine
    steps); ``leases_expired``; ``leases_held`` and ``local_prompts_waiting`` (None where nothing
    changed); ``local_prompt_waits``, a list of seconds.
    """

    data: dict[str, Any] = field(default_factory=_empty)

    def reset(self) -> None:
        """Forget everything."""
        self.data = _empty()

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return self.data == _empty()

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Add another interval's or rank's counts to this one."""
        theirs = other.data
        self.data["received_bytes"] += theirs["received_bytes"]
        self.data["leases_expired"] += theirs["leases_expired"]
        for gauge in _GAUGES:
            if theirs[gauge] is not None:
                self.data[gauge] = theirs[gauge]
        _extend(self.data["local_prompt_waits"], theirs["local_prompt_waits"])
        for phase, samples in theirs["seconds"].items():
            _extend(self.data["seconds"].setdefault(phase, []), samples)
        for name in _COUNTS:
            for label, count in theirs[name].items():
                self.data[name][label] = self.data[name].get(label, 0) + count
        for outcome, counts in theirs["prompts"].items():
            sums = self.data["prompts"].setdefault(outcome, {})
            for reason, count in counts.items():
                sums[reason] = sums.get(reason, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Summary for vLLM's periodic log line."""
        total = self.data["seconds"]["total"]
        return {
            "received MB": round(self.data["received_bytes"] / 1e6, 3),
            "receives": len(total),
            "mean seconds": round(sum(total) / len(total), 4) if total else 0.0,
            "failures": sum(self.data["failures"].values()),
            "prompts computed here": sum(
                count
                for outcome, counts in self.data["prompts"].items()
                for reason, count in counts.items()
                if is_fault(outcome, reason)
            ),
            "leases expired": self.data["leases_expired"],
            "faults": sum(self.data["faults"].values()),
        }


class StatsCollector:
    """Counts of one role until vLLM asks for them. Used from one thread."""

    def __init__(self) -> None:
        self._stats = ConnectorStats()
        self._gauges = dict.fromkeys(_GAUGES, 0)

    def receives(
        self, nbytes: int, phase_seconds: Mapping[str, Sequence[float]], failures: Mapping[str, int]
    ) -> None:
        """Add receives that ended on this rank: bytes, seconds by phase, failures by reason."""
        self._stats.data["received_bytes"] += nbytes
        for phase, values in phase_seconds.items():
            _extend(self._stats.data["seconds"].setdefault(phase, []), values)
        for reason, count in failures.items():
            self._count("failures", str(reason), count)

    def prompt(self, outcome: Outcome, reason: str, tokens: int) -> None:
        """Count a request's prompt. ``tokens`` of it were computed here, or are about to be."""
        reason = label_of(outcome, reason)
        counts = self._stats.data["prompts"].setdefault(outcome.value, {})
        counts[reason] = counts.get(reason, 0) + 1
        if tokens and is_fault(outcome, reason):
            self._count("local_prompt_tokens", reason, tokens)

    def fault(self, method: str) -> None:
        """Count an exception that the guard caught."""
        self._count("faults", method)

    def lease_expired(self) -> None:
        """Count a lease that nobody released in time."""
        self._stats.data["leases_expired"] += 1

    def leases_held(self, count: int) -> None:
        """Record how many leases keep blocks from reuse."""
        self._set("leases_held", count)

    def local_prompts_waiting(self, count: int) -> None:
        """Record how many prompts wait for this engine to compute them."""
        self._set("local_prompts_waiting", count)

    def local_prompt_waited(self, seconds: float) -> None:
        """Add a prompt that this engine let wait so long."""
        _extend(self._stats.data["local_prompt_waits"], [seconds])

    def take(self) -> ConnectorStats | None:
        """Counts since the last call; None if nothing happened."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, ConnectorStats()
        return taken

    def _set(self, gauge: str, count: int) -> None:
        if count != self._gauges[gauge]:
            self._gauges[gauge] = self._stats.data[gauge] = count

    def _count(self, name: str, label: str, count: int = 1) -> None:
        counts = self._stats.data[name]
        counts[label] = counts.get(label, 0) + count


def _extend(samples: list[float], more: Sequence[float]) -> None:
    samples.extend(more[: max(0, MAX_SAMPLES - len(samples))])
