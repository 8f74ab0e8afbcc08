"""What the launcher asks its engine again and again: its health, its work, and what it counts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from pdcluster_connector.launcher.drain import Calm, Work
from pdcluster_connector.launcher.engine_api import ApiError, ApiUnreachableError, EngineApi
from pdcluster_connector.launcher.prompt_window import PromptWindow, count_prompts
from pdcluster_connector.launcher.readiness import Readiness

_LOADING_POLL: Final = 0.25
_SERVING_POLL: Final = 1.0
_DRAIN_POLL: Final = 0.5
_PROMPTS_POLL: Final = 10.0
_PATIENCE: Final = 3
_NO_ANSWER: Final = (ApiError, ApiUnreachableError, TimeoutError)


async def watch_health(api: EngineApi, readiness: Readiness) -> None:
    """Keep ``readiness`` up to date with what ``/health`` says. Runs until cancelled."""
    failures = 0
    while True:
        try:
            await api.health()
        except _NO_ANSWER as error:
            failures += 1
            if failures >= _PATIENCE:
                readiness.unhealthy(str(error) or "/health did not answer in time")
        else:
            failures = 0
            readiness.healthy()
        await asyncio.sleep(_LOADING_POLL if readiness.loading else _SERVING_POLL)


async def keep_counting(api: EngineApi, readiness: Readiness, window: PromptWindow) -> None:
    """Keep the counts of prompts in ``window`` up to date. Runs until cancelled."""
    while True:
        if not readiness.loading:
            # An engine that does not answer is the health check's matter.
            with contextlib.suppress(*_NO_ANSWER):
                metrics = (await api.metrics()).decode(errors="replace")
                window.add(count_prompts(metrics), time.monotonic())
        await asyncio.sleep(_LOADING_POLL if readiness.loading else _PROMPTS_POLL)


async def wait_until_idle(
    api: EngineApi, readiness: Readiness, deadline: float, *, forever: bool = False
) -> None:
    """Wait until nothing is left to do, and nothing more comes; say in ``readiness`` what is left.

    Args:
        deadline: when to stop waiting, in seconds of the monotonic clock.
        forever: go on when nothing is left: the engine stays drained.
    """
    readiness.draining("draining")
    calm, ends = Calm(time.monotonic()), False
    while time.monotonic() < deadline and (forever or not ends):
        left: Work | None = None
        try:
            left = await api.work()
        except _NO_ANSWER as error:
            readiness.draining(f"the engine's work is not known: {error}")
        else:
            readiness.draining(str(left))
        ends = calm.seen(left, time.monotonic())
        await asyncio.sleep(_DRAIN_POLL)
