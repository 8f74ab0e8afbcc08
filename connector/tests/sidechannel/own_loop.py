"""Stands in for a thread with a loop: calls run on the test's own loop, in its virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def now() -> float:
    return asyncio.get_running_loop().time()


class Here:
    """See :class:`pdcluster_connector.sidechannel.loop_thread.LoopThread`."""

    alive = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def call(self, callback: Callable[..., object], *args: object) -> bool:
        callback(*args)
        return True

    def stop(self) -> None: ...
