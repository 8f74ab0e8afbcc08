"""A port of a pod through the API server, by the kubelet's side of the protocol."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio import client as library

from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.port_forward import PROTOCOL, PortForward

BIG = 3 << 20


@asynccontextmanager
async def serving(*routes: web.RouteDef) -> AsyncIterator[int]:
    app = web.Application(client_max_size=2 * BIG)
    app.add_routes(routes)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def kubelet(port: int) -> web.RouteDef:
    """What an API server and a kubelet do with one forwarded port."""

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer of-the-user"
        assert request.query["ports"] == "8000"
        return await forward(request, 8000, port)

    return web.get("/api/v1/namespaces/ns/pods/one/portforward", answer)


async def forward(request: web.Request, named: int, port: int) -> web.StreamResponse:
    """What a kubelet does: `cri-streaming/pkg/streaming/portforward/websocket.go`.

    Args:
        named: the port that the client asks for.
        port: the one that is connected to.
    """
    socket = web.WebSocketResponse(protocols=(PROTOCOL,), max_msg_size=0)
    await socket.prepare(request)
    for channel in (0, 1):
        await socket.send_bytes(bytes((channel,)) + named.to_bytes(2, "little"))
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        await socket.send_bytes(b"\x01connection refused")
        await socket.close()
        return socket

    async def back() -> None:
        while data := await reader.read(100_000):
            await socket.send_bytes(b"\0" + data)
        await socket.close()

    task = asyncio.create_task(back())
    async for message in socket:
        assert message.data[0] == 0
        writer.write(message.data[1:])
    writer.close()
    await asyncio.gather(task, return_exceptions=True)
    return socket


def to(port: int) -> KubeClient:
    configuration = library.Configuration(host=f"http://127.0.0.1:{port}")
    configuration.api_key["BearerToken"] = "Bearer of-the-user"
    return KubeClient(configuration)


async def _echo(request: web.Request) -> web.Response:
    key = request.headers.get("Authorization", "")
    return web.Response(body=await request.read(), headers={"Key": key})


async def test_requests_of_any_size_arrive_with_their_own_key() -> None:
    async with (
        serving(web.post("/", _echo)) as pod,
        serving(kubelet(pod)) as server,
        to(server) as client,
        PortForward(client, "ns", "one", 8000) as forward,
        aiohttp.ClientSession() as http,
    ):
        for body in (b"", b"x", b"y" * BIG):
            sent = {"Authorization": "Bearer api-key"}
            async with http.post(forward.url, data=io.BytesIO(body), headers=sent) as answer:
                assert await answer.read() == body
                assert answer.headers["Key"] == "Bearer api-key"
        many = [http.post(forward.url, data=str(one)) for one in range(20)]
        answers = [await (await one).text() for one in many]
        assert answers == [str(one) for one in range(20)]
        assert forward.problem == ""


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (403, "this account may not reach pods of namespace ns: give it the verbs"),
        (404, "the API server answers 404 to a port-forward to pod ns/one"),
    ],
)
async def test_a_refusal_is_one_sentence(status: int, words: str) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=status)

    path = web.get("/api/v1/namespaces/ns/pods/one/portforward", refuse)
    async with serving(path) as server, to(server) as client:
        assert words in await problem(client)


async def test_a_port_on_which_nothing_listens_is_named() -> None:
    async with serving() as free:
        pass
    async with serving(kubelet(free)) as server, to(server) as client:
        assert await problem(client) == "port 8000 of pod ns/one: connection refused"


async def test_an_api_server_that_is_gone_is_named() -> None:
    async with serving() as free:
        pass
    async with to(free) as client:
        assert "port 8000 of pod ns/one: Cannot connect" in await problem(client)


async def problem(client: KubeClient) -> str:
    async with (
        PortForward(client, "ns", "one", 8000) as forward,
        aiohttp.ClientSession() as http,
    ):
        with pytest.raises(aiohttp.ClientError):
            await http.get(forward.url)
        return forward.problem
