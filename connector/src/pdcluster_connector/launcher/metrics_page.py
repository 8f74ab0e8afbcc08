"""The engine's metrics on a port of their own.

vLLM shows its metrics on the port of its API, so whoever may scrape may also send requests. A
NetworkPolicy can open this port to scrapers and leave the API to the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from pdcluster_connector.launcher.engine_api import ApiError, ApiUnreachableError

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text format


class MetricsPage:
    """Serves ``GET /metrics`` and nothing else.

    Args:
        fetch: reads the engine's metrics, in Prometheus' text format.
    """

    def __init__(self, fetch: Callable[[], Awaitable[bytes]]) -> None:
        self._fetch = fetch
        # However many scrape, the engine is asked one question at a time.
        self._one_at_a_time = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen; raises OSError where the address cannot be bound."""
        app = web.Application(client_max_size=1)
        app.router.add_get("/metrics", self._get_metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, host or None, port).start()

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _get_metrics(self, _: web.Request) -> web.Response:
        try:
            async with self._one_at_a_time:
                text = await self._fetch()
        except TimeoutError:
            return web.Response(status=503, text="the engine's /metrics is too slow\n")
        except (ApiError, ApiUnreachableError) as error:
            return web.Response(status=503, text=f"{error}\n")
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})
