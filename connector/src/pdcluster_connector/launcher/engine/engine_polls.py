"""What the launcher asks its engine again and again: its health, and what it counts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from pdcluster_connector.launcher.engine.engine_api import NO_ANSWER, EngineApi
from pdcluster_connector.launcher.engine.prompt_window import PromptWindow, count_prompts
from pdcluster_connector.launcher.engine.readiness import Readiness

_LOADING_POLL: Final = 0.25
_SERVING_POLL: Final = 1.0
_PROMPTS_POLL: Final = 10.0
_PATIENCE: Final = 3


async def watch_health(api: EngineApi, readiness: Readiness) -> None:
    """Keep ``readiness`` up to date with what ``/health`` says. Runs until cancelled."""
    failures = 0
    while True:
        try:
            await api.health()
        except NO_ANSWER as error:
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
            with contextlib.suppress(*NO_ANSWER):
                metrics = (await api.metrics()).decode(errors="replace")
                window.add(count_prompts(metrics), time.monotonic())
        await asyncio.sleep(_LOADING_POLL if readiness.loading else _PROMPTS_POLL)
