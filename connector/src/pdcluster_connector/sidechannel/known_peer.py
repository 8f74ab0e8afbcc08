"""What the peer book knows of one peer, and who waits for its handshake."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.sidechannel.handshake import TryAgain

logger = logging.getLogger(__name__)

Done = Callable[[EngineMetadata | Failure], None]


@dataclass(eq=False, slots=True)
class Waiter:
    """Who waits for a handshake, and until when (``time.monotonic`` seconds).

    A lease that is renewed moves the deadline.
    """

    done: Done
    deadline: Callable[[], float]
    timer: asyncio.TimerHandle | None = None

    def tell(self, outcome: EngineMetadata | Failure) -> None:
        """Say how the handshake ended."""
        if self.timer is not None:
            self.timer.cancel()
        call(self.done, outcome)


@dataclass(eq=False, slots=True)
class KnownPeer:
    """One incarnation of an engine.

    Attributes:
        answer: how its handshake ended; None while nobody knows.
        last_error: why the last attempt did not succeed.
        task: shakes hands, and then watches the peer.
    """

    engine_id: str
    host: str
    port: int
    waiters: list[Waiter] = field(default_factory=list)
    answer: EngineMetadata | Failure | None = None
    last_error: TryAgain | None = None
    task: asyncio.Task[None] | None = None

    def tell_all(self, outcome: EngineMetadata | Failure) -> None:
        """Say to everyone who waits how the handshake ended."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.tell(outcome)


def call(callback: Callable[..., None], *args: object) -> None:
    """Call a listener. A fault of it must not end the peers' thread."""
    try:
        callback(*args)
    except Exception:
        logger.exception("a callback of the peer book failed")
