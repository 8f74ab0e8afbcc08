"""All launchers of all simulated pods, in one process.

One server listens on every address of 127/8, and sees at which address a request came in. Each
engine is ready after a few seconds. Each link that the operator asks for is established and has had
its canary.
It answers as `pdcluster_connector.launcher` does, and keeps a question for news as long. With
``--tls``, it speaks TLS as that does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from bench_operator.certificates import Certificates, follow_secrets, known_clients
from bench_operator.watching import events
from pdcluster_operator.adapters.engines_http import use_small_buffers
from pdcluster_operator.api.object_names import LAUNCHER_PORT, engine_of

PATIENCE = 1.5
LOAD_SECONDS = 3.0
"""How long an engine starts."""
SILENT = "silent"
"""While this file is in the folder, the launchers of half of the PDClusters are silent."""
INCARNATION = "0123456789abcdef"


def may_be_silent(engine: str) -> bool:
    """Whether an engine, or all of a PDCluster that is given as NAMESPACE.NAME, may be silent."""
    cluster = ".".join(engine.split(".")[:2])
    return zlib.crc32(cluster.encode()) % 2 == 0


class Launcher:
    """What one launcher knows: its engine, and the peers that it was told."""

    def __init__(self, engine: str, certificates: Certificates) -> None:
        self.engine = engine
        self._certificates = certificates
        self.peers: list[dict[str, Any]] = []
        self._told = 0
        self._loaded = time.monotonic() + LOAD_SECONDS
        self.news = asyncio.Event()
        self.may_be_silent = may_be_silent(engine)

    @property
    def known(self) -> dict[str, Any]:
        return {"engine": self.engine, "engine_id": f"{self.engine}/{INCARNATION}"}

    @property
    def loads(self) -> float:
        """For how many more seconds the engine starts."""
        return max(0.0, self._loaded - time.monotonic())

    @property
    def state(self) -> dict[str, Any]:
        ready = not self.loads
        state = "Ready" if ready else "Starting"
        expires = self._certificates.expires(self.engine)
        return {**self.known, "state": state, "ready": ready, "certificate_expires": expires}

    @property
    def links(self) -> dict[str, Any]:
        rows = [
            {
                "prefill": peer["engine"],
                "prefill_engine_id": peer["engine_id"],
                "state": "Established",
                "shards": "1/1",
                "bytes_per_second": 5e9,
                "canary": {"state": "Passed", "bytes": 4096},
            }
            for peer in self.peers
        ]
        return {**self.known, "links": rows}

    @property
    def revision(self) -> str:
        return f"{'starting' if self.loads else 'ready'}-{self._told}"

    def take(self, peers: list[dict[str, Any]]) -> None:
        self.peers = peers
        self._told += 1
        self.news.set()
        self.news = asyncio.Event()

    async def wait(self, seen: str, seconds: float) -> str:
        if seen == self.revision:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), min(seconds, self.loads or seconds))
        return self.revision


def server(launchers: dict[str, Launcher], is_silent: Callable[[], bool]) -> web.Application:
    """Return the server for the launchers, by address.

    Args:
        is_silent: while it returns True, the launchers of half of the PDClusters answer nothing.
    """

    async def here(request: web.Request) -> Launcher:
        assert request.transport is not None
        address = request.transport.get_extra_info("sockname")[0]
        # The operator may hear of a pod before this process does.
        ends = time.monotonic() + PATIENCE
        while address not in launchers:
            if time.monotonic() > ends:
                raise web.HTTPServiceUnavailable
            await asyncio.sleep(0.1)
        launcher = launchers[address]
        while launcher.may_be_silent and is_silent():  # noqa: ASYNC110 - a file is awaited
            await asyncio.sleep(1.0)
        return launcher

    async def readyz(request: web.Request) -> web.Response:
        known = (await here(request)).state
        return web.json_response(known, status=200 if known["ready"] else 503)

    async def put_peers(request: web.Request) -> web.Response:
        (await here(request)).take((await request.json())["peers"])
        return web.Response(status=204)

    async def links(request: web.Request) -> web.Response:
        return web.json_response((await here(request)).links)

    async def changes(request: web.Request) -> web.Response:
        seconds = min(float(request.query.get("wait", 0)), 30.0)
        seen, launcher = request.query.get("seen", ""), await here(request)
        told = await launcher.wait(seen, seconds)
        if told == seen:
            return web.json_response({"revision": told})
        known = {"readyz": launcher.state, "links": launcher.links}
        return web.json_response({"revision": told, **known})

    app = web.Application(middlewares=[known_clients])
    app.router.add_get("/readyz", readyz)
    app.router.add_put("/v1/peers", put_peers)
    app.router.add_get("/v1/links", links)
    app.router.add_get("/v1/changes", changes)
    return app


async def follow_pods(
    folder: Path, launchers: dict[str, Launcher], certificates: Certificates
) -> None:
    """Have a launcher at the address of each engine's pod."""
    async for event in events(folder, "/api/v1/pods", "pdcluster.dev/cluster"):
        pod = event["object"]
        address, engine = (pod.get("status") or {}).get("podIP"), engine_of(pod)
        if not address or engine is None:
            continue
        if event["type"] == "DELETED":
            launchers.pop(address, None)
        elif address not in launchers or launchers[address].engine != engine.logical:
            launchers[address] = Launcher(engine.logical, certificates)


async def main(folder: Path, *, tls: bool) -> None:
    """Run until the process is ended."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    use_small_buffers()
    launchers: dict[str, Launcher] = {}
    certificates = Certificates()
    context = certificates.context() if tls else None
    runner = web.AppRunner(server(launchers, (folder / SILENT).exists), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "0.0.0.0", LAUNCHER_PORT, backlog=4096, ssl_context=context)
    await site.start()
    await asyncio.gather(
        follow_pods(folder, launchers, certificates), follow_secrets(folder, certificates)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args()
    asyncio.run(main(options.folder, tls=options.tls))
