"""Two workers of one decode engine, its real launcher, and a prefill engine that comes and goes."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest
from loopback_engines import probed, until

from pdcluster_connector.launcher.arguments import engine_command
from pdcluster_connector.launcher.engine.readiness import Readiness
from pdcluster_connector.launcher.interface import LauncherServer
from pdcluster_connector.launcher.links.link_table import LinkTable
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.protocol.engine_id import EngineId
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.sidechannel.loop_thread import LoopThread
from pdcluster_connector.sidechannel.peers import PeerBook
from pdcluster_connector.sidechannel.server import SideChannelServer
from pdcluster_connector.vllm.worker_side.link_keeper import LauncherClient

ENGINE = "ns.c.prefill.r.0"
FIRST, SECOND = f"{ENGINE}/00000000000000aa", f"{ENGINE}/00000000000000bb"


def probe(_: EngineMetadata, /, *, check: bool = False) -> Future[ProbeResult]:
    future: Future[ProbeResult] = Future()
    future.set_result(probed())
    return future


def ask(port: int, method: str, path: str, body: object = None) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else None


@pytest.fixture
def launcher() -> Iterator[int]:
    """Yield the port of a launcher for a decode engine of two ranks."""
    thread = LoopThread("test-launcher")
    thread.start()

    async def start() -> LauncherServer:
        identity = EngineId("ns.c.decode.r.0", "00000000000000dd")
        command = engine_command(
            ["m", "--kv-transfer-config", '{"kv_role":"kv_consumer"}'],
            engine_id=identity.engine,
            role="decode",
        )
        readiness = Readiness(identity, "decode", command, {})
        readiness.healthy()
        server = LauncherServer(readiness, LinkTable((1, 2)), "secret", lambda: None)
        await server.start("127.0.0.1", 0)
        return server

    server = thread.submit(start()).result(60)
    yield server._guard.listener.getsockname()[1]
    thread.submit(server.stop()).result(60)
    thread.stop()


@pytest.fixture
def workers(launcher: int, books: Callable[..., PeerBook]) -> Iterator[None]:
    """Two ranks with a peer book and a client of the launcher each."""
    clients = [
        LauncherClient(
            f"http://127.0.0.1:{launcher}",
            "secret",
            rank=(0, tensor),
            of=(1, 2),
            data_rank=0,
            peers=books(),
            probe=probe,
        )
        for tensor in range(2)
    ]
    for client in clients:
        client.start()
    yield
    for client in clients:
        client.close()


@pytest.mark.usefixtures("workers")
def test_the_link_table_follows_the_prefill_engine(
    launcher: int,
    serve: Callable[..., SideChannelServer],
    record_property: Callable[[str, object], None],
) -> None:
    def row() -> dict[str, Any]:
        (link,) = ask(launcher, "GET", "/v1/links")[1]["links"]
        return link

    def shows(state: str, engine_id: str, shards: str) -> bool:
        link = row()
        found = link["state"], link["prefill_engine_id"], link["shards"]
        return found == (state, engine_id, shards)

    server = serve(FIRST)
    document = {
        "generation": 1,
        "model": "tiny",
        "canary_interval_seconds": 0,
        "peers": [
            {
                "engine": ENGINE,
                "engine_id": FIRST,
                "side_channel": f"127.0.0.1:{server.port}",
                "api": "http://127.0.0.1:1",
            }
        ],
    }
    assert ask(launcher, "PUT", "/v1/peers", document)[0] == 204
    up = until(lambda: shows("Established", FIRST, "2/2"))
    assert row()["bytes_per_second"] == 2**31
    server.stop()
    dead = until(lambda: shows("Failed", FIRST, "0/2"))
    assert row()["reason"] == "SideChannelUnreachable"
    serve(SECOND, port=server.port)
    again = until(lambda: shows("Established", SECOND, "2/2"))
    record_property("link_up_s", round(up, 2))
    record_property("link_dead_s", round(dead, 2))
    record_property("link_again_s", round(again, 2))
