"""Reflectors over HTTP: what they hand on, and what they do when a server refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from reached import reaching

from pdcluster_operator.adapters.api_server import reflector
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kinds import POD, PREFILL_SCALER
from pdcluster_operator.adapters.api_server.reflector import HistoryLostError, Reflector
from pdcluster_operator.runtime.store import Store

AGE = 300.0
Seen = list[tuple[str, str, str]]


def pod(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "resourceVersion": str(version)}}


def line(what: str, found: dict[str, Any]) -> bytes:
    return json.dumps({"type": what, "object": found}).encode() + b"\n"


class Server:
    """Answers each LIST with its next page, and each watch with its next lines."""

    def __init__(self) -> None:
        self.pages: list[Any] = []
        self.streams: list[Any] = []
        self.asked: list[dict[str, str]] = []
        self.seen: Seen = []
        self.store = Store()
        self.ended = asyncio.Event()
        self.served: list[bool] = []
        self.seconds = 0.0  # that have passed, where a test sets the clock

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.asked.append(query)
        todo = self.streams if "watch" in query else self.pages
        if not todo:
            self.ended.set()
            await asyncio.sleep(60)
        found = todo.pop(0)
        if isinstance(found, float):  # so long a watch lasts in which nothing is reported
            self.seconds, found = self.seconds + found, []
        if isinstance(found, int):
            reason = {404: "NotFound", 410: "Expired"}.get(found, "")
            return web.json_response({"reason": reason, "message": "no"}, status=found)
        if isinstance(found, bytes):
            return web.Response(body=found, content_type="application/json")
        if "watch" not in query:
            return web.json_response(found)
        response = web.StreamResponse()
        await response.prepare(request)
        for one in found:
            await response.write(one)
        return response

    def see(self, what: str, found: dict[str, Any]) -> None:
        metadata = found["metadata"]
        self.seen.append((what, metadata["name"], metadata["resourceVersion"]))

    def set_served(self, _kind: str, *, served: bool) -> None:
        self.served.append(served)

    def watched_from(self) -> list[str]:
        return [one["resourceVersion"] for one in self.asked if "watch" in one]


def page(version: str, *items: dict[str, Any], rest: str = "") -> dict[str, Any]:
    return {"metadata": {"resourceVersion": version, "continue": rest}, "items": list(items)}


Run = Callable[..., Awaitable[Reflector]]


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Server, Run]]:
    for name in ("FIRST", "LONGEST"):
        monkeypatch.setattr(reflector, name, 0.001)
    known = Server()
    application = web.Application()
    application.router.add_get("/{path:.*}", known.answer)
    async with (
        TestServer(application) as there,
        KubeClient(reaching(there)) as client,
    ):

        async def run(kind: Any = POD, age: float = AGE, *, elsewhere: bool = False) -> Reflector:
            """Watch until the server has nothing left to answer."""
            loop: Any = known
            watch = Reflector(client, loop, kind, "ns", age, elsewhere=elsewhere)
            running = asyncio.create_task(watch.run(lambda: None))
            ended = asyncio.create_task(known.ended.wait())
            async with asyncio.timeout(60):
                await asyncio.wait((running, ended), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return watch

        yield known, run


async def test_a_watch_lists_in_pages_and_goes_on_from_there(server: tuple[Server, Run]) -> None:
    known, run = server
    known.pages = [page("8", pod("a", 3), rest="more"), page("9", pod("b", 4))]
    known.streams = [
        [line("ADDED", pod("c", 10)), line("DELETED", pod("a", 11))],
        [line("BOOKMARK", pod("", 15))],
    ]
    await run()
    assert known.seen == [
        ("MODIFIED", "a", "3"),
        ("MODIFIED", "b", "4"),
        ("ADDED", "c", "10"),
        ("DELETED", "a", "11"),
    ]
    assert known.asked[1]["continue"] == "more"
    assert known.watched_from() == ["9", "11", "15"], "opened again where the last one ended"
    assert {one["labelSelector"] for one in known.asked} == {POD.selector}
    lists = [one for one in known.asked if "watch" not in one]
    assert {one["limit"] for one in lists} == {"500"}, "a page is in memory as a whole"
    opened = [one for one in known.asked if "watch" in one]
    assert all(0.9 * AGE - 2 < int(one["timeoutSeconds"]) <= 1.1 * AGE for one in opened)
    assert {one["allowWatchBookmarks"] for one in opened} == {"true"}


@pytest.mark.parametrize(
    "forgotten",
    [
        410,
        [line("ERROR", {"code": 410})],
        [line("ERROR", {"code": 410, "reason": "Expired", "message": "too old"})],
    ],
)
async def test_a_version_that_the_server_forgot_is_listed_anew(
    server: tuple[Server, Run], forgotten: Any
) -> None:
    known, run = server
    known.pages = [page("9", pod("a", 3)), page("20", pod("a", 12))]
    known.streams = [forgotten]
    await run()
    assert known.watched_from() == ["9", "20"]
    assert known.seen == [("MODIFIED", "a", "3"), ("MODIFIED", "a", "12")]


@pytest.mark.parametrize(
    "failure",
    [500, 403, [], [b'{"type": '], [line("ERROR", {"code": 500, "message": "etcd is slow"})]],
)
async def test_a_watch_that_fails_goes_on_and_lists_nothing_again(
    server: tuple[Server, Run], failure: Any
) -> None:
    known, run = server
    known.pages = [page("9")]
    known.streams = [failure, [line("MODIFIED", pod("a", 10))]]
    await run()
    assert known.watched_from() == ["9", "9", "10"]
    assert known.seen == [("MODIFIED", "a", "10")]


def strange(found: dict[str, Any], kind: str) -> dict[str, Any]:
    """An object that anybody may write."""
    if kind == "long":
        return {**found, "data": {"a": "<" * 6_000_000}}
    return {**found, "spec": "deep"}


@pytest.mark.parametrize("kind", ["deep", "long"])
async def test_no_object_ends_a_watch(server: tuple[Server, Run], kind: str) -> None:
    known, run = server

    def written(document: Any) -> bytes:
        deep = '{"a": ' * 3_000 + '"end"' + "}" * 3_000  # json.dumps would refuse it
        return json.dumps(document).replace('"deep"', deep).encode()

    known.pages = [written(page("9", strange(pod("a", 3), kind), pod("b", 4)))]
    news = {"type": "MODIFIED", "object": strange(pod("a", 10), kind)}
    known.streams = [[written(news) + b"\n", line("ADDED", pod("c", 11))]]
    await run()
    assert [one[1:] for one in known.seen] == [("a", "3"), ("b", "4"), ("a", "10"), ("c", "11")]
    assert known.watched_from() == ["9", "11"]


async def test_a_kind_that_comes_later_is_watched_then(server: tuple[Server, Run]) -> None:
    known, run = server
    known.pages = [404, 404, page("9", pod("a", 3))]
    await run(PREFILL_SCALER, age=0.01)
    assert known.watched_from() == ["9"]
    assert known.served == [False, False, True]
    assert known.seen == [("MODIFIED", "a", "3")]


async def test_a_kind_that_is_not_served_any_more_has_no_objects(
    server: tuple[Server, Run],
) -> None:
    known, run = server
    known.store.put({**pod("a", 3), "kind": "PrefillScaler"})
    known.pages = [404]
    watch = await run(PREFILL_SCALER, age=0.01)
    assert known.seen == [("DELETED", "a", "3")]
    assert watch.is_known


async def test_a_watch_that_has_reached_its_age_lists_again(
    server: tuple[Server, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, run = server
    monkeypatch.setattr(reflector, "_now", lambda: known.seconds)
    known.store.put({**pod("gone", 3), "kind": "Pod"})
    known.pages = [page("9", pod("gone", 3)), page("20", pod("a", 12))]
    known.streams = [[line("MODIFIED", pod("a", 10))], 1.1 * AGE]
    await run()
    assert known.watched_from() == ["9", "10", "20"]
    assert known.seen == [
        ("MODIFIED", "gone", "3"),
        ("MODIFIED", "a", "10"),
        ("MODIFIED", "a", "12"),
        ("DELETED", "gone", "3"),
    ]


async def test_a_server_that_is_set_back_ends_the_process(server: tuple[Server, Run]) -> None:
    """After etcd was restored, what is held is later than all that is listed."""
    known, run = server
    known.pages = [page("9"), page("8")]
    with pytest.raises(HistoryLostError):
        await run(age=0.0)


@pytest.fixture
def bounds(server: object, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The most seconds that each pause may take."""
    found: list[float] = []

    def uniform(least: float, most: float) -> float:
        if (least, most) == (0.9, 1.1):  # of an age
            return 1.0
        assert least == most / 2
        found.append(round(most, 3))
        return 0.0

    monkeypatch.setattr(reflector, "LONGEST", 0.005)
    monkeypatch.setattr(reflector.random, "uniform", uniform)
    return found


async def test_a_version_that_is_forgotten_again_and_again_is_listed_more_and_more_rarely(
    server: tuple[Server, Run], bounds: list[float]
) -> None:
    known, run = server
    known.pages = [page("9"), page("10"), page("11"), page("12")]
    known.streams = [410, [line("ERROR", {"code": 410})], 410]
    await run()
    assert bounds == [0.001, 0.003, 0.005]


async def test_what_was_deleted_while_nothing_was_watched_is_told(
    server: tuple[Server, Run],
) -> None:
    known, run = server
    for name, version in (("gone", 3), ("kept", 4), ("made-later", 30)):
        known.store.put({**pod(name, version), "kind": "Pod"})
    known.store.put({**pod("gone", 5), "kind": "Service"})
    known.pages = [page("20", pod("new", 12), rest="more"), page("20", pod("kept", 4))]
    await run()
    assert known.seen == [
        ("MODIFIED", "new", "12"),
        ("MODIFIED", "kept", "4"),
        ("DELETED", "gone", "3"),
    ]


async def test_a_watch_that_fails_again_and_again_waits_longer(
    server: tuple[Server, Run], bounds: list[float]
) -> None:
    known, run = server
    known.pages = [page("9")]
    known.streams = [500, [], 500, 500, [line("MODIFIED", pod("a", 10))], 500]
    await run()
    assert bounds == [0.001, 0.003, 0.005, 0.005, 0.001]


async def test_what_kopf_has_not_found_is_watched_here(server: tuple[Server, Run]) -> None:
    """kopf looks once for what the API server has, and a new kind may come there a moment later."""
    known, run = server
    known.pages = [page("9", pod("a", 3))]
    known.streams = [[line("ADDED", pod("b", 10))]]
    await run(elsewhere=True)
    assert ("ADDED", "b", "10") in known.seen
