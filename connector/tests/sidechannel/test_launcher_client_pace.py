"""How often the launcher is asked and told, and what its wrong answers do: in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace

import virtual_time
from pdcluster_connector.protocol import launcher_documents as links
from pdcluster_connector.sidechannel.handshake import TryAgain
from pdcluster_connector.vllm.worker_side import link_keeper
from pdcluster_connector.vllm.worker_side.link_keeper import LauncherClient

ENGINE = "ns.c.prefill.r."


def entry(number: int) -> links.PeerEntry:
    return links.PeerEntry(f"{ENGINE}{number}", f"127.0.0.1:{1 + number}")


class Launcher:
    """A launcher in the client's own loop, whose answers the test changes."""

    def __init__(self) -> None:
        self.document = links.PeersDocument(1, ())
        self.waits = True
        self.news = asyncio.Event()
        self.status = {"peers": 200, "reports": 204}
        self.hangs = {"peers": False, "reports": False}
        self.moved_to = ""
        self.polls: list[float] = []
        self.sought: list[tuple[str, int]] = []  # the peers that were asked whether they live
        self.reports: list[tuple[float, links.RankReport]] = []
        self.tokens: list[str | None] = []

    async def serve(self, path: str) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/peers", self._peers)
        app.router.add_post("/v1/reports", self._take)
        app.router.add_route("*", "/elsewhere", self._elsewhere)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.UnixSite(runner, path).start()
        return runner

    async def _peers(self, request: web.Request) -> web.Response:
        self._note(request)
        self.polls.append(now())
        if self.moved_to:
            raise web.HTTPTemporaryRedirect(self.moved_to)
        if self.hangs["peers"]:
            await asyncio.sleep(3600)
        if self.waits and int(request.query["after"]) == self.document.generation:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), float(request.query["wait"]))
        return web.Response(body=links.encode_json(self.document), status=self.status["peers"])

    async def _take(self, request: web.Request) -> web.Response:
        self._note(request)
        if self.moved_to:
            raise web.HTTPTemporaryRedirect(self.moved_to)
        report = links.decode_report(await request.read())
        assert isinstance(report, links.RankReport)
        self.reports.append((now(), report))
        if self.hangs["reports"]:
            await asyncio.sleep(3600)
        return web.Response(status=self.status["reports"], text=None if self.accepts else "no")

    @property
    def accepts(self) -> bool:
        return self.status["reports"] == 204

    async def _elsewhere(self, request: web.Request) -> web.Response:
        self.tokens.append("elsewhere")
        return web.Response(status=204)

    def _note(self, request: web.Request) -> None:
        self.tokens.append(request.headers.get("Authorization"))

    def put(self, *entries: links.PeerEntry) -> None:
        self.document = links.PeersDocument(self.document.generation + 1, entries)
        self.news.set()
        self.news = asyncio.Event()

    def told(self) -> list[int]:
        return [len(report.links) for _, report in self.reports]


def now() -> float:
    return asyncio.get_running_loop().time()


def pauses(moments: list[float]) -> list[float]:
    return [later - sooner for sooner, later in pairwise(moments)]


class NoPeers:
    """Peers of which none answers, so no handshake is ever asked for."""

    on_gone = None

    def connect(self, *_: object) -> None:
        raise AssertionError("nobody answered")

    def forget(self, *_: object) -> None: ...

    def skew(self, _: object) -> None:
        """No clock is known."""

    @property
    def silence(self) -> NoPeers:
        return self

    async def asking(self, _: object, question: Awaitable[Any]) -> Any:
        return await question


def no_probe(*_: object, **__: object) -> Future[Any]:
    raise AssertionError("nobody answered")


URL = "http://127.0.0.1:5590"
Play = Callable[[Launcher, Callable[[], Awaitable[None]]], None]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    launcher = Launcher()

    async def nobody(_session: object, engine: str, _host: str, port: int, *_: object) -> TryAgain:
        launcher.sought.append((engine, port))
        await asyncio.sleep(1e6)
        return TryAgain("")

    monkeypatch.setattr("pdcluster_connector.sidechannel.handshake.ask_health", nobody)
    return launcher


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Run a story beside a client of the launcher.

    They speak over a Unix socket: what one has sent the other has received, so that time goes on
    only when both wait.
    """
    path = str(tmp_path / "s")

    def session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.UnixConnector(path))

    monkeypatch.setattr(link_keeper.handshake, "client_session", session)

    async def played(launcher: Launcher, story: Callable[[], Awaitable[None]]) -> None:
        runner = await launcher.serve(path)
        client = LauncherClient(
            f"{URL}/",
            "secret",
            rank=(0, 1),
            of=(1, 2),
            data_rank=3,
            peers=NoPeers(),  # type: ignore[arg-type]
            probe=no_probe,
        )
        task = asyncio.create_task(client._run())
        try:
            await story()
            assert not task.done(), "a client never ends by itself"
        finally:
            task.cancel()
            await asyncio.wait({task})
            client.close()
            await runner.cleanup()

    return lambda launcher, story: virtual_time.run(played(launcher, story))


def test_a_rank_without_news_reports_before_the_launcher_takes_it_for_silent(
    launcher: Launcher, play: Play
) -> None:
    async def story() -> None:
        await asyncio.sleep(61.0)

    play(launcher, story)
    found = pauses([moment for moment, _ in launcher.reports])
    assert 3.5 < min(found) <= max(found) < 5.0
    assert {(r.rank, r.of, r.data_rank) for _, r in launcher.reports} == {((0, 1), (1, 2), 3)}
    assert set(launcher.tokens) == {"Bearer secret"}


def test_changes_of_one_moment_are_one_report_and_it_comes_at_once(
    launcher: Launcher, play: Play
) -> None:
    async def story() -> None:
        await asyncio.sleep(10.0)
        before = len(launcher.reports)
        launcher.put(*map(entry, range(5)))
        began = now()
        await asyncio.sleep(1.0)
        [(moment, report)] = launcher.reports[before:]
        assert len(report.links) == 5
        assert moment - began < 0.2
        launcher.put(entry(0))
        await asyncio.sleep(0.2)
        assert launcher.told()[before:] == [5, 1]

    play(launcher, story)


def test_the_document_that_is_there_already_is_taken_at_once(
    launcher: Launcher, play: Play
) -> None:
    launcher.document = links.PeersDocument(1, (entry(0), entry(1)))

    async def story() -> None:
        await asyncio.sleep(0.2)
        assert launcher.told()[-1] == 2

    play(launcher, story)


def test_a_launcher_that_waits_is_asked_rarely_and_one_that_does_not_ten_times_a_second(
    launcher: Launcher, play: Play
) -> None:
    async def story() -> None:
        await asyncio.sleep(70.0)
        asked = pauses(launcher.polls[1:])
        assert len(asked) == 3
        assert all(20.0 <= pause < 20.5 for pause in asked), "and it answers every time"
        launcher.waits = False
        await asyncio.sleep(30.0)
        before = len(launcher.polls)
        await asyncio.sleep(10.0)
        assert 90 < len(launcher.polls) - before <= 101
        launcher.put(entry(0))
        await asyncio.sleep(0.2)
        assert launcher.told()[-1] == 1, "and news are taken within the tenth of a second"

    play(launcher, story)


@pytest.mark.parametrize("status", [201, 401, 500])
def test_a_report_that_is_not_taken_is_sent_again_and_complained_of_once(
    launcher: Launcher, play: Play, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def story() -> None:
        await asyncio.sleep(1.0)
        for _ in range(2):
            launcher.status["reports"] = status
            launcher.put(entry(0))
            began, before = now(), len(launcher.reports)
            await asyncio.sleep(10.0)
            found = pauses([began, *(moment for moment, _ in launcher.reports[before:])])
            assert 0.4 < min(found[1:]) <= max(found) < 1.0
            launcher.status["reports"] = 204
            await asyncio.sleep(1.0)
            before = len(launcher.reports)
            await asyncio.sleep(3.0)
            assert len(launcher.reports) == before, "it is taken, and there is no news"

    play(launcher, story)
    words = f"the launcher answered {status} to a report: no"
    assert [one.message for one in caplog.records] == [words] * 2, "once for each time"


def test_another_complaint_is_told_too(
    launcher: Launcher, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        launcher.status["peers"] = 503
        await asyncio.sleep(2.0)
        launcher.status["peers"] = 500
        await asyncio.sleep(2.0)

    play(launcher, story)
    assert [one.message[:26] for one in caplog.records] == [
        "the launcher answered 503 ",
        "the launcher answered 500 ",
    ]


def test_what_is_wrong_with_a_document_is_complained_of(
    launcher: Launcher, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        await asyncio.sleep(1.0)
        launcher.put(entry(0), entry(0))
        await asyncio.sleep(1.0)
        assert launcher.told()[-1] == 0
        launcher.put(entry(0))
        await asyncio.sleep(1.0)
        assert launcher.told()[-1] == 1

    play(launcher, story)
    assert [one.message for one in caplog.records] == [
        "the launcher answered 200 when asked for peers: an engine is named twice"
    ]


@pytest.mark.parametrize("status", [201, 404, 503])
def test_a_document_of_an_answer_that_is_not_200_is_not_used(
    launcher: Launcher, play: Play, status: int
) -> None:
    launcher.document = links.PeersDocument(1, (entry(0),))
    launcher.status["peers"] = status

    async def story() -> None:
        await asyncio.sleep(10.0)
        assert set(launcher.told()) == {0}
        assert 15 < len(launcher.polls) < 25, "half a second between two questions"
        launcher.status["peers"] = 200
        await asyncio.sleep(1.0)
        assert launcher.told()[-1] == 1

    play(launcher, story)


def test_a_launcher_that_hangs_is_told_again(launcher: Launcher, play: Play) -> None:
    launcher.hangs["reports"] = True

    async def story() -> None:
        await asyncio.sleep(60.0)

    play(launcher, story)
    found = pauses([moment for moment, _ in launcher.reports])
    assert 5.0 < min(found) <= max(found) < 6.75, "aiohttp rounds up to a whole second"


def test_a_launcher_that_hangs_is_asked_again_a_while_after_it_should_have_answered(
    launcher: Launcher, play: Play
) -> None:
    launcher.hangs["peers"] = True

    async def story() -> None:
        await asyncio.sleep(200.0)

    play(launcher, story)
    found = pauses(launcher.polls)
    assert 25.0 < min(found) <= max(found) < 35.0


def test_a_redirect_is_not_followed(launcher: Launcher, play: Play) -> None:
    """The token is for the launcher, and for nobody else."""

    async def story() -> None:
        launcher.moved_to = f"{URL}/elsewhere"
        await asyncio.sleep(5.0)
        assert "elsewhere" not in launcher.tokens
        launcher.moved_to = ""
        launcher.put(entry(0))
        await asyncio.sleep(1.0)
        assert launcher.told()[-1] == 1

    play(launcher, story)


def test_a_link_to_a_peer_that_is_not_named_any_more_is_given_up(
    launcher: Launcher, play: Play
) -> None:
    async def story() -> None:
        launcher.put(entry(0), entry(1), entry(2))
        await asyncio.sleep(1.0)
        launcher.put(entry(2), entry(3))
        await asyncio.sleep(1.0)
        [*_, (_, report)] = launcher.reports
        assert {link.engine for link in report.links} == {f"{ENGINE}2", f"{ENGINE}3"}
        keeping = [one for one in asyncio.all_tasks() if "keep" in str(one.get_coro())]
        assert len(keeping) == 2

    play(launcher, story)


def test_a_peer_of_another_size_is_sought_anew_at_the_same_address(
    launcher: Launcher, play: Play
) -> None:
    async def story() -> None:
        launcher.put(entry(0))
        await asyncio.sleep(1.0)
        launcher.put(replace(entry(0), engine_id=f"{ENGINE}0/aa"))
        await asyncio.sleep(1.0)
        assert launcher.sought == [(f"{ENGINE}0", 1)], "its incarnation alone is no other place"
        launcher.put(replace(entry(0), data_parallel_size=2))
        await asyncio.sleep(1.0)
        assert sorted(launcher.sought[1:]) == [(f"{ENGINE}0", 1), (f"{ENGINE}0", 2)]
        launcher.put(replace(entry(5), engine=f"{ENGINE}0"))
        await asyncio.sleep(1.0)
        assert launcher.sought[3:] == [(f"{ENGINE}0", 6)]

    play(launcher, story)
