"""The limits of the receiving side, and how a worker ends that has reached the last of them."""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


def exit_process(message: str) -> None:
    """End this worker: its blocks can neither be kept forever nor be freed safely."""
    logger.critical("the worker ends: %s", message)
    sys.stderr.flush()
    os._exit(70)  # EX_SOFTWARE; the launcher starts the engine anew


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """Limits of the receiving side.

    Attributes:
        drain_deadline_seconds: how long a failed request may wait for its transfers before
            the reading agent is destroyed, and a new one for transfers over a broken connection.
        transfer_stall_seconds: how long a request may have transfers under way of which none
            lands. One transfer may be slow: it waits behind those of other requests.
        descriptors_per_transfer: larger requests are posted in several transfers, so that other
            requests are served in between; posting takes about 10 microseconds a descriptor.
        probe_seconds: how long a warm-up or a probe may take.
        check_seconds: how long a check may take: a small read over an idle connection.
        stall_seconds: how long one call of NIXL may last before the worker ends.
        fatal: called when transfers can no longer be stopped; must not return in production.
    """

    drain_deadline_seconds: float = 30.0
    transfer_stall_seconds: float = 300.0
    descriptors_per_transfer: int = 1024
    probe_seconds: float = 10.0
    check_seconds: float = 5.0
    stall_seconds: float = 120.0
    fatal: Callable[[str], None] = exit_process
