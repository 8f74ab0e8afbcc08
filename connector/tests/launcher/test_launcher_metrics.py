"""The metrics page: the engine's metrics, and no way to its API."""

from __future__ import annotations

import asyncio
import urllib.request
from functools import partial

import aiohttp
import pytest
from aiohttp import web
from launched import http, wait_for

from loopback import free_port
from pdcluster_connector import listening
from pdcluster_connector.launcher.engine.engine_api import EngineApi
from pdcluster_connector.launcher.interface import CONTENT_TYPE, metrics_page


def test_the_page_shows_the_engines_metrics_and_nothing_else(launch):
    port = free_port()
    engine = launch("serve", "--metrics-port", str(port))
    engine.ready()
    page = f"http://127.0.0.1:{port}"
    with urllib.request.urlopen(f"{page}/metrics", timeout=60) as answer:
        text = answer.read().decode()
        assert answer.headers["Content-Type"] == CONTENT_TYPE
    assert text == http(f"{engine.api}/metrics")[1]
    assert "pdcluster_kv_leases_held" in text
    for path in ("/v1/completions", "/v1/models", "/readyz", "/v1/drain", "/v1/peers", "/"):
        assert http(f"{page}{path}")[0] == 404
        assert http(f"{page}{path}", {}, "POST")[0] == 404
    assert http(f"{page}/metrics", {}, "POST")[0] == 405


def test_the_page_says_why_there_are_no_metrics_yet(launch):
    port = free_port()
    engine = launch("slow:600", "--metrics-port", str(port))
    status, said = wait_for(lambda: (a := http(f"http://127.0.0.1:{port}/metrics"))[0] and a)
    assert status == 503
    assert said.startswith(f"{engine.api}/metrics does not answer")


def test_there_is_no_page_where_none_is_asked_for(launch):
    engine = launch("serve")
    engine.ready()
    assert http(f"{engine.url}/metrics")[0] == 404


def test_a_port_that_is_taken_is_named_before_the_engine_starts(launch):
    port = free_port()
    first = launch("serve", "--metrics-port", str(port))
    first.ready()
    second = launch("serve", "--metrics-port", str(port))
    assert second.end() == 78
    assert f"port 127.0.0.1:{port} (the metrics page) is in use" in second.termination
    assert "--metrics-port" in second.termination


@pytest.fixture
async def slow_engine():
    """An engine's API that notes who asks for metrics, and answers when it may."""
    seen = {"asked": 0, "accept": set(), "answers": asyncio.Event()}

    async def metrics(request: web.Request) -> web.Response:
        seen["accept"].add(request.headers["Accept"])
        seen["asked"] += 1
        asked = seen["asked"]
        await seen["answers"].wait()
        return web.Response(text=f"asked {asked}\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield port, seen
    await runner.cleanup()


@pytest.fixture
async def page(slow_engine):
    """The launcher's page before that engine: a session, the page's URL, and what was seen."""
    port, seen = slow_engine
    async with aiohttp.ClientSession() as session:
        engine = EngineApi(session, f"http://127.0.0.1:{port}")
        app = metrics_page(partial(engine.metrics, 60.0))
        seen["scrapes"] = 0

        @web.middleware
        async def count(request, handler):
            seen["scrapes"] += 1
            return await handler(request)

        app.middlewares.append(count)
        own = free_port()
        guard = await listening.serve(app, listening.open_port("127.0.0.1", own))
        yield session, f"http://127.0.0.1:{own}/metrics", seen
        await guard.close()


async def test_each_scrape_is_asked_of_the_engine_in_the_text_format(page):
    session, url, seen = page
    seen["answers"].set()
    for number in (1, 2):
        async with session.get(url) as answer:
            assert (answer.status, await answer.text()) == (200, f"asked {number}\n")
    assert seen["accept"] == {"text/plain;version=0.0.4"}


async def test_a_crowd_of_scrapes_is_one_request_to_the_engine(page):
    """Each took a connection of the launcher's own, so its health check got none."""
    session, url, seen = page

    async def scrape() -> str:
        async with session.get(url) as answer:
            return await answer.text()

    scrapes = asyncio.gather(*(scrape() for _ in range(60)))
    async with asyncio.timeout(60):
        while seen["scrapes"] < 60:  # noqa: ASYNC110 - a count has no event
            await asyncio.sleep(0.01)
    seen["answers"].set()
    assert set(await scrapes) == {"asked 1\n"}
    assert seen["asked"] == 1
