"""One live request of a decode engine: how far its KV has come, and what its client learns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pdcluster_connector.plan.held_blocks import GroupBlocks
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.vllm.kv_caches.groups import CacheGroup
from pdcluster_connector.vllm.step_messages import Receipt


class Stage(Enum):
    """How far a request's KV has come."""

    WAITING = "waiting"  # not scheduled yet; its ticket is good
    PARKED = "parked"  # waits for its KV
    SETTLED = "settled"  # received, failed or local: nothing will be loaded again


@dataclass(slots=True)
class Incoming:
    """One live request. ``reason`` says why its KV does not come from a prefill engine.

    ``named``: the answer names the engines that its KV moved between.
    ``computed``: tokens of it in this engine's prefix cache when vLLM last asked.
    ``held``: the ticket's lease is renewed, and released when the request no longer needs it.
    ``repeated``: what the answer repeats of the request.
    """

    ticket: Ticket | None
    stage: Stage
    reason: str = ""
    message: str = ""
    held: bool = False
    repeated: Mapping[str, Any] = field(default_factory=dict)
    counted: bool = False
    computed: int = 0
    start: int = 0
    stop: int = 0
    blocks: int = 0
    receipt: Receipt | None = None
    outcome: str = "local"
    named: bool = False

    def park(
        self,
        groups: Sequence[CacheGroup],
        blocks: tuple[list[int], ...],
        stop: int,
        external_tokens: int,
    ) -> tuple[GroupBlocks, ...]:
        """Wait for tokens that end at ``stop``; return the blocks for them, for each group.

        The ticket covers [0, ``stop``). What vLLM has not asked for is a local prefix hit.
        """
        self.start, self.stop = stop - external_tokens, stop
        held = tuple(
            group.holding(ids, self.start, self.stop)
            for group, ids in zip(groups, blocks, strict=True)
        )
        self.blocks = sum(block > 0 for group in held for block in group.blocks)
        self.stage = Stage.PARKED
        return held

    def path(self, decode: str) -> dict[str, Any]:
        """Return what the answer says of the KV's way; ``decode`` is this engine's id."""
        receipt = self.receipt or Receipt(0, 0.0)
        moved = self.outcome == "transferred"
        return {
            "prefill": self.ticket.engine_id if self.ticket else "",
            "decode": decode,
            "tokens": self.stop - self.start if moved else 0,
            "blocks": self.blocks if moved else 0,
            "bytes": receipt.nbytes,
            "seconds": round(receipt.seconds, 6),
            "outcome": self.outcome,
            "reason": str(self.reason),
            "message": self.message[:500],
        }
