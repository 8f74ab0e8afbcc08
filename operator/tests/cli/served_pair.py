"""A PDCluster that is served by HTTP servers: an API server, a router, and one engine of each role.

Their answers are those of real engines, of ``recorded_check.json``. A test may change them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from kubernetes.aio import client as library

from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.port_forward import PROTOCOL
from pdcluster_operator.api.object_names import ENGINE_METRICS_PORT, HTTP_PORT

SPEC = Path(__file__).parents[1] / "plan/scenarios/tiny-cpu.yaml"
RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded_check.json").read_text())
numbers = itertools.count(1)


def pod(name: str, address: str, role: str) -> dict[str, Any]:
    labels = {"pdcluster.dev/cluster": "tiny", "app.kubernetes.io/component": role}
    if role != "router":
        revision = {"prefill": "aaaaa", "decode": "bbbbb"}[role]
        labels |= {"pdcluster.dev/role": role, "pdcluster.dev/revision": revision}
        labels |= {"pdcluster.dev/engine": f"tiny-{role}-{revision}-0"}
        labels |= {"apps.kubernetes.io/pod-index": "0"}
    ready = {"type": "Ready", "status": "True"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {"containers": []},
        "status": {"podIP": address, "conditions": [ready]},
    }


@dataclass
class Pair:
    """What the servers answer, and what they were asked.

    Attributes:
        answers: what each role answers to a completion: (status, document).
        asked: (role, body, Authorization) of each completion.
        refuses_forwarding: whether the API server forbids forwarding ports.
        url: of the API server.
    """

    manifest: dict[str, Any]
    pods: dict[str, dict[str, Any]]
    answers: dict[str, tuple[int, Any]]
    asked: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)
    refuses_forwarding: bool = False
    client: Any = None
    url: str = ""

    async def complete(self, role: str, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((role, body, request.headers.get("Authorization", "")))
        status, document = self.answers[role]
        return web.json_response(document, status=status)

    def page(self, role: str) -> str:
        """The metrics: those after the request, once the router was asked."""
        when = "after" if any(asked == "router" for asked, *_ in self.asked) else "before"
        return str(RECORDED[when][role])

    async def read(self, request: web.Request) -> web.StreamResponse:
        """Answer as an API server does."""
        path = request.path
        if path.endswith("/pdclusters/tiny"):
            return web.json_response(self.manifest)
        if path.endswith("/pods"):
            assert request.query["labelSelector"] == "pdcluster.dev/cluster=tiny"
            return web.json_response({"metadata": {}, "items": list(self.pods.values())})
        if path.endswith("/services/tiny-router"):
            selector = {"app.kubernetes.io/component": "router"}
            return web.json_response({"metadata": {}, "spec": {"selector": selector}})
        if path.endswith("/portforward") and not self.refuses_forwarding:
            return await self.forward(request, path.split("/")[-2])
        status = 403 if path.endswith("/portforward") else 404
        return web.json_response({"message": f"no {path}", "reason": "NotFound"}, status=status)

    async def forward(self, request: web.Request, name: str) -> web.StreamResponse:
        """Do what a kubelet does with a port."""
        socket = web.WebSocketResponse(protocols=(PROTOCOL,), max_msg_size=0)
        await socket.prepare(request)
        port = int(request.query["ports"])
        for channel in (0, 1):
            await socket.send_bytes(bytes((channel,)) + port.to_bytes(2, "little"))
        address = self.pods[name]["status"]["podIP"]
        try:
            reader, writer = await asyncio.open_connection(address, port)
        except OSError as error:
            await socket.send_bytes(b"\1" + str(error).encode())
            await socket.close()
            return socket

        async def back() -> None:
            while data := await reader.read(100_000):
                await socket.send_bytes(b"\0" + data)
            await socket.close()

        task = asyncio.create_task(back())
        async for message in socket:
            writer.write(message.data[1:])
        writer.close()
        await asyncio.gather(task, return_exceptions=True)
        return socket


@asynccontextmanager
async def serving(spec: Mapping[str, Any] | None = None) -> AsyncIterator[Pair]:
    """Serve a pair, and an API server that tells of it. ``spec`` replaces fields of its spec."""
    manifest = yaml.safe_load(SPEC.read_text())
    manifest["metadata"] |= {"name": "tiny", "namespace": "default", "uid": "u", "generation": 1}
    manifest["spec"] |= spec or {}
    # The ports are fixed, so each process of a run of tests has addresses of its own.
    process, first = os.getpid(), 4 * next(numbers) % 240
    net = f"127.{80 + (process >> 8) % 160}.{process % 256}"
    roles = enumerate(("router", "prefill", "decode"), first + 1)
    addresses = {role: f"{net}.{number}" for number, role in roles}
    pods = {f"tiny-{role}-0": pod(f"tiny-{role}-0", at, role) for role, at in addresses.items()}
    answers = {"router": (200, RECORDED["ours"]), "decode": (200, RECORDED["alone"])}
    pair = Pair(manifest, pods, answers)
    async with AsyncExitStack() as stack:

        async def serve(address: str, port: int, *routes: web.RouteDef) -> int:
            app = web.Application()
            app.add_routes(routes)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, address, port).start()
            return int(runner.addresses[0][1])

        for role, address in addresses.items():

            async def complete(request: web.Request, role: str = role) -> web.Response:
                return await pair.complete(role, request)

            async def page(_: web.Request, role: str = role) -> web.Response:
                return web.Response(text=pair.page(role))

            await serve(address, HTTP_PORT, web.post("/v1/completions", complete))
            if role != "router":
                await serve(address, ENGINE_METRICS_PORT, web.get("/metrics", page))
        port = await serve("127.0.0.1", 0, web.get("/{path:.*}", pair.read))
        pair.url = f"http://127.0.0.1:{port}"
        configuration = library.Configuration(host=pair.url)
        pair.client = await stack.enter_async_context(KubeClient(configuration))
        yield pair
