"""The states of a receive, what can happen to it, and what its executor has to do next.

:mod:`pdcluster_connector.protocol.receive_machine` is the machine between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from pdcluster_connector.protocol.failure import Failure


class State(StrEnum):
    """Where a receive stands."""

    NEW = "new"
    HANDSHAKE = "handshake"
    POSTED = "posted"
    FENCE = "fence"
    DONE = "done"
    QUARANTINE = "quarantine"
    FAILED = "failed"


class Action(Enum):
    """What the executor has to do next."""

    CONNECT = "find the peer and prepare its descriptor lists"
    POST = "post the transfers, each between an Opened and, at the end, one Posted"
    FENCE = "post the reads of the lease words, in the same way"
    DESTROY_AGENT = "destroy the reading agent: nothing else stops what is still under way"
    REPORT = "tell the engine: DONE or FAILED, with failure"


@dataclass(frozen=True, slots=True)
class Started:
    """The engine handed the request over."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The peer is known and its descriptor lists are prepared."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Transfer ``transfer`` is about to be posted.

    It may be posted only if the machine has it in ``Receive.open`` afterwards: the lease may have
    ended in this very moment.
    """

    transfer: int


@dataclass(frozen=True, slots=True)
class Posted:
    """No further transfer will be opened."""


@dataclass(frozen=True, slots=True)
class Landed:
    """Transfer ``transfer`` was seen done: all its bytes are there; a lease word is right."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Broken:
    """Transfer ``transfer`` can write no more and is of no use.

    It met a transport error, was never posted, or brought a wrong lease word.
    """

    transfer: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Prefill has renewed the lease for this engine: it stands until ``until``."""

    until: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Something else went wrong: handshake, plan, a peer that is gone, an exception."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The engine gave the request up (abort)."""


@dataclass(frozen=True, slots=True)
class AgentDestroyed:
    """The agent that ran this request's transfers is gone, and its DMA with it.

    Attributes:
        crashed: whether the transfer thread failed. If not, another request's transfer hung.
    """

    failure: Failure
    crashed: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    Started
    | Connected
    | Opened
    | Posted
    | Landed
    | Broken
    | Acknowledged
    | Failed
    | Abandoned
    | AgentDestroyed
    | Tick
)
