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
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.launchers import Target
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
        revision: of what it tells; None if it is another one at each request.
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

    async def changes(self, target: Target, seen: str, *, wait: bool) -> ChangesReport:
        self._take("wait" if wait else "state")
        revision = self.revision or str(now())
        if wait and seen == revision:
            await asyncio.sleep(self.keeps)
            return ChangesReport(seen)
        engine = EngineReport(
            ready=self.is_ready, engine=target.engine, engine_id=self.engine_id, routed=False
        )
        links = LinksReport(target.engine, self.engine_id, (LinkReport("p"),))
        return ChangesReport(revision, engine, links)

    async def put_peers(self, target: Target, document: PeersDocument) -> None:
        self._take("peers")

    async def tell_routed(self, target: Target, *, routed: bool) -> None:
        self._take("routed")


def play(story: Callable[[Launcher, LauncherMonitor], Awaitable[None]], **options: Any) -> None:
    async def played() -> None:
        launcher = Launcher()
        monitor = LauncherMonitor(launcher, lambda _: None, **{"period": 1.0, **options})
        await story(launcher, monitor)
        await monitor.stop()

    virtual_time.run(played())


def test_what_is_known_of_a_launcher_without_news_is_a_minute_old_at_most() -> None:
    async def story(launcher: Launcher, monitor: LauncherMonitor) -> None:
        launcher.revision = "1"
        monitor.follow(KEY, [D])
        await asyncio.sleep(130.0)
        first, *later = launcher.moments("state")
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
        monitor.assign(KEY, {D.engine: PeersDocument(1, (PeerEntry("p", "h:1"),))}, frozenset())
        await asyncio.sleep(5.5)
        assert len(launcher.moments("peers")) == 1
        launcher.fails["all"] = "refused"
        await asyncio.sleep(5.0)
        assert monitor.engines(KEY) == {}
        launcher.fails.clear()
        await asyncio.sleep(5.0)
        assert len(launcher.moments("peers")) == 2

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
            api_server=unused, launchers=launcher, events=unused, connector=unused, clock=unused,
            poll_seconds=5.0,
        )  # fmt: skip
        metadata = {"namespace": "ns", "name": "tiny", "uid": "c"}
        loop.store.put({"kind": "PDCluster", "metadata": metadata})
        loop.monitor.follow(KEY, [D])
        await asyncio.sleep(0.1)
        assert loop.queue.depth == 1
        await asyncio.sleep(21.0)
        assert launcher.moments("wait") == pytest.approx([5.0, 10.0, 15.0, 20.0])
        await loop.stop()

    virtual_time.run(played())
