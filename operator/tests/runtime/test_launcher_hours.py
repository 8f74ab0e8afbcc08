"""A launcher that is followed for minutes, in virtual time and with the periods that are in use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

import virtual_time
from pdcluster_connector.protocol.launcher_documents import (
    ChangesReport,
    EngineReport,
    LinkReport,
    LinksReport,
    PeerEntry,
    PeersDocument,
)
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.plan.launchers import Target
from pdcluster_operator.plan.types import PeerAssignment
from pdcluster_operator.runtime import launcher_monitor
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.interfaces import Key, LauncherError
from pdcluster_operator.runtime.launcher_monitor import LauncherMonitor

KEY = Key("ns", "tiny")
D = Target("ns.tiny.decode.a.0", Role.DECODE, "http://d", "2/0")


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture(autouse=True)
def no_other_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (launcher_monitor, launcher_monitor):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=now))


class Launcher:
    """A decode engine's launcher.

    Attributes:
        asked: when it was asked for what.
        fails: why it does not answer, by what it is asked; ``"all"`` for everything.
        revision: of what it tells; None if it cannot say when it has news.
        keeps: how long it keeps a question for news.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[float, str]] = []
        self.fails: dict[str, str] = {}
        self.engine_id = "d/1"
        self.revision: str | None = None
        self.keeps = 0.5
        self.is_ready = True

    def moments(self, what: str) -> list[float]:
        return [moment for moment, asked in self.asked if asked == what]

    def _take(self, what: str) -> None:
        self.asked.append((now(), what))
        if problem := self.fails.get(what) or self.fails.get("all"):
            raise LauncherError(problem)

    async def ready(self, target: Target) -> EngineReport:
        self._take("ready")
        return EngineReport(
            ready=self.is_ready, engine=target.engine, engine_id=self.engine_id, routed=False
        )

    async def links(self, target: Target) -> LinksReport:
        self._take("links")
        return LinksReport(target.engine, self.engine_id, (LinkReport("p"),))

    async def changes(self, target: Target, seen: str, *, wait: bool) -> ChangesReport | None:
        self._take("wait" if wait else "news")
        if wait and seen == self.revision:
            await asyncio.sleep(self.keeps)
        return None if self.revision is None else ChangesReport(self.revision)

    async def put_peers(self, target: Target, document: PeersDocument) -> None:
        self._take("peers")

    async def tell_routed(self, target: Target, *, routed: bool) -> None:
        self._take("routed")


def play(story: Callable[[Launcher, LauncherMonitor], Awaitable[None]], **options: Any) -> None:
    async def played() -> None:
        launcher = Launcher()
        monitor = LauncherMonitor(launcher, lambda _: None, **options)
        await story(launcher, monitor)
        await monitor.stop()

    virtual_time.run(played())


@pytest.mark.parametrize(("options", "period"), [({}, 1.0), ({"period": 4.0}, 4.0)])
def test_a_launcher_that_cannot_tell_is_polled_each_period_and_asked_again_after_a_minute(
    options: dict[str, float], period: float
) -> None:
    """A minute later, a newer launcher may be there."""

    async def story(launcher: Launcher, monitor: LauncherMonitor) -> None:
        monitor.follow(KEY, [D])
        await asyncio.sleep(130.0)
        polls = launcher.moments("ready")
        assert polls == pytest.approx([number * period for number in range(len(polls))])
        assert len(polls) > 30
        assert launcher.moments("news") == pytest.approx([0.0, 60.0, 120.0])

    play(story, **options)


def test_what_is_known_of_a_launcher_without_news_is_a_minute_old_at_most() -> None:
    async def story(launcher: Launcher, monitor: LauncherMonitor) -> None:
        launcher.revision = "1"
        monitor.follow(KEY, [D])
        await asyncio.sleep(130.0)
        first, *later = launcher.moments("ready")
        assert first == 0.0
        assert [59.0 <= moment / number <= 60.0 for number, moment in enumerate(later, 1)] == [
            True,
            True,
        ]

    play(story)


def test_a_launcher_that_was_silent_is_told_its_peers_again() -> None:
    """It may be another process, which says that it is the same."""

    async def story(launcher: Launcher, monitor: LauncherMonitor) -> None:
        monitor.follow(KEY, [D])
        monitor.assign(KEY, [PeerAssignment(D.engine, PeersDocument(1, (PeerEntry("p", "h:1"),)))])
        await asyncio.sleep(5.5)
        assert len(launcher.moments("peers")) == 1
        launcher.fails["all"] = "refused"
        await asyncio.sleep(5.0)
        assert monitor.engines(KEY) == {}
        launcher.fails.clear()
        await asyncio.sleep(5.0)
        assert len(launcher.moments("peers")) == 2

    play(story)


def test_what_the_process_before_said_of_its_links_goes_with_it() -> None:
    async def story(launcher: Launcher, monitor: LauncherMonitor) -> None:
        monitor.follow(KEY, [D])
        await asyncio.sleep(5.5)
        assert set(monitor.links(KEY)) == {D.engine}
        launcher.engine_id, launcher.fails["links"] = "d/2", "not yet"
        await asyncio.sleep(1.0)
        assert monitor.engines(KEY)[D.engine].engine_id == "d/2"
        assert monitor.links(KEY) == {}

    play(story)


def test_a_launcher_that_refuses_to_hear_of_routers_is_asked_each_period() -> None:
    async def story(launcher: Launcher, monitor: LauncherMonitor) -> None:
        launcher.revision, launcher.keeps = "1", 30.0
        launcher.fails["routed"] = "403 Forbidden"
        monitor.follow(KEY, [D])
        monitor.route(KEY, {D.engine})
        await asyncio.sleep(20.0)
        assert len(launcher.moments("routed")) >= 19

    play(story)


def test_the_log_tells_of_another_reason_of_silence(caplog: pytest.LogCaptureFixture) -> None:
    async def story(launcher: Launcher, monitor: LauncherMonitor) -> None:
        monitor.follow(KEY, [D])
        for problem in ("refused", "no route", "no route"):
            launcher.fails["all"] = problem
            await asyncio.sleep(5.0)

    with caplog.at_level(logging.INFO):
        play(story)
    said = [f"{D.engine} does not answer: {why}" for why in ("refused", "no route")]
    assert [text for text in caplog.messages if "does not answer" in text] == said


def test_the_loop_polls_as_often_as_it_was_told() -> None:
    async def played() -> None:
        launcher, unused = Launcher(), cast("Any", object())
        launcher.is_ready = False
        loop = ControlLoop(
            api=unused, launchers=launcher, events=unused, connector=unused, clock=unused,
            poll_seconds=5.0,
        )  # fmt: skip
        metadata = {"namespace": "ns", "name": "tiny", "uid": "c"}
        loop.store.put({"kind": "PDCluster", "metadata": metadata})
        loop.monitor.follow(KEY, [D])
        await asyncio.sleep(0.1)
        assert loop.queue.depth == 1
        await asyncio.sleep(21.0)
        assert launcher.moments("ready") == pytest.approx([0.0, 5.0, 10.0, 15.0, 20.0])
        await loop.stop()

    virtual_time.run(played())
