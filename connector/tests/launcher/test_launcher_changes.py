"""Who waits for news hears of them, and of nothing else."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace
from test_launcher_http import PEERS, REPORT, TOKEN, launcher

from pdcluster_connector.launcher.interface import revision_of
from pdcluster_connector.protocol.launcher_documents import (
    CanaryReport,
    CanaryState,
    EngineReport,
    LinkReport,
    LinksReport,
    LinkState,
    PromptsReport,
)
from pdcluster_connector.protocol.load_report import ReceiveRate

PEER = "ns.c.prefill.r.0"
PASSED = CanaryReport(CanaryState.PASSED, 4096)
LINK = LinkReport(PEER, f"{PEER}/aaaa", LinkState.ESTABLISHED, "", "1/1", 1e9, PASSED)
PROMPTS = PromptsReport(100, 4, "NoTicket", 300.0)


def revision_with(*links: LinkReport, prompts: PromptsReport | None = None) -> str:
    engine = EngineReport(engine="e")
    return revision_of(engine, LinksReport("e", "e/1", links, prompts))


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
    "link",
    [
        replace(LINK, state=LinkState.FAILED),
        replace(LINK, message="slow"),
        replace(LINK, prefill_engine_id="another"),
        replace(LINK, canary=CanaryReport(CanaryState.FAILED, message="no KV moved")),
    ],
)
def test_what_the_operator_judges_is_news(link):
    assert revision_with(link) != revision_with(LINK)


def test_numbers_that_change_all_the_time_are_no_news():
    moved = CanaryReport(CanaryState.PASSED, 8192)
    rate = ReceiveRate(2e9, 1e9, 16, 2**30)
    same = replace(LINK, bytes_per_second=2e9, canary=moved, receives=rate)
    assert revision_with(same) == revision_with(LINK)
    old = [replace(LINK, canary=replace(moved, age_seconds=age)) for age in (600, 601)]
    assert revision_with(old[0]) == revision_with(old[1])
    before = revision_with(prompts=PROMPTS)
    assert revision_with(prompts=replace(PROMPTS, prompts=101)) == before
    for other in (replace(PROMPTS, local=50), replace(PROMPTS, cause="LeaseLost"), None):
        assert revision_with(prompts=other) != before
    assert revision_with(prompts=replace(PROMPTS, prompts=0, local=0))
