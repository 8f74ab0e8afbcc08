"""Who may see the page of `pdcluster ui`, and how it is kept up to date: over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from served_pair import serving
from shown_page import ShownPage, opened
from ui_objects import BLOCKED, condition, engines, pod

from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kubeconfig import find_configuration
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.ui import readers, series, server
from pdcluster_operator.cli.ui.page import page_of
from pdcluster_operator.cli.ui.readers import KubeReader
from pdcluster_operator.cli.ui.server import HEADERS, STATIC, UiServer
from pdcluster_operator.local.api_server import LocalApi
from pdcluster_operator.local.door import Door
from pdcluster_operator.runtime.interfaces import ApiError, Key

LLAMA = "/c/llm/llama"


@pytest.fixture
async def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ShownPage]:
    async with opened(tmp_path, monkeypatch, Key("llm", "llama")) as page:
        yield page


async def test_without_the_token_there_is_nothing(page: ShownPage) -> None:
    paths = ("/", LLAMA, f"{LLAMA}/events", "/clusters", "/static/ui.css", "/other")
    for wrong in ("", page.token[:-1], f"{page.token}x", "é", f"?token={page.token}", "%2f"):
        for path in paths:
            async with page.http.get(f"{page.origin}/{wrong}{path}") as answer:
                text = await answer.text()
                assert (answer.status, "llama" in text) == (403, False), (wrong, path)
                assert "pdcluster ui" in text
    assert (await page.get("/other"))[0] == 404


async def test_no_cookie_goes_to_other_ports_and_no_page_tells_its_address(page: ShownPage) -> None:
    """Browsers send a cookie of 127.0.0.1 to every port of it: another user may listen there."""
    for path in ("", "/", LLAMA, "/clusters"):
        async with page.http.get(f"{page.base}{path}", allow_redirects=False) as answer:
            assert answer.status in (200, 303)
            assert "Set-Cookie" not in answer.headers
            assert answer.headers["Referrer-Policy"] == "no-referrer"
    async with page.http.get(page.base) as answer:
        assert answer.url.path == f"/{page.token}{LLAMA}", "the PDCluster that was named"


async def asked(page: ShownPage, request: bytes) -> bytes:
    """What the server answers to bytes that no client of HTTP would send."""
    reader, writer = await asyncio.open_connection(*page.origin.removeprefix("http://").split(":"))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def test_what_has_no_path_has_no_token(page: ShownPage) -> None:
    for first in (b"OPTIONS *", b"CONNECT localhost:443"):
        ends = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answer = await asked(page, first + ends)
        assert answer.startswith(b"HTTP/1.1 403 "), answer
        assert b"Content-Security-Policy" in answer


async def test_a_bad_request_or_a_fault_of_ours_prints_no_token(
    page: ShownPage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token = page.token.encode()
    for path in (b"%s/\x00" % token, token + b"a" * 9000):
        answer = await asked(page, b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
        assert answer.startswith(b"HTTP/1.0 400 "), answer
    assert caplog.text == ""
    monkeypatch.setattr(page.ui, "_board", lambda _: {}[page.token])
    assert (await page.get("/clusters"))[0] == 500
    assert "Error handling request from 127.0.0.1 (KeyError)" in caplog.text
    assert page.token not in caplog.text


async def test_another_name_of_this_machine_is_refused(page: ShownPage) -> None:
    """DNS rebinding: a page of evil.example asks its own name, which now means 127.0.0.1."""
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", ""):
        status, text = await page.get("/", headers={"Host": host})
        assert (status, text) == (403, "403: open this page as localhost or 127.0.0.1\n"), host
    for host in ("localhost:9", "127.0.0.1", "[::1]:80"):
        status, _ = await page.get("/", headers={"Host": host})
        assert status == 200, host


async def test_every_answer_has_the_headers_and_nothing_can_be_written(page: ShownPage) -> None:
    await page.get("/")
    for path in ("/", LLAMA, "/clusters", "/static/ui.js", "/c/llm/none", f"{LLAMA}/events"):
        async with page.http.get(f"{page.base}{path}") as answer:
            assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, path
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        async with page.http.request(method, f"{page.base}{LLAMA}") as answer:
            assert answer.status == 405
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


async def test_pages_load_only_files_of_ours_and_no_inline_script(page: ShownPage) -> None:
    _, html = await page.get("/")
    files = re.findall(rf'(?:src|href)="/{page.token}(/static/[^"]+)"', html)
    assert sorted(files) == sorted(f"/static/{name}" for name in STATIC)
    links = re.findall(r'(?:src|href|sse-connect)="(/[^"]*)"', html)
    assert all(link.startswith(f"/{page.token}/") for link in links)
    for file in files:
        assert (await page.get(file))[0] == 200
    assert not re.findall(r"https?://(?!llama-router)[^\s\"<]+", html)
    assert not re.search(r"<script(?! src)|<style|\bstyle=|javascript:", html)
    for wrong in ("/static/..%2fserver.py", "/static/htmx.LICENSE", "/static/"):
        assert (await page.get(wrong))[0] == 404, wrong


async def test_names_that_are_none(page: ShownPage) -> None:
    await page.get("/")
    assert (await page.get("/c/llm/none")) == (
        404, "404: there is no PDCluster of this name in this namespace\n",
    )  # fmt: skip
    for path in ("/c/llm/..%2f..%2fsecrets", "/c/llm/UPPER", "/c/llm%3fx/llama", "/c/llm/a%0ab"):
        assert (await page.get(path))[0] == 404, path


async def test_the_list_has_all_and_without_a_name_it_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, monkeypatch) as page:
        await page.get("/")
        async with page.http.get(f"{page.base}/") as answer:
            assert answer.url.path == f"/{page.token}/clusters"
            assert f'href="/{page.token}{LLAMA}"' in await answer.text()


async def read_event(answer: aiohttp.ClientResponse) -> tuple[str, str]:
    """The name and the data of the next event."""
    name, data = "", []
    async with asyncio.timeout(120):
        async for line in answer.content:
            text = line.decode().rstrip("\n")
            if text.startswith("event: "):
                name = text[7:]
            elif text.startswith("data: "):
                data.append(text[6:])
            elif not text and name:
                return name, "\n".join(data)
    raise AssertionError("the stream ended")


async def test_a_change_reaches_the_browser_and_only_what_changed(page: ShownPage) -> None:
    await page.get("/")
    async with page.http.get(f"{page.base}{LLAMA}/events") as answer:
        assert answer.content_type == "text/event-stream"
        first = dict([await read_event(answer) for _ in server.SECTIONS["cluster"]])
        assert set(first) == set(server.SECTIONS["cluster"])
        assert "llama serves: " in first["head"]
        page.say("Ready", "False", "SideChannelUnreachable", BLOCKED)
        changed = dict([await read_event(answer) for _ in range(2)])
        assert set(changed) == {"head", "timeline"}
        assert BLOCKED in changed["head"]


async def test_the_next_command_of_a_page_names_the_context() -> None:
    async with serving() as pair:
        pair.client.context = "there"
        links = condition("KVLinksEstablished", "False", "SideChannelUnreachable", BLOCKED)
        pair.manifest["status"] = {"conditions": [links]}
        found, _ = await KubeReader(pair.client, None, "default").objects(Key("default", "tiny"))
    assert found is not None
    commands = [one.command for one in page_of(found).steps]
    assert commands
    assert all(one.endswith(" --context there") for one in commands)


async def test_many_browsers_share_what_is_read_and_the_last_one_ends_it(
    page: ShownPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_VIEWERS", 8)
    await page.get("/")
    async with contextlib.AsyncExitStack() as stack:
        url = f"{page.base}{LLAMA}/events"
        watching = [await stack.enter_async_context(page.http.get(url)) for _ in range(8)]
        await asyncio.gather(*map(read_event, watching))
        assert (await page.get(f"{LLAMA}/events"))[0] == 503
        assert (await page.get(LLAMA))[0] == 200, "the page itself can still be loaded"
        boards = page.ui._boards
        assert (len(boards), boards[Key("llm", "llama")].viewers) == (1, 8)
        for answer in watching:
            answer.close()
        page.say("Ready", "False", "EngineFailed", "a change finds out that they left")
        async with asyncio.timeout(120):
            while boards[Key("llm", "llama")].viewers:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.02)
        assert boards[Key("llm", "llama")]._task is None


async def test_what_cannot_be_read_any_more_is_said_above_what_was_read(page: ShownPage) -> None:
    await page.get("/")
    page.api.delete("PDCluster", "llm", "llama", uid=None, resource_version=None)
    _, html = await page.get(LLAMA)
    assert "It is gone: somebody deleted it." in html
    assert "llama serves: " in html, "the last that was known"


async def test_an_api_server_that_is_down_ends_nothing(
    page: ShownPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await page.get("/")

    async def down(*_: object, **__: object) -> None:
        raise ApiError("ApiServerUnreachable", "GET /apis: connection refused")

    with monkeypatch.context() as change:
        change.setattr(KubeClient, "call", down)
        _, html = await page.get(LLAMA)
        assert "The API server: GET /apis: connection refused" in html
        assert "The page shows what was read last." in html
    _, html = await page.get(LLAMA)
    assert "connection refused" not in html


async def test_a_look_that_raises_is_a_banner_and_the_polls_go_on(
    page: ShownPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await page.get("/")
    async with page.http.get(f"{page.base}{LLAMA}/events") as events:
        with monkeypatch.context() as change:
            change.setattr(series.History, "traffic", lambda _: round(float("nan")))
            async with asyncio.timeout(120):
                await told(events, "A fault of pdcluster ui (ValueError: cannot convert")
        page.say("Ready", "False", "Starting", "it is back")
        async with asyncio.timeout(120):
            await told(events, "it is back")


async def told(events: aiohttp.ClientResponse, words: str) -> None:
    """Read events until one has the words."""
    async for line in events.content:
        if words in line.decode():
            return
    raise AssertionError("the events ended")


async def test_what_this_account_may_not_read_is_a_note(
    page: ShownPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await page.get("/")
    call = KubeClient.call

    async def without_pods(client: KubeClient, method: str, path: str, **options: object) -> object:
        if path.endswith("/pods"):
            raise ApiError("Forbidden", 'User "me" cannot list resource "pods"')
        return await call(client, method, path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(KubeClient, "call", without_pods)
    _, html = await page.get(LLAMA)
    assert "The pods cannot be read: User &#34;me&#34; cannot list" in html
    assert "llama serves: " in html


async def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with KubeClient(await find_configuration_of_nothing(tmp_path)) as client:
            with pytest.raises(UserError) as error:
                async with UiServer(KubeReader(client, None, "llm"), None, port):
                    raise AssertionError("it listens")
    assert error.value.exit is Exit.MACHINE
    assert str(error.value).startswith(f"--port {port}: Address already in use; choose another")


async def find_configuration_of_nothing(folder: Path):  # type: ignore[no-untyped-def]
    async with Door(LocalApi(), dict, folder, "llm") as door:
        return await find_configuration(str(door.kubeconfig))


async def test_boards_that_nobody_watches_are_forgotten(
    page: ShownPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_BOARDS", 4)
    await page.get("/")
    for number in range(20):
        await page.get(f"/c/llm/none-{number}")
    assert len(page.ui._boards) <= 4


async def test_metrics_of_processes_are_read_and_a_silent_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from aiohttp import web

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text='pdcluster_kv_received_bytes_total{engine="0"} 7\nother 1\n')

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(readers, "ENGINE_METRICS_PORT", runner.addresses[0][1])
    answers = pod(engines("decode", 1)[0], podIP="127.0.0.1")
    silent = pod(engines("prefill", 1)[0], podIP="127.0.0.2")
    starting = pod(engines("prefill", 2)[1], podIP="127.0.0.1", conditions=[])
    [pages, problem] = await readers.gathered([answers, silent, starting], readers.page_of_process)
    await runner.cleanup()
    [(engine, reading)] = pages.items()
    assert engine == ("decode", "llm.llama.decode.7f9c4.0")
    assert {key.name: value for key, value in reading.items()} == {
        "pdcluster_kv_received_bytes_total": 7.0
    }
    assert problem.startswith("llama-prefill-5d8bf-0: ")


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [(200, "# HELP " + "x" * 3_000_000, "400, message:"), (307, "", "it answers 307")],
)
async def test_metrics_that_are_no_page_name_their_engine(
    monkeypatch: pytest.MonkeyPatch, status: int, text: str, said: str
) -> None:
    from aiohttp import web

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(status=status, text=text, headers={"Location": "/other"})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(readers, "ENGINE_METRICS_PORT", runner.addresses[0][1])
    one = pod(engines("decode", 1)[0], podIP="127.0.0.1")
    pages, problem = await readers.gathered([one], readers.page_of_process)
    await runner.cleanup()
    assert pages == {}
    assert problem.startswith(f"llama-decode-7f9c4-0: {said}")
