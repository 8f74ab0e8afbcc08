"""The operator's HTTP client against a launcher that answers what it likes."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from functools import partial
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from pdcluster_connector.protocol.launcher_documents import (
    MAX_ANSWER_BYTES,
    ChangesReport,
    EngineReport,
    EngineState,
    LinkReport,
    LinksReport,
    PeersDocument,
    decode_changes,
    encode_json,
)
from pdcluster_operator.adapters import engines_http
from pdcluster_operator.adapters.engine_authority import EngineAuthority, Signed
from pdcluster_operator.adapters.engines_http import EnginesHttp
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.launchers import Target
from pdcluster_operator.runtime.interfaces import LauncherError

NOBODY = PeersDocument(7, ())
AUTHORITY, _ = EngineAuthority.new(time.time())
SHORT, LONG = engines_http.TIMEOUT, engines_http.WAIT_TIMEOUT


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls for seconds is no launcher that does not answer."""
    monkeypatch.setattr(engines_http, "TIMEOUT", aiohttp.ClientTimeout(total=120.0))
    monkeypatch.setattr(engines_http, "WAIT_TIMEOUT", aiohttp.ClientTimeout(total=120.0))


def target_of(pod: TestServer) -> Target:
    return Target("ns.x.prefill.a.0", Role.PREFILL, str(pod.make_url("")).rstrip("/"), "1/0")


class Elsewhere:
    """A server that no request of the operator is meant for."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def take(self, request: web.Request) -> web.Response:
        self.requests.append(f"{request.method} {request.path}")
        return web.json_response({"ready": True})


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_and_is_not_followed(status: int) -> None:
    """307 and 308 would repeat the PUT, with its body, at an address of the pod's choice."""
    other = Elsewhere()

    async def run() -> list[str]:
        target = web.Application()
        target.router.add_route("*", "/{path:.*}", other.take)
        async with TestServer(target) as aim:

            async def redirect(request: web.Request) -> web.Response:
                where = str(aim.make_url(request.path))
                return web.Response(status=status, headers={"Location": where})

            launcher = web.Application()
            launcher.router.add_route("*", "/{path:.*}", redirect)
            said = []
            async with TestServer(launcher) as pod, EnginesHttp(AUTHORITY) as engines:
                url = target_of(pod)
                calls = (
                    engines.changes(url, "", wait=False),
                    engines.put_peers(url, NOBODY),
                    engines.tell_routed(url, routed=True),
                )
                for call in calls:
                    with pytest.raises(LauncherError) as raised:
                        await call
                    said.append(str(raised.value))
        return said

    said = asyncio.run(run())
    assert other.requests == []
    assert all(f"answers {status}" in message for message in said)


@pytest.mark.parametrize("depth", [50_000, 1_000_000])
def test_json_that_is_nested_too_deep_is_a_failure(depth: int) -> None:

    async def deep(_: web.Request) -> web.Response:
        return web.Response(text='{"later":' * depth + "1" + "}" * depth)

    async def run() -> None:
        launcher = web.Application()
        launcher.router.add_route("*", "/{path:.*}", deep)
        async with TestServer(launcher) as pod, EnginesHttp(AUTHORITY) as engines:
            url = target_of(pod)
            with pytest.raises(LauncherError, match=r"nested too deep|longer than"):
                await engines.changes(url, "", wait=False)

    asyncio.run(run())


def test_an_endless_answer_is_cut_off() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(2 * MAX_ANSWER_BYTES >> 16):
            await answer.write(b" " * (1 << 16))
        return answer

    async def run() -> None:
        launcher = web.Application()
        launcher.router.add_route("*", "/{path:.*}", endless)
        async with TestServer(launcher) as pod, EnginesHttp(AUTHORITY) as engines:
            with pytest.raises(LauncherError, match="longer than"):
                await engines.changes(target_of(pod), "", wait=False)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (200, '{"revision": "ab12"}', "ab12"),
        (404, '{"error": "Not Found"}', None),
        (403, '{"error": "for the operator"}', None),
        (200, "[]", None),
        (200, '{"revision": 7}', None),
        (200, '{"revision": "' + "a" * 65 + '"}', None),
    ],
)
def test_what_is_no_answer_to_a_question_for_news_is_a_failure(
    status: int, text: str, expected: str | None
) -> None:
    asked: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.query["seen"], request.query["wait"]))
        return web.Response(status=status, text=text)

    async def run() -> None:
        launcher = web.Application()
        launcher.router.add_get("/v1/changes", answer)
        async with TestServer(launcher) as pod, EnginesHttp(AUTHORITY) as engines:
            for seen, wait in (("", False), ("a&wait=9", True)):
                if expected is None:
                    with pytest.raises(LauncherError, match=r"answers 40|did not answer"):
                        await engines.changes(target_of(pod), seen, wait=wait)
                else:
                    report = await engines.changes(target_of(pod), seen, wait=wait)
                    assert report == ChangesReport(expected)

    asyncio.run(run())
    assert asked == [("", "0"), ("a&wait=9", "30")]


def test_news_come_with_what_the_launcher_tells() -> None:
    document = {
        "revision": "ab12",
        "readyz": {"engine": "ns.tiny.decode.a.0", "ready": True, "state": "Ready"},
        "links": {"engine": "ns.tiny.decode.a.0", "engine_id": "", "links": []},
    }
    engine = EngineReport(ready=True, engine="ns.tiny.decode.a.0", state=EngineState.READY)
    report = ChangesReport("ab12", engine, LinksReport("ns.tiny.decode.a.0", "", ()))
    assert decode_changes(json.dumps(document).encode()) == report
    for part in ("readyz", "links"):
        read = decode_changes(json.dumps({**document, part: 7}).encode())
        assert read == replace(report, **{part: None})


def test_a_question_for_news_that_breaks_off_is_a_failure() -> None:
    async def broken(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def run() -> None:
        launcher = web.Application()
        launcher.router.add_get("/v1/changes", broken)
        async with TestServer(launcher) as pod, EnginesHttp(AUTHORITY) as engines:
            with pytest.raises(LauncherError):
                await engines.changes(target_of(pod), "", wait=True)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda engines, url: engines.put_peers(url, NOBODY), "PUT /v1/peers"),
        (lambda engines, url: engines.tell_routed(url, routed=True), "PUT /v1/routed"),
        (lambda engines, url: engines.tell_routed(url, routed=False), "DELETE /v1/routed"),
    ],
)
@pytest.mark.parametrize("status", [200, 204, 409])
def test_what_a_launcher_is_told_and_that_it_refused(call: Any, expected: str, status: int) -> None:
    heard: list[tuple[str, str]] = []

    async def take(request: web.Request) -> web.Response:
        heard.append((f"{request.method} {request.path}", await request.text()))
        return web.Response(status=status, text=" the generation is too old \n" * (status == 409))

    async def run() -> None:
        launcher = web.Application()
        launcher.router.add_route("*", "/{path:.*}", take)
        async with TestServer(launcher) as pod, EnginesHttp(AUTHORITY) as engines:
            await call(engines, target_of(pod))

    if status == 409:
        with pytest.raises(LauncherError, match=r"answers 409: the generation is too old$"):
            asyncio.run(run())
    else:
        asyncio.run(run())
    sent = encode_json(NOBODY).decode()
    assert heard == [(expected, sent if "peers" in expected else "")]


def test_the_operators_own_certificate_is_made_again_each_day_and_holds_for_slow_clocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    day, now, made = 86_400.0, [time.time()], []
    sign = EngineAuthority.sign

    def signed(authority: EngineAuthority, name: str, start: float, end: float) -> Signed:
        made.append((start - now[0], end - now[0]))
        return sign(authority, name, start, end)

    monkeypatch.setattr(EngineAuthority, "sign", signed)
    engines = EnginesHttp(AUTHORITY, lambda: now[0])
    target = Target("ns.x.prefill.a.0", Role.PREFILL, "https://x", "1/0")
    contexts = []
    for wait in (0.0, day, 1.0, 1.0):
        now[0] += wait
        contexts.append(engines._tls(target)["ssl"])
    assert [one is contexts[0] for one in contexts] == [True, True, False, False]
    assert contexts[2] is contexts[3]
    assert made == [pytest.approx((-day, 2 * day))] * 2


def test_a_connection_whose_other_end_is_gone_is_noticed_within_seconds() -> None:
    with engines_http._socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("", 0))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, pause, probes = (
            made.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
    assert idle + pause * probes == 11


def test_a_launcher_that_does_not_answer_is_given_up_before_it_is_asked_again() -> None:
    assert (SHORT.total, SHORT.connect) == (2.0, 1.0)
    assert (LONG.total, LONG.connect) == (35.0, 1.0), "longer than it keeps a question for news"


def test_any_number_of_launchers_may_keep_a_question_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    kept = engines_http._socket

    def noting(info: Any) -> socket.socket:
        made.append(kept(info))
        return made[-1]

    monkeypatch.setattr(engines_http, "_socket", noting)
    many, waiting = 120, 0

    async def run() -> None:
        all_ask = asyncio.Event()

        async def keep(_: web.Request) -> web.Response:
            nonlocal waiting
            waiting += 1
            if waiting == many:
                all_ask.set()
            await all_ask.wait()
            return web.json_response({"revision": "1"})

        launcher = web.Application()
        launcher.router.add_get("/v1/changes", keep)
        async with TestServer(launcher) as pod, EnginesHttp(AUTHORITY) as engines:
            target = target_of(pod)
            calls = (engines.changes(target, "1", wait=True) for _ in range(many))
            async with asyncio.timeout(60):
                await asyncio.gather(*calls)

    asyncio.run(run())
    assert len(made) == many, "each is kept alive by the kernel"


def test_a_field_that_cannot_be_read_leaves_an_engine_reachable() -> None:
    """A launcher of another version may write a field otherwise."""
    name = "ns.tiny.decode.a.0"
    engine = {"engine": name, "ready": True, "data_parallel_size": 2048, "versions": ["0.32.0"]}
    links = {"engine": name, "engine_id": "", "links": [{"prefill": "p", "shards": 2}, 7]}

    async def run() -> ChangesReport:
        launcher = web.Application()
        text = json.dumps({"revision": "ab12", "readyz": engine, "links": links})
        launcher.router.add_get("/v1/changes", partial(_answer, text))
        async with TestServer(launcher) as pod, EnginesHttp(AUTHORITY) as engines:
            return await engines.changes(target_of(pod), "", wait=False)

    assert asyncio.run(run()) == ChangesReport(
        "ab12",
        EngineReport(engine=name, ready=True),
        LinksReport(name, "", (LinkReport("p"),)),
    )


async def _answer(text: str, _: web.Request) -> web.Response:
    return web.Response(text=text)
