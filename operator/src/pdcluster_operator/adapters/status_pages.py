"""Small HTTP servers of a process: health for the kubelet, metrics for Prometheus."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

from aiohttp import web

from pdcluster_operator.adapters.metrics import Metrics

log = logging.getLogger(__name__)

Check = Callable[[], Awaitable[str | None]]
"""Returns what is wrong; None when all is well."""


async def serve_pages(
    stack: AsyncExitStack,
    *,
    host: str,
    health_port: int,
    metrics_port: int,
    checks: Mapping[str, Check],
    metrics: Metrics,
) -> None:
    """Serve ``checks`` by path on one port and ``/metrics`` on another, until the stack ends."""

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(
            body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    health = web.Application()
    for path, check in checks.items():
        health.router.add_get(path, _page(check))
    numbers = web.Application()
    numbers.router.add_get("/metrics", exposition)
    for app, port in ((health, health_port), (numbers, metrics_port)):
        # Cancelled while it opens a port, aiohttp would leave the port open.
        listener = stack.enter_context(socket.create_server((host, port)))
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listener).start()


def _page(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def page(_: web.Request) -> web.Response:
        wrong = await check()
        return web.Response(status=200 if wrong is None else 503, text=f"{wrong or 'ok'}\n")

    return page
