"""A drain: the engine serves on until it has nothing left to do, and will get nothing more.

``engine_api.py`` says what it still has to do. ``launcher/supervisor.py`` decides when a drain
begins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from pdcluster_connector.launcher.engine.engine_api import NO_ANSWER, EngineApi, Work
from pdcluster_connector.launcher.engine.readiness import Readiness

_POLL: Final = 0.5
SETTLE_SECONDS: Final = 3.0
"""For so long at least an engine serves on when it is told to end."""
FORGET_SECONDS: Final = 60.0
"""For so long at most an engine serves on because routers may still send it requests.

The operator replaces the routers by new ones that do not know it. It says when that is done, mostly
after half a minute. A router of the user's has as long to notice. After that, new requests are
turned away.
"""
QUIET_SECONDS: Final = 2.0
"""For so long no request may have finished: then no router sends any more."""


async def wait_until_idle(
    api: EngineApi,
    readiness: Readiness,
    deadline: float,
    close: Callable[[], None],
    *,
    forever: bool = False,
) -> None:
    """Wait until nothing is left to do, and nothing more comes; say in ``readiness`` what is left.

    Args:
        deadline: when to stop waiting, in seconds of the monotonic clock.
        close: has new requests turned away. It is called more than once.
        forever: go on when nothing is left: the engine stays drained.
    """
    readiness.draining("draining")
    began = time.monotonic()
    calm, ends = Calm(began), False
    while time.monotonic() < deadline and (forever or not ends):
        left: Work | None = None
        try:
            left = await api.work()
        except NO_ANSWER as error:
            readiness.draining(f"the engine's work is not known: {error}")
        else:
            readiness.draining(str(left))
        ends = calm.seen(left, time.monotonic(), routed=readiness.routed)
        # While a router of the operator's sends requests, each that is turned away would fail.
        if not readiness.routed and time.monotonic() - began >= FORGET_SECONDS:
            close()
        await asyncio.sleep(_POLL)


class Calm:
    """Tells when an engine that drains has nothing left to do, and will get nothing more.

    A moment without work is not enough: the next request may be on its way.

    Args:
        now: when the drain began, in seconds of any clock.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._since = now
        self._finished: int | None = None

    def seen(self, work: Work | None, now: float, *, routed: bool = False) -> bool:
        """Take in the work of this moment, None if it is not known; return whether all is calm.

        Args:
            routed: routers may still send requests.
        """
        if work is None or not work.done or work.finished != self._finished:
            self._since = now
        if work is not None:
            self._finished = work.finished
        settled = now - self._began >= (FORGET_SECONDS if routed else SETTLE_SECONDS)
        return settled and now - self._since >= QUIET_SECONDS
