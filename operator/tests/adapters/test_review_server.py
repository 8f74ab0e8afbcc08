"""The webhook's port: reviews are answered while a crowd says nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

import virtual_time
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


def test_a_connection_without_a_review_is_kept_for_100_seconds() -> None:
    """The API server keeps one for 90 s, and does not repeat a review that met its end."""
    port = free_port()
    review = b"POST /validate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    review += b"Content-Length: 2\r\n\r\n{}"

    async def judge(_: Any, **__: Any) -> Any:
        return {"response": {"allowed": True}}

    async def keep_one() -> None:
        server = handlers._ReviewServer(addr="127.0.0.1", port=port, insecure=True)
        async with server:
            serving = server(judge)
            await anext(serving)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for pause in (97.0, 97.0, 0.0):
                writer.write(review)
                answer = await reader.readuntil(b"}}")
                assert answer.startswith(b"HTTP/1.1 200 ")
                await asyncio.sleep(pause)
            ends = asyncio.get_running_loop().time()
            assert await reader.read() == b""
            ends = asyncio.get_running_loop().time() - ends
            assert 99.0 < ends < 103.0
            writer.close()
            await serving.aclose()

    virtual_time.run(keep_one())
