"""The webhook's port: reviews are answered while a crowd says nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from crowd import Crowd
from loopback import free_port
from pdcluster_connector import listening
from pdcluster_operator import handlers


async def test_reviews_are_answered_beside_a_crowd_that_is_larger_than_the_limit(monkeypatch):
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", 64)
    port = free_port()
    seen: list[Any] = []

    async def judge(document: Any, *, webhook: str, **_: Any) -> Any:
        seen.append((document, webhook))
        return {"response": {"allowed": True}}

    server = handlers._ReviewServer(addr="127.0.0.1", port=port, insecure=True)
    async with server:
        serving = server(judge)
        await anext(serving)
        there = asyncio.Event()
        crowd = asyncio.create_task(Crowd(port, "silent", 200, "/", many=True).run(there.set))
        await asyncio.wait_for(there.wait(), 60)
        for number in range(3):
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"http://127.0.0.1:{port}/validate", json={"number": number}) as answer,
            ):
                assert (await answer.json())["response"]["allowed"] is True
        crowd.cancel()
        await asyncio.gather(crowd, return_exceptions=True)
        await serving.aclose()
    assert seen == [({"number": number}, "validate") for number in range(3)]
