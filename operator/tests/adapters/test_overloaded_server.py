"""An API server that answers 429: all calls of the client wait as long as it asks."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client as kubernetes
from reached import reaching

import virtual_time
from pdcluster_operator.adapters.api_server.client import (
    APPLY,
    MOST_PATIENCE,
    TRIES,
    KubeClient,
    Overload,
)
from pdcluster_operator.adapters.api_server.kinds import namespace_of
from pdcluster_operator.runtime.executor import SIDE_BY_SIDE
from pdcluster_operator.runtime.interfaces import ApiError, Key
from pdcluster_operator.runtime.queue import WORKERS, KeyedQueue


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [("3", 3.0), ("0", 0.5), ("9999", 10.0), ("", 1.0), ("Fri, 31 Dec 1999", 1.0)],
)
async def test_a_client_waits_as_long_as_it_is_asked_to_within_bounds(
    asked: str, seconds: float
) -> None:
    time = Time()
    overload = Overload(time.clock, time.sleep)
    await overload.wait("ns")
    assert time.now == 100.0
    overload.refused("ns", asked)
    await overload.wait("ns")
    assert seconds <= time.now - 100.0 <= seconds * 1.5


async def test_who_was_asked_to_wait_long_does_so_although_others_were_asked_for_less() -> None:
    time = Time()
    overload = Overload(time.clock, time.sleep)
    overload.refused("ns", "9")
    overload.refused("ns", "1")
    await overload.wait("ns")
    assert 9.0 <= time.now - 100.0 <= 9.0 + 0.5


async def test_what_one_namespace_is_told_holds_for_no_other() -> None:
    """A webhook for one namespace can answer 429 all day."""
    time = Time()
    overload = Overload(time.clock, time.sleep)
    overload.refused("ns", "9")
    for other in ("", "other"):
        await overload.wait(other)
    assert time.now == 100.0
    overload.refused("other", "2")
    await overload.wait("other")
    assert time.now <= 103.0
    await overload.wait("ns")
    assert time.now >= 109.0


async def test_what_was_asked_long_ago_is_forgotten() -> None:
    time = Time()
    overload = Overload(time.clock, time.sleep)
    for number in range(1000):
        overload.refused(str(number), "2")
        time.now += 1
    assert len(overload._asked) <= 3


async def test_calls_that_waited_together_do_not_come_back_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("random.uniform", lambda _, most: most)
    time = Time()
    overload = Overload(time.clock, time.sleep)
    overload.refused("ns", "4")
    await overload.wait("ns")
    assert time.now - 100.0 == 6.0


class Webhook(KubeClient):
    """A webhook answers 429 to all that is written of one kind, and the rest is answered."""

    def __init__(self, asked: str) -> None:
        super().__init__(kubernetes.Configuration())
        self._overload = Overload(asyncio.get_running_loop().time)
        self.asked, self.refused = asked, 0

    async def _once(self, request: Any) -> tuple[int, bytes, str]:
        await asyncio.sleep(0.02)
        if "/statefulsets/" not in request.path:
            return 200, b"{}", ""
        self.refused += 1
        return 429, b'{"message": "try later"}', self.asked


@pytest.mark.parametrize("asked", ["1", "10"])
def test_a_kind_that_is_refused_holds_nobodys_status_back_for_long(asked: str) -> None:
    """As many PDClusters as there are workers. Their statuses say that something is refused."""
    looks = 18

    async def story() -> None:
        client, told = Webhook(asked), []

        async def call(path: str) -> None:
            with suppress(ApiError):
                await client.call("PATCH", f"/apis/x/v1/namespaces/ns/{path}")

        async def look(number: int) -> None:
            await asyncio.gather(*(call(f"services/{number}-{one}") for one in range(6)))
            await asyncio.gather(*(call(f"statefulsets/{number}-{one}") for one in range(2)))
            await call(f"pdclusters/{number}/status")
            told.append(asyncio.get_running_loop().time())

        async with client:
            await asyncio.gather(*map(look, range(looks)))
        assert max(told) <= 2 * MOST_PATIENCE
        assert client.refused <= TRIES * 2 * looks

    virtual_time.run(story())


@pytest.mark.parametrize(("asked", "most"), [("0", 120), ("1", 120), ("10", 60)])
def test_a_kind_that_is_refused_for_ten_minutes_is_asked_for_seldom(asked: str, most: int) -> None:
    async def story() -> None:
        client = Webhook(asked)

        async def look(_: Key) -> None:
            calls = (f"/apis/x/v1/namespaces/ns/statefulsets/{one}" for one in range(2))
            await asyncio.gather(*(client.call("PATCH", path) for path in calls))

        queue = KeyedQueue(look)
        async with client:
            queue.start()
            queue.add(Key("ns", "one"))
            await asyncio.sleep(600.0)
            await queue.stop(grace=0.0)
        assert 20 < client.refused <= most

    virtual_time.run(story())


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    simulated = Time()
    overload = Overload(simulated.clock, simulated.sleep)
    module = "pdcluster_operator.adapters.api_server.client.Overload"
    monkeypatch.setattr(module, lambda: overload)
    return simulated


@pytest.mark.parametrize("refusals", [1, TRIES - 1, TRIES])
async def test_a_call_is_made_again_and_given_up_at_last(time: Time, refusals: int) -> None:
    asked: list[float] = []

    async def answer(_: web.Request) -> web.Response:
        asked.append(time.now)
        if len(asked) <= refusals:
            return web.json_response(
                {"reason": "TooManyRequests"}, status=429, headers={"Retry-After": "2"}
            )
        return web.json_response({"kind": "Pod"})

    server = web.Application()
    server.router.add_get("/version", answer)
    async with TestServer(server) as there:
        codes: list[int] = []
        async with KubeClient(reaching(there), lambda *call: codes.append(call[2])) as calls:
            if refusals == TRIES:
                with pytest.raises(ApiError) as refused:
                    await calls.call("GET", "/version")
                assert refused.value.reason == "TooManyRequests"
            else:
                assert await calls.call("GET", "/version") == {"kind": "Pod"}
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(asked))
    assert codes == [429] * refusals + [200] * (refusals < TRIES)


@pytest.mark.parametrize(
    ("path", "namespace"),
    [
        ("/api/v1/namespaces/ns/pods/p", "ns"),
        ("/apis/pdcluster.dev/v1alpha1/namespaces/ns/pdclusters", "ns"),
        ("/api/v1/namespaces/ns", "ns"),
        ("/apis/apps/v1/statefulsets", ""),
        ("/version", ""),
    ],
)
def test_the_namespace_in_a_path(path: str, namespace: str) -> None:
    assert namespace_of(path) == namespace


async def test_calls_that_hang_in_one_namespace_leave_connections_for_the_others() -> None:
    hanging, end = 0, asyncio.Event()

    def pods(namespace: str) -> str:
        return f"/api/v1/namespaces/{namespace}/pods"

    async def answer(request: web.Request) -> web.Response:
        nonlocal hanging
        if request.match_info["namespace"] == "hangs":
            hanging += 1
            await end.wait()
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/api/v1/namespaces/{namespace}/pods", answer)
    async with (
        TestServer(app) as server,
        KubeClient(reaching(server)) as client,
        asyncio.timeout(60),
    ):
        many = WORKERS * SIDE_BY_SIDE
        hung = [asyncio.create_task(client.call("POST", pods("hangs"))) for _ in range(many)]
        while hanging < many:  # noqa: ASYNC110 - the handler announces nothing
            await asyncio.sleep(0.01)
        await asyncio.gather(*(client.call("POST", pods(f"ns{one % 5}")) for one in range(50)))
        assert not any(task.done() for task in hung)
        end.set()
        await asyncio.gather(*hung)


async def test_a_body_is_sent_as_it_is() -> None:
    body = {"spec": {"empty": {}, "none": None, "list": [1, {"a": "ü"}]}, "metadata": {"name": "x"}}

    async def echo(request: web.Request) -> web.Response:
        assert request.content_type == "application/apply-patch+yaml"
        return web.json_response({"got": await request.json(), "query": dict(request.query)})

    server = web.Application()
    server.router.add_patch("/apis", echo)
    async with TestServer(server) as there, KubeClient(reaching(there)) as client:
        query = {"fieldManager": "a b&c"}
        answer = await client.call("PATCH", "/apis", query=query, body=body, content=APPLY)
    assert answer == {"got": body, "query": query}


@pytest.mark.parametrize("text", ["plain", "Gänge", "half of a character: \ud83d"])
async def test_any_text_can_be_sent(text: str) -> None:
    got: list[object] = []

    async def answer(request: web.Request) -> web.Response:
        got.append(await request.json())
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, KubeClient(reaching(server)) as client:
        sent = {"message": text, "conditions": [{"status": "True"}], "count": 1}
        await client.call("PATCH", "/x", body=sent, content=APPLY)
    assert got == [sent]
