"""What the client makes of an API server's answers, and what it sends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client as kubernetes
from reached import reaching

from pdcluster_operator.adapters.api_server.client import KubeClient, NotFound
from pdcluster_operator.runtime.interfaces import ApiError, Conflict, Invalid


def answered(
    answer: web.Response, ask: Callable[[KubeClient], Any]
) -> tuple[Any, list[web.BaseRequest], list[tuple[Any, ...]]]:
    """Return what a call returns or raises, the requests, and what was told of each call."""
    requests: list[web.BaseRequest] = []
    seen: list[tuple[Any, ...]] = []

    async def take(request: web.Request) -> web.Response:
        await request.read()
        requests.append(request)
        return answer

    async def run() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", take)
        async with (
            TestServer(app) as server,
            KubeClient(reaching(server), lambda *call: seen.append(call)) as client,
        ):
            try:
                return await ask(client)
            except ApiError as error:
                return error

    return asyncio.run(run()), requests, seen


def get(client: KubeClient) -> Any:
    return client.call("GET", "/api/v1/pods")


@pytest.mark.parametrize(
    ("date", "year"),
    [("Thu, 26 Nov 2020 09:01:05 GMT", 2020), ("Thu, 26 Nov 2048 09:01:05 GMT", 2048)],
)
def test_the_time_is_that_of_the_api_server_whatever_this_machine_says(
    date: str, year: int
) -> None:
    async def ask(client: KubeClient) -> float:
        await get(client)
        return client.now()

    answer = web.json_response({}, headers={"Date": date})
    now, _, _ = answered(answer, ask)
    assert datetime.fromtimestamp(now, UTC).year == year


@pytest.mark.parametrize("date", ["", "today"])
def test_without_a_date_it_is_the_time_of_this_machine(date: str) -> None:
    async def ask(client: KubeClient) -> float:
        await get(client)
        return client.now()

    now, _, _ = answered(web.json_response({}, headers={"Date": date}), ask)
    assert abs(now - time.time()) < 60


def test_the_time_of_a_proxy_that_refuses_is_not_the_api_servers() -> None:
    async def ask(client: KubeClient) -> float:
        with pytest.raises(ApiError):
            await get(client)
        return client.now()

    date = {"Date": "Thu, 26 Nov 2020 09:01:05 GMT"}
    now, _, _ = answered(web.json_response({}, status=502, headers=date), ask)
    assert abs(now - time.time()) < 60


@pytest.mark.parametrize(
    ("status", "kind", "reason", "passing"),
    [
        (404, NotFound, "NotFound", False),
        (409, Conflict, "Conflict", True),
        (422, Invalid, "Invalid", False),
        (400, ApiError, "Why", False),
        (405, ApiError, "Why", False),
        (406, ApiError, "Why", False),
        (413, ApiError, "Why", False),
        (415, ApiError, "Why", False),
        (401, ApiError, "Why", False),
        (403, ApiError, "Why", False),
        (500, ApiError, "Why", False),
        (503, ApiError, "Why", False),
        (300, ApiError, "Why", False),
    ],
)
def test_a_refusal_says_why_and_whether_it_passes(
    status: int, kind: type[ApiError], reason: str, passing: bool
) -> None:
    document = {"reason": "Why", "message": "because"}
    error, _, seen = answered(web.json_response(document, status=status), get)
    assert type(error) is kind
    assert (error.reason, str(error)) == (reason, "because")
    assert error.passing is passing
    assert [call[:3] for call in seen] == [("GET", "/api/v1/pods", status)]
    assert 0.0 <= seen[0][3] < 60.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "HTTP 500: {}"),
        ("", "HTTP 500: no text"),
        ('{"message": null}', "the API server answers 500"),
        (" <html>\r\n<body>proxy</body></html> ", "HTTP 500: <html>"),
        ("x" * 900, f"HTTP 500: {'x' * 200}"),
        ("[1]", "HTTP 500: [1]"),
        ('"no"', 'HTTP 500: "no"'),
    ],
)
def test_a_refusal_in_words_that_are_not_kubernetes_own(text: str, said: str) -> None:
    error, _, _ = answered(web.Response(text=text, status=500), get)
    assert (str(error), error.reason) == (said, "Http500")


@pytest.mark.parametrize("status", [200, 201, 202])
def test_what_is_done_is_no_error(status: int) -> None:
    document, _, _ = answered(web.json_response({"kind": "Pod"}, status=status), get)
    assert document == {"kind": "Pod"}


def test_what_is_not_there_is_none_to_who_only_reads() -> None:
    found, _, _ = answered(web.Response(status=404), lambda client: client.read("/api/v1/x"))
    assert found is None
    found, _, _ = answered(web.Response(status=403), lambda client: client.read("/api/v1/x"))
    assert isinstance(found, ApiError)


def test_a_request_says_who_asks_and_what_it_takes() -> None:
    _, [request], _ = answered(web.json_response({}), get)
    sent = {name: request.headers.get(name) for name in ("Accept", "User-Agent", "Content-Type")}
    assert sent == {
        "Accept": "application/json", "User-Agent": "pdcluster-operator",
        "Content-Type": "application/json",
    }  # fmt: skip
    assert request.path_qs == "/api/v1/pods"


async def test_a_server_that_is_not_there_is_an_error_that_passes() -> None:
    configuration, seen = kubernetes.Configuration(), []
    configuration.host = "http://127.0.0.1:1"
    async with KubeClient(configuration, lambda *call: seen.append(call)) as client:
        with pytest.raises(ApiError, match=r"^GET /version: .") as gone:
            await client.call("GET", "/version")
        with pytest.raises(ApiError, match=r"^GET /watch: .") as lost:
            async for _ in client.lines("/watch", {}):
                pass
    for raised in (gone, lost):
        assert raised.value.reason == "ApiServerUnreachable"
    assert [call[:3] for call in seen] == [("GET", "/version", 0)]
