"""Small HTTP servers of a process: health for the kubelet, metrics for Prometheus."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from aiohttp import web

from pdcluster_operator.adapters.metrics import Metrics


async def serve_pages(
    stack: AsyncExitStack,
    *,
    host: str,
    health_port: int,
    metrics_port: int,
    readiness: Callable[[], Awaitable[str | None]],
    metrics: Metrics,
) -> None:
    """Serve ``/healthz`` and ``/readyz`` on one port and ``/metrics`` on another.

    Args:
        stack: the servers end with it.
        readiness: returns why the process is not ready; None when it is.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        wrong = await readiness()
        return web.Response(status=200 if wrong is None else 503, text=f"{wrong or 'ok'}\n")

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(
            body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    health, numbers = web.Application(), web.Application()
    health.router.add_get("/healthz", healthz)
    health.router.add_get("/readyz", readyz)
    numbers.router.add_get("/metrics", exposition)
    for app, port in ((health, health_port), (numbers, metrics_port)):
        # Cancelled while it opens a port, aiohttp would leave the port open.
        listener = stack.enter_context(socket.create_server((host, port)))
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listener).start()
