"""A receive as an engine's scheduler side orders it of the workers, and the receipt for it."""

from dataclasses import dataclass
from typing import Self

from pdcluster_connector.plan.block_pairs import GroupBlocks
from pdcluster_connector.protocol.ticket import Ticket

# How long a step that computes nothing waits: its scheduler side for the answer to a claim, its
# workers for a receive's end. vLLM sleeps for a millisecond after each such step, and what comes
# just after one would wait for the end of the next one.
IDLE_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
    """Fill a parked request's blocks.

    Attributes:
        request_id: decode's own id of the request; reported exactly once.
        ticket: where its KV waits.
        blocks: logical blocks for each KV cache group, of the tokens wanted.
        start, stop: tokens wanted: ``[start, stop)``.
        seconds: time left until the lease ends unless it is renewed.
        claimed: whether prefill has acknowledged the lease for this engine.
    """

    request_id: str
    ticket: Ticket
    blocks: tuple[GroupBlocks, ...]
    start: int
    stop: int
    seconds: float
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a request's receive, on one rank or summed over ranks.

    ``seconds`` is the longest of any rank; ``reason`` is empty unless it failed.
    """

    nbytes: int
    seconds: float
    reason: str = ""
    message: str = ""

    def __add__(self, other: Self) -> Self:
        first = self if self.reason else other
        return type(self)(
            nbytes=self.nbytes + other.nbytes,
            seconds=max(self.seconds, other.seconds),
            reason=first.reason,
            message=first.message,
        )
