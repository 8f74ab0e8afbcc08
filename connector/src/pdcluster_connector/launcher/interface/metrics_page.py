"""The engine's metrics on a port of their own.

vLLM shows its metrics on the port of its API. A scraper that reaches it could also send requests. A
NetworkPolicy can open this port to scrapers and the API's port to the router only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from pdcluster_connector.launcher.engine.engine_api import ApiError, ApiUnreachableError

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text format


class MetricsPage:
    """Serves ``GET /metrics`` and nothing else.

    Args:
        fetch: reads the engine's metrics, in Prometheus' text format.
    """

    def __init__(self, fetch: Callable[[], Awaitable[bytes]]) -> None:
        self._fetch = fetch
        self._asked: asyncio.Future[bytes] | None = None
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
            text = await self._ask_once()
        except TimeoutError:
            return web.Response(status=503, text="the engine's /metrics did not answer in time\n")
        except (ApiError, ApiUnreachableError) as error:
            return web.Response(status=503, text=f"{error}\n")
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _ask_once(self) -> bytes:
        """Ask the engine, or wait for the answer to a request that is already under way.

        The engine gets one request, even if many scrapers ask at the same time.
        """
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(self._fetch())
        return await asyncio.shield(self._asked)
