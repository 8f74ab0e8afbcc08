"""One manifest goes the way that docs/design.md tells, row by row.

The operator is whole: watches, control loop, executor and launcher monitor speak HTTP. The other
side is local mode's API behind a small server, and launchers that answer what tests let them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from reached import reaching

from design_walk import Call, Calls, happened
from loopback import free_network
from pdcluster_operator import handlers
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER, WATCHED
from pdcluster_operator.adapters.api_server.kube_api import KubeApi
from pdcluster_operator.adapters.api_server.reflector import Reflectors
from pdcluster_operator.adapters.engine_authority import EngineAuthority
from pdcluster_operator.adapters.engines_http import EnginesHttp
from pdcluster_operator.api.object_names import LAUNCHER_PORT, engine_of
from pdcluster_operator.api.rules.validate import review
from pdcluster_operator.local.api_server import LocalApi
from pdcluster_operator.local.cluster import Workloads
from pdcluster_operator.plan.forecast.world import running
from pdcluster_operator.plan.types import ConnectorBundle, Event
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.queue import Backoff

MANIFEST = {
    "apiVersion": PDCLUSTER.api_version,
    "kind": PDCLUSTER.name,
    "metadata": {"name": "tiny", "namespace": "ns"},
    "spec": {
        "model": {"source": {"hostPath": {"path": "/models/tiny"}}},
        "transfer": {"device": "CPU", "tls": "Disabled"},
    },
}
REFUSALS = {
    # Another version came first, and then somebody's list is beside ours.
    "Service": [(409, "Conflict"), (422, "Invalid")],
    "Deployment": [(503, "ServiceUnavailable")],
}


class Server:
    """Local mode's API over HTTP. It refuses some applies; pods that are there have addresses."""

    def __init__(self, network: str) -> None:
        self.api = LocalApi()
        self.network = network
        self.told: list[Any] = []
        self._workloads = Workloads(self.api)
        self._refusals: dict[tuple[str, str], list[tuple[int, str]]] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.split("/")
        kind = next((one for one in WATCHED if one.plural in parts), None)
        if kind is None or kind.optional:
            made = request.method == "POST"  # a Secret, which is not read again
            return web.json_response({"reason": "NotFound"}, status=201 if made else 404)
        if parts[-1] == kind.plural:
            if "watch" in request.query:
                return await self._watch(request, kind.name)
            page = {"metadata": {"resourceVersion": "0"}, "items": self.api.list(kind.name)}
            return web.json_response(page)
        namespace, name = parts[parts.index("namespaces") + 1], parts[parts.index(kind.plural) + 1]
        if request.method == "PATCH":
            body = json.loads(await request.read())
            if "dryRun" in request.query:
                return web.json_response(body)
            if parts[-1] == "status":
                self.api.set_status(kind.name, namespace, name, body["status"])
            elif "kind" in body:  # no repair
                fresh = list(REFUSALS.get(kind.name, ()))
                refusals = self._refusals.setdefault((kind.name, name), fresh)
                code, reason = refusals.pop(0) if refusals else (0, "")
                if code in (0, 409):
                    self.api.apply(body)
                    self._start_pods()
                if code:
                    return web.json_response({"reason": reason, "message": "no"}, status=code)
        live = self.api.get(kind.name, namespace, name)
        return web.json_response(live or {"reason": "NotFound"}, status=200 if live else 404)

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        news: asyncio.Queue[bytes] = asyncio.Queue()

        def see(what: str, found: dict[str, Any]) -> None:
            if found["kind"] == kind:
                news.put_nowait(json.dumps({"type": what, "object": found}).encode() + b"\n")

        self.api.watch(see)
        while True:
            await response.write(await news.get())

    def _start_pods(self) -> None:
        self._workloads.sync()
        for number, pod in enumerate(self.api.list("Pod"), 2):
            metadata = pod["metadata"]
            status = running(f"{self.network}.{number}")
            self.api.set_status("Pod", metadata["namespace"], metadata["name"], status)

    async def launcher(self, request: web.Request) -> web.Response:
        """What the launcher of the pod with the asked address says."""
        addresses = {
            pod["status"]["podIP"]: name.logical
            for pod in self.api.list("Pod")
            if (name := engine_of(pod)) is not None
        }
        engine = addresses.get(str(request.url.host))
        if request.method == "PUT" and request.path == "/v1/peers":
            self.told.append(await request.json())
            return web.json_response({})
        state = {"ready": True, "engine": engine, "engine_id": f"{engine}/1", "state": "Ready"}
        links = {"engine": engine, "engine_id": f"{engine}/1", "links": []}
        revision = str(time.monotonic())
        return web.json_response({"revision": revision, "readyz": state, "links": links})


NOW = 1_700_000_000.0


class Others:
    """A port that the walk does not name."""

    async def publish(self, cluster: Mapping[str, Any], events: Iterable[Event]) -> None:
        pass


async def walked() -> list[Call]:
    """What is called from the admission of a manifest until its engines were told their peers."""
    authority, _ = EngineAuthority.new(NOW)
    server, others = Server(free_network()), Others()
    async with AsyncExitStack() as stack:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        there = await stack.enter_async_context(TestServer(app))
        for number in range(2, 6):
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", server.launcher)
            host = f"{server.network}.{number}"
            await stack.enter_async_context(TestServer(app, host=host, port=LAUNCHER_PORT))
        client = await stack.enter_async_context(KubeClient(reaching(there)))
        launchers = await stack.enter_async_context(EnginesHttp(authority))
        api = KubeApi(client, authority)
        with Calls("manifest") as calls:
            assert review(MANIFEST, None, host_paths=True).errors == ()
            loop = ControlLoop(
                api_server=api, launchers=launchers, events=others,
                connector=ConnectorBundle("ab" * 32, b"zip"), clock=lambda: NOW,
                poll_seconds=0.01, backoff=Backoff(first=0.01),
            )  # fmt: skip
            loop.queue.rest = 0.01
            api.remember = loop.remember
            loop.start()
            reflectors = Reflectors(client, loop, (), 300.0, (PDCLUSTER,))
            watching = asyncio.create_task(reflectors.run())
            memo, handled = SimpleNamespace(process=reflectors), set()

            def kopf_sees(what: str, found: dict[str, Any]) -> None:
                if found["kind"] == PDCLUSTER.name:
                    event = {"type": what, "object": found}
                    handled.add(asyncio.create_task(handlers.see(event=event, memo=memo)))

            server.api.watch(kopf_sees)
            server.api.apply(MANIFEST)
            async with asyncio.timeout(120):
                while not any(body["peers"] for body in server.told):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await loop.stop()
    return calls.seen


async def test_a_manifest_goes_the_way_of_the_walk() -> None:
    seen = await walked()
    happened(seen, "manifest", "1", "2", "3", "9")
    reconcile = ("runtime/reconcile.py", "Reconciler.reconcile")
    happened(seen, "manifest", "4", "5", turn=reconcile)
    happened(seen, "manifest", "4", "6", turn=reconcile)
    happened(seen, "manifest", "7", "8", turn=reconcile)
