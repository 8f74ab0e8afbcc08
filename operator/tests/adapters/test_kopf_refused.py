"""kopf's lists and watches, where a server or a proxy refuses, breaks off, or says nonsense."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from typing import Any

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from reached import reaching

from pdcluster_operator import handlers
from pdcluster_operator.adapters.api_server import kubeconfig

GROUP, VERSION = "pdcluster.dev", "v1alpha1"
OURS = f"/apis/{GROUP}/{VERSION}"
FORGOTTEN = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}
BROKEN = {"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "no leader"}}
A_YEAR = {"Retry-After": "31536000"}
A_DATE = {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}
Answer = web.StreamResponse | dict[str, Any] | bytes


def resource(kind: str, plural: str) -> dict[str, Any]:
    return {"kind": kind, "name": plural, "singularName": kind.lower(), "namespaced": True}


DISCOVERY: dict[str, dict[str, Any]] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {"resources": [resource("Namespace", "namespaces") | {"namespaced": False}]},
    "/apis": {
        "groups": [
            {"name": name, "versions": [{"version": of}], "preferredVersion": {"version": of}}
            for name, of in ((GROUP, VERSION), ("apiextensions.k8s.io", "v1"))
        ]
    },
    OURS: {
        "resources": [
            resource("PDCluster", "pdclusters") | {"verbs": ["list", "watch", "get", "patch"]}
        ]
    },
    "/apis/apiextensions.k8s.io/v1": {
        "resources": [resource("CustomResourceDefinition", "customresourcedefinitions")]
    },
}


def refused(status: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"kind": "Status", "code": status}, status=status, headers=headers)


def cluster(version: int) -> dict[str, Any]:
    metadata = {"name": "a", "namespace": "ns", "uid": "u", "resourceVersion": str(version)}
    return {"kind": "PDCluster", "apiVersion": f"{GROUP}/{VERSION}", "metadata": metadata}


class Server:
    """Answers the first LISTs and watches as it is told, and all others well."""

    def __init__(self) -> None:
        self.lists: list[web.Response | None] = []
        self.streams: list[Answer | None] = []
        self.listed = 0
        self.watches: list[float] = []  # when each began, of the loop's time

    @property
    def watched(self) -> int:
        return len(self.watches)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if (document := DISCOVERY.get(request.path)) is not None:
            return web.json_response(document)
        if "watch" not in request.query:
            self.listed += 1
            if self.lists and (answer := self.lists.pop(0)) is not None:
                return answer
            metadata = {"resourceVersion": str(100 * self.listed)}
            items = [cluster(100 * self.listed)]
            return web.json_response(
                {"kind": "PDClusterList", "metadata": metadata, "items": items}
            )
        self.watches.append(asyncio.get_running_loop().time())
        answer = self.streams.pop(0) if self.streams else None
        if isinstance(answer, web.StreamResponse):
            return answer
        stream = web.StreamResponse()
        await stream.prepare(request)
        if answer is not None:
            text = answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n"
            await stream.write(text)
            return stream
        event = {"type": "MODIFIED", "object": cluster(100 * self.listed + self.watched)}
        await stream.write(json.dumps(event).encode() + b"\n")
        await asyncio.sleep(60)
        return stream


class Process:
    """What kopf's handlers need of the operator."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def see(self, event: str | None, _: Any) -> None:
        if event == "MODIFIED":
            self.changed.set()


Run = Callable[[], Awaitable[None]]


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Server, Run]]:
    process = Process()
    monkeypatch.setattr(handlers, "OperatorProcess", lambda *_, **__: process)
    monkeypatch.setattr(handlers, "PAUSE_SECONDS", 0.01)
    known, stop, memo = Server(), asyncio.Event(), kopf.Memo(options=object())
    application = web.Application()
    application.router.add_get("/{path:.*}", known.answer)
    tasks: list[asyncio.Task[None]] = []
    async with TestServer(application, shutdown_timeout=0.1) as there:

        async def found() -> Any:
            return reaching(there)

        monkeypatch.setattr(kubeconfig, "find_configuration", found)

        async def run() -> None:
            """Run kopf until it has watched a change; raise what ends it before."""
            registry = kopf.get_default_registry()
            task = asyncio.create_task(handlers._run(registry, stop, memo, ("ns",)))
            tasks.append(task)
            changed = asyncio.create_task(process.changed.wait())
            await asyncio.wait((task, changed), timeout=120, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            assert changed.done(), "kopf watches nothing"

        yield known, run
        stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    "answer",
    [
        BROKEN,
        FORGOTTEN,
        refused(400),
        refused(404),
        refused(410),
        refused(429, A_DATE),
        refused(429, A_YEAR),
        web.Response(status=502, body="Störung".encode("latin-1")),
        b"<html>\n",
        b"{}\n",
        json.dumps(BROKEN).encode()[:20],
    ],
    ids=str,
)
async def test_no_answer_to_a_watch_ends_the_operator(
    running: tuple[Server, Run], answer: Answer
) -> None:
    known, run = running
    known.streams = [answer]
    await run()
    assert known.watched >= 2


@pytest.mark.parametrize(
    "answer",
    [
        refused(404),
        refused(410),
        refused(429, A_DATE),
        web.Response(text="<html>", content_type="text/html"),
        web.json_response([]),
    ],
    ids=str,
)
async def test_no_answer_to_a_list_ends_the_operator(
    running: tuple[Server, Run], answer: web.Response
) -> None:
    known, run = running
    known.lists, known.streams = [None, answer], [FORGOTTEN]
    await run()
    assert known.listed == 3


@pytest.mark.parametrize(
    "answer",
    [lambda: b"", lambda: BROKEN, lambda: refused(410), lambda: b"<html>\n"],
    ids=["ends", "error", "refused", "nonsense"],
)
async def test_a_server_that_ends_each_watch_at_once_is_not_asked_without_a_pause(
    running: tuple[Server, Run], monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Answer]
) -> None:
    known, run = running
    pause = 0.2
    monkeypatch.setattr(handlers, "PAUSE_SECONDS", pause)
    known.streams = [answer() for _ in range(4)]
    await run()
    assert known.watched >= 5
    assert all(later - earlier >= pause for earlier, later in pairwise(known.watches[:5]))
