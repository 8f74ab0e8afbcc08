"""The launcher's HTTP interface: what it answers, and that nothing breaks it."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp.test_utils import TestClient, TestServer

from pdcluster_connector.launcher import interface
from pdcluster_connector.launcher.arguments import engine_command
from pdcluster_connector.launcher.engine.readiness import Readiness
from pdcluster_connector.launcher.interface import LauncherServer
from pdcluster_connector.launcher.links.link_table import LinkTable
from pdcluster_connector.protocol.engine_id import EngineId
from pdcluster_connector.protocol.launcher_documents import EngineState

TOKEN = {"Authorization": "Bearer secret"}
PEER = {
    "engine": "ns.c.prefill.r.0",
    "engine_id": "ns.c.prefill.r.0/aaaa",
    "side_channel": "10.0.0.1:5600",
    "api": "http://10.0.0.1:8000",
    "data_parallel_size": 1,
    "follower_hosts": [],
}
PEERS = {"generation": 3, "model": "llama", "canary_interval_seconds": 60, "peers": [PEER]}
REPORT = {
    "rank": [0, 0],
    "of": [1, 1],
    "links": [
        {
            "engine": PEER["engine"],
            "engine_id": PEER["engine_id"],
            "state": "Established",
            "reason": "",
            "message": "",
            "bytes_per_second": 1.5e9,
        }
    ],
}


@asynccontextmanager
async def launcher() -> AsyncIterator[tuple[TestClient, Readiness, list[int]]]:
    identity = EngineId("ns.c.decode.r.0", "0123456789abcdef")
    config = '{"kv_role":"kv_consumer"}'
    command = engine_command(
        ["m", "--kv-transfer-config", config], engine_id=identity.engine, role="decode"
    )
    readiness = Readiness(identity, "decode", command, {"vllm": "0.32.0"})
    drained: list[int] = []
    server = LauncherServer(readiness, LinkTable((1, 1)), "secret", lambda: drained.append(1))
    async with TestClient(TestServer(server.application())) as client:
        yield client, readiness, drained


async def test_readyz_follows_the_engine():
    async with launcher() as (client, readiness, _):
        answer = await client.get("/readyz")
        assert answer.status == 503
        assert await answer.json() == {
            "ready": False,
            "engine": "ns.c.decode.r.0",
            "engine_id": "ns.c.decode.r.0/0123456789abcdef",
            "role": "decode",
            "state": "Starting",
            "message": "starting vLLM",
            "versions": {"vllm": "0.32.0"},
            "side_channel": "127.0.0.1:5600",
            "data_parallel_size": 1,
            "api": "http://127.0.0.1:8000",
            "routed": False,
            "certificate_expires": None,
        }
        readiness.healthy()
        assert (await client.get("/readyz")).status == 200
        readiness.unhealthy("no answer")
        assert (await client.get("/readyz")).status == 503
        readiness.healthy()
        readiness.draining("draining")
        readiness.healthy()  # a draining engine is healthy and still wants no requests
        answer = await client.get("/readyz")
        assert (answer.status, (await answer.json())["state"]) == (503, "Draining")


async def test_workers_get_no_peers_while_the_engine_starts(monkeypatch):
    """A probe into GPU memory would break the CUDA graphs that vLLM captures then."""
    monkeypatch.setattr(interface, "MAX_WAIT_SECONDS", 3600.0)
    async with launcher() as (client, readiness, _):
        await client.put("/v1/peers", json=PEERS)
        for line in ("Starting to load model", "Capturing CUDA graphs: 50%| 1/2 ["):
            readiness.line(line)
            document = await (await client.get("/v1/peers")).json()
            assert (document["generation"], document["peers"]) == (0, [])
        waiting = asyncio.create_task(client.get("/v1/peers?after=0&wait=3600"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        readiness.healthy()
        assert await (await asyncio.wait_for(waiting, 240)).json() == PEERS
        readiness.unhealthy("no answer")  # links stay, whatever comes later
        assert await (await client.get("/v1/peers")).json() == PEERS


async def test_peers_go_to_the_workers_and_reports_become_links():
    async with launcher() as (client, readiness, _):
        readiness.healthy()
        assert (await client.put("/v1/peers", json=PEERS)).status == 204
        assert await (await client.get("/v1/peers?after=0&wait=5")).json() == PEERS
        assert (await client.post("/v1/reports", json=REPORT, headers=TOKEN)).status == 204
        links = await (await client.get("/v1/links")).json()
        assert links == {
            "engine": "ns.c.decode.r.0",
            "engine_id": "ns.c.decode.r.0/0123456789abcdef",
            "links": [
                {
                    "prefill": PEER["engine"],
                    "prefill_engine_id": PEER["engine_id"],
                    "state": "Established",
                    "reason": "",
                    "message": "",
                    "shards": "1/1",
                    "bytes_per_second": 1.5e9,
                    "canary": {"state": "Pending", "bytes": 0, "message": ""},
                }
            ],
        }


async def test_a_worker_waits_for_the_next_document():
    async with launcher() as (client, readiness, _):
        readiness.healthy()
        await client.put("/v1/peers", json=PEERS)
        waiting = asyncio.create_task(client.get("/v1/peers?after=3&wait=20"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await client.put("/v1/peers", json=PEERS)  # nothing new
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await client.put("/v1/peers", json={**PEERS, "generation": 4, "peers": []})
        document = await (await waiting).json()
        assert (document["generation"], document["peers"]) == (4, [])


async def test_a_wait_ends_with_the_document_as_it_is():
    async with launcher() as (client, _, _):
        began = time.monotonic()
        document = await (await client.get("/v1/peers?after=0&wait=1")).json()
        assert time.monotonic() - began > 0.9
        assert document["peers"] == []


def test_an_engine_that_was_ready_is_never_loading_again():
    """A stop kills an engine that loads, but drains one that may have requests."""
    command = engine_command(
        ["m", "--kv-transfer-config", '{"kv_role":"kv_both"}'], engine_id="a/b", role="decode"
    )
    readiness = Readiness(EngineId("a", "0123456789abcdef"), "decode", command, {})
    assert readiness.loading
    readiness.healthy()
    readiness.unhealthy("/health did not answer in time")
    assert readiness.report().state is EngineState.FAILED
    readiness.line("INFO 11-27 01:00:00 [x.py:1] Starting to load model")
    assert readiness.report().state is EngineState.FAILED
    assert not readiness.loading


async def test_stopping_answers_those_who_wait():
    identity = EngineId("a", "0123456789abcdef")
    command = engine_command(
        ["m", "--kv-transfer-config", '{"kv_role":"kv_both"}'], engine_id="a/b", role="decode"
    )
    readiness = Readiness(identity, "decode", command, {})
    server = LauncherServer(readiness, LinkTable((1, 1)), "t", lambda: None)
    await server.start("127.0.0.1", 0)
    host, port = server._guard.listener.getsockname()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /v1/peers?after=0&wait=30 HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.sleep(0.1)
    async with asyncio.timeout(15):  # half of what it waits for
        await server.stop()
    assert (await reader.read(12)) in {b"HTTP/1.1 200", b""}
    writer.close()


async def test_drain():
    async with launcher() as (client, _, drained):
        assert (await client.post("/v1/drain")).status == 202
        assert drained == [1]


async def test_the_operator_says_whether_routers_may_send_requests():
    async with launcher() as (client, readiness, _):
        for method, routed in (("PUT", True), ("PUT", True), ("DELETE", False), ("DELETE", False)):
            before = (await (await client.get("/v1/changes")).json())["revision"]
            changes = readiness.routed is not routed
            assert (await client.request(method, "/v1/routed")).status == 204
            assert (await (await client.get("/readyz")).json())["routed"] is routed
            after = (await (await client.get("/v1/changes")).json())["revision"]
            assert (after != before) is changes


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer guess"}, 401),
        ({"Authorization": "secret"}, 401),
        ({"Authorization": "Bearer sécret"}, 401),
        (TOKEN, 204),
    ],
)
async def test_reports_need_the_token(headers, status):
    async with launcher() as (client, _, _):
        assert (await client.post("/v1/reports", json=REPORT, headers=headers)).status == status


async def test_a_token_with_bytes_that_are_no_text_is_a_wrong_token():
    head = b"POST /v1/reports HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n"
    async with launcher() as (client, _, _):
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(head + b"Authorization: Bearer \xff\r\n\r\n")
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 401 ")


BAD_PEERS = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"generation":-1,"peers":[]}',
    b'{"generation":"1","peers":[]}',
    b'{"generation":1e400,"peers":[]}',
    b'{"generation":1}',
    b'{"generation":1,"peers":{}}',
    b'{"generation":1,"peers":[{}]}',
    json.dumps({**PEERS, "peers": [PEER, PEER]}).encode(),
    json.dumps({**PEERS, "peers": [{**PEER, "side_channel": "nowhere"}]}).encode(),
    json.dumps({**PEERS, "peers": [{**PEER, "engine": 7}]}).encode(),
    json.dumps({**PEERS, "model": "x" * 10_000}).encode(),
]


@pytest.mark.parametrize("body", BAD_PEERS, ids=lambda body: repr(body[:24]))
async def test_bad_peers_are_refused_and_change_nothing(body):
    async with launcher() as (client, readiness, _):
        readiness.healthy()
        await client.put("/v1/peers", json=PEERS)
        answer = await client.put("/v1/peers", data=body)
        assert answer.status == 400
        assert "PUT /v1/peers: " in (await answer.json())["error"]
        assert await (await client.get("/v1/peers")).json() == PEERS


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        json.dumps({**REPORT, "rank": [0]}).encode(),
        json.dumps({**REPORT, "rank": [-1, 0]}).encode(),
        json.dumps({**REPORT, "of": [9, 9]}).encode(),
        json.dumps({**REPORT, "links": [{**REPORT["links"][0], "state": "Up"}]}).encode(),
        json.dumps({**REPORT, "links": [{**REPORT["links"][0], "establishment": -1}]}).encode(),
    ],
)
async def test_bad_reports_are_refused(body):
    async with launcher() as (client, _, _):
        answer = await client.post("/v1/reports", data=body, headers=TOKEN)
        assert answer.status == 400
        assert (await answer.json())["error"]


async def test_bodies_are_bounded():
    async with launcher() as (client, _, _):
        answer = await client.put("/v1/peers", data=io.BytesIO(b"x" * (1 << 20 | 1)))
        assert answer.status == 413
        assert (await client.get("/readyz")).status == 503


@pytest.mark.parametrize(
    "query", ["after=x", "after=-1", "wait=1.5", "after=" + "9" * 400, "wait=²"]
)
async def test_bad_queries(query):
    async with launcher() as (client, _, _):
        assert (await client.get(f"/v1/peers?{query}")).status == 400


async def test_unknown_paths_and_methods():
    async with launcher() as (client, _, _):
        assert (await client.get("/v2")).status == 404
        assert (await client.delete("/v1/peers")).status == 405
