"""Who waits for news hears of them, and of nothing else."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from test_launcher_http import PEERS, REPORT, TOKEN, launcher

from pdcluster_connector.launcher.interface.revision import revision_of
from pdcluster_connector.launcher.links.link_table import CanaryResult, LinkRow
from pdcluster_connector.protocol.link_documents import LinkState, PeerEntry

PEER = PeerEntry("ns.c.prefill.r.0", "ns.c.prefill.r.0/aaaa", "10.0.0.1:5600", "http://10.0.0.1")
ROW = LinkRow(
    PEER, PEER.engine_id, LinkState.ESTABLISHED, "", "", "1/1", 1e9, CanaryResult("Passed", 4096)
)
PROMPTS = {"prompts": 100, "local": 4, "cause": "NoTicket", "window_seconds": 300.0}


async def revision(client, seen: str = "", wait: int = 0) -> str:
    answer = await client.get(f"/v1/changes?seen={seen}&wait={wait}")
    assert answer.status == 200
    return (await answer.json())["revision"]


async def test_the_first_question_is_answered_at_once_and_the_next_waits():
    async with launcher() as (client, readiness, _):
        first = await revision(client, wait=30)
        began = time.monotonic()
        assert await revision(client, first, wait=1) == first
        assert time.monotonic() - began >= 0.9
        waiting = asyncio.create_task(revision(client, first, wait=30))
        await asyncio.sleep(0.05)
        readiness.healthy()
        async with asyncio.timeout(60):
            assert await waiting != first


async def test_news_come_with_what_the_other_paths_tell():
    async with launcher() as (client, _, _):
        await client.put("/v1/peers", json=PEERS)
        told = await (await client.get("/v1/changes")).json()
        assert told["readyz"] == await (await client.get("/readyz")).json()
        assert told["links"] == await (await client.get("/v1/links")).json()
        path = f"/v1/changes?seen={told['revision']}"
        assert await (await client.get(path)).json() == {"revision": told["revision"]}


async def test_news_of_a_link_end_the_wait():
    async with launcher() as (client, _, _):
        before = await revision(client)
        for method, path, document, headers in (
            ("PUT", "/v1/peers", PEERS, {}),
            ("POST", "/v1/reports", REPORT, TOKEN),
        ):
            waiting = asyncio.create_task(revision(client, before, wait=30))
            await asyncio.sleep(0.05)
            await client.request(method, path, json=document, headers=headers)
            async with asyncio.timeout(60):
                after = await waiting
            assert after != before
            before = after


@pytest.mark.parametrize(
    "row",
    [
        replace(ROW, state=LinkState.FAILED),
        replace(ROW, message="slow"),
        replace(ROW, engine_id="another"),
        replace(ROW, canary=CanaryResult("Failed", 0, "no KV moved")),
    ],
)
def test_what_the_operator_judges_is_news(row):
    assert revision_of({}, [row], None) != revision_of({}, [ROW], None)


def test_numbers_that_change_all_the_time_are_no_news():
    same = replace(ROW, bytes_per_second=2e9, canary=CanaryResult("Passed", 8192))
    assert revision_of({}, [same], None) == revision_of({}, [ROW], None)
    more = {**PROMPTS, "prompts": 101}
    assert revision_of({}, [], more) == revision_of({}, [], PROMPTS)
    for other in ({**PROMPTS, "local": 50}, {**PROMPTS, "cause": "LeaseLost"}, None):
        assert revision_of({}, [], other) != revision_of({}, [], PROMPTS)
    assert revision_of({}, [], {**PROMPTS, "prompts": 0, "local": 0})
