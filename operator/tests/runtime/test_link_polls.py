from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from pdcluster_connector.protocol.launcher_documents import (
    ChangesReport,
    EngineReport,
    LinkReport,
    LinksReport,
    PeerEntry,
    PeersDocument,
    PromptsReport,
)
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.launchers import Target
from pdcluster_operator.plan.status.conditions import local_share
from pdcluster_operator.runtime import launcher_monitor
from pdcluster_operator.runtime.interfaces import Key, LauncherError
from pdcluster_operator.runtime.launcher_monitor import LauncherMonitor

KEY = Key("ns", "tiny")
P = Target("ns.tiny.prefill.a.0", Role.PREFILL, "http://p", "1/0")
D = Target("ns.tiny.decode.a.0", Role.DECODE, "http://d", "2/0")


class Launchers:
    """Launchers by URL; ``None`` is one that does not answer."""

    def __init__(self) -> None:
        self.ids: dict[str, str | None] = {"http://p": "p/1", "http://d": "d/1"}
        self.engines = {P.url: P.engine, D.url: D.engine}
        self.told: list[tuple[str, PeersDocument]] = []
        self.routed: dict[str, bool | None] = {}  # what each launcher knows, if it can be told
        self.routes: list[tuple[str, bool]] = []
        self.hang: set[str] = set()
        self.refuse_peers = False
        self.misses = 0  # polls of readiness, of whomever, that fail from now on
        self.polls = 0
        self.waits = 0
        self.ready_now = True
        self.asked: list[tuple[Role, bool]] = []  # who was asked for news, whether to wait
        self.revision: str | None = None  # None: another one at each request
        self.linked: tuple[LinkReport, ...] | None = None  # None: to the peers that it was sent
        self.prompts = PromptsReport(0, 0, "")

    async def ready(self, target: Target) -> EngineReport:
        url = target.url
        self.polls += 1
        if self.misses:
            self.misses -= 1
            raise LauncherError("too slow")
        if url in self.hang:
            await asyncio.sleep(60)
        if (engine_id := self.ids[url]) is None:
            raise LauncherError("refused")
        routed = self.routed.get(url)
        return EngineReport(
            ready=self.ready_now, engine=self.engines[url], engine_id=engine_id, routed=routed
        )

    async def links(self, target: Target) -> LinksReport:
        url = target.url
        sent = self.told[-1][1].peers if self.told and not self.refuse_peers else ()
        links = tuple(LinkReport(one.engine) for one in sent)
        linked = links if self.linked is None else self.linked
        return LinksReport(self.engines[url], self.ids[url] or "", linked, self.prompts)

    async def changes(self, target: Target, seen: str, *, wait: bool) -> ChangesReport:
        url = target.url
        self.waits += wait
        self.asked.append((target.role, wait))
        if self.ids[url] is None:
            raise LauncherError("refused")
        for _ in range(50 * wait):
            if self.revision != seen:
                break
            await asyncio.sleep(0.005)
            if self.ids[url] is None:
                raise LauncherError("the connection was closed")
        if self.revision is not None and self.revision == seen:
            return ChangesReport(seen)
        engine = await self.ready(target)
        revision = self.revision or str(len(self.asked))
        return ChangesReport(revision, engine, await self.links(target))

    async def put_peers(self, target: Target, document: PeersDocument) -> None:
        self.told.append((self.ids[target.url] or "", document))
        if self.refuse_peers:
            raise LauncherError("400")

    async def tell_routed(self, target: Target, *, routed: bool) -> None:
        self.routes.append((target.engine, routed))
        self.routed[target.url] = routed


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.005)


def monitor_of(launchers: Launchers) -> tuple[LauncherMonitor, list[Key]]:
    woken: list[Key] = []
    return LauncherMonitor(launchers, woken.append, period=0.01), woken


def peers(generation: int) -> dict[str, PeersDocument]:
    return {D.engine: PeersDocument(generation, (PeerEntry(P.engine, "h:1"),))}


async def test_reports_come_in_and_a_change_wakes_the_cluster_once() -> None:
    launchers = Launchers()
    monitor, woken = monitor_of(launchers)
    monitor.follow(KEY, [P, D])
    await until(lambda: len(monitor.engines(KEY)) == 2)
    assert set(monitor.links(KEY)) == {D.engine}
    await asyncio.sleep(0.05)
    assert len(woken) == 2
    launchers.ids["http://p"] = "p/2"
    await until(lambda: monitor.engines(KEY)[P.engine].engine_id == "p/2")
    await asyncio.sleep(0.05)
    assert len(woken) == 3
    await monitor.stop()


async def test_counts_of_prompts_come_in_and_wake_the_cluster_only_with_another_share() -> None:
    launchers = Launchers()
    monitor, woken = monitor_of(launchers)
    monitor.follow(KEY, [D])
    await until(lambda: monitor.links(KEY))
    await asyncio.sleep(0.05)
    before = len(woken)
    launchers.prompts = PromptsReport(1000, 0, "")
    await until(lambda: local_share(monitor.links(KEY).values()) == 0)
    await asyncio.sleep(0.05)
    assert len(woken) == before
    launchers.prompts = PromptsReport(1000, 250, "NoTicket")
    await until(lambda: local_share(monitor.links(KEY).values()) == 0.25)
    await until(lambda: len(woken) == before + 1)
    await monitor.stop()


async def test_peers_are_sent_once_and_again_when_they_or_the_engine_change() -> None:
    launchers = Launchers()
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [P, D])
    monitor.assign(KEY, peers(1), frozenset())
    await until(lambda: launchers.told)
    await asyncio.sleep(0.05)
    assert launchers.told == [("d/1", peers(1)[D.engine])]
    monitor.assign(KEY, peers(2), frozenset())
    await until(lambda: len(launchers.told) == 2)
    launchers.ids["http://d"] = "d/2"
    await until(lambda: len(launchers.told) == 3)
    assert launchers.told[1:] == [("d/1", peers(2)[D.engine]), ("d/2", peers(2)[D.engine])]
    await monitor.stop()


async def test_an_engine_is_told_whether_routers_may_send_it_requests() -> None:
    launchers = Launchers()
    launchers.revision = "1"
    launchers.routed[D.url] = False  # the other launcher is of a version that cannot be told
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [P, D])
    await until(lambda: len(monitor.engines(KEY)) == 2)
    assert launchers.routes == []
    monitor.assign(KEY, {}, {P.engine, D.engine})
    await until(lambda: monitor.engines(KEY)[D.engine].routed)
    launchers.routed[D.url] = False  # its process starts again
    launchers.revision = "2"
    await until(lambda: len(launchers.routes) == 2)
    monitor.assign(KEY, {}, {P.engine})
    await until(lambda: len(launchers.routes) == 3)
    assert launchers.routes == [(D.engine, True), (D.engine, True), (D.engine, False)]
    await monitor.stop()


async def test_the_engines_of_a_cluster_that_was_deleted_wait_for_no_router() -> None:
    launchers = Launchers()
    launchers.routed |= {D.url: False, P.url: False}
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [P, D])
    monitor.assign(KEY, {}, {D.engine})
    await until(lambda: (found := monitor.engines(KEY).get(D.engine)) and found.routed)
    monitor.dismiss(KEY)
    await until(lambda: launchers.routed[D.url] is False)
    assert launchers.routes == [(D.engine, True), (D.engine, False)]
    assert monitor.engines(KEY) == {}
    await monitor.stop()


async def test_peers_that_an_older_document_replaced_are_sent_again() -> None:
    """A busy launcher may take in a request that the operator has long given up."""
    launchers = Launchers()
    launchers.linked = ()
    body = PeersDocument(2, (PeerEntry(P.engine, "h:1"),))
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [D])
    monitor.assign(KEY, {D.engine: body}, frozenset())
    await until(lambda: len(launchers.told) >= 2)  # as long as its links do not name the peer
    launchers.linked = (LinkReport(prefill=P.engine, prefill_engine_id="p/1"),)
    await until(lambda: monitor.links(KEY)[D.engine].links)
    told = len(launchers.told)
    await asyncio.sleep(0.1)
    assert len(launchers.told) == told
    await monitor.stop()


async def test_peers_that_an_older_document_brought_back_are_taken_away_again() -> None:
    launchers = Launchers()
    here, gone = (
        LinkReport(prefill=name, prefill_engine_id="p/1")
        for name in (P.engine, "ns.tiny.prefill.a.1")
    )
    launchers.linked = (here,)
    body = PeersDocument(2, (PeerEntry(P.engine, "h:1"),))
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [D])
    monitor.assign(KEY, {D.engine: body}, frozenset())
    await until(lambda: len(launchers.told) == 1)
    launchers.linked = (here, gone)
    await until(lambda: len(launchers.told) >= 2)
    await monitor.stop()


async def test_an_engine_without_links_is_not_told_that_there_are_no_peers() -> None:
    launchers = Launchers()
    launchers.linked = ()
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [D])
    nobody = {D.engine: PeersDocument(1, ())}
    monitor.assign(KEY, nobody, frozenset())
    await until(lambda: launchers.polls > 3)
    assert launchers.told == []
    launchers.linked = (LinkReport(prefill=P.engine),)  # another operator told it
    await until(lambda: launchers.told == [("d/1", nobody[D.engine])])
    await monitor.stop()


async def test_refused_peers_are_sent_again() -> None:
    launchers = Launchers()
    launchers.refuse_peers = True
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [D])
    monitor.assign(KEY, peers(1), frozenset())
    await until(lambda: len(launchers.told) >= 3)
    await monitor.stop()


async def test_silence_becomes_unknown_and_never_a_report() -> None:
    launchers = Launchers()
    monitor, woken = monitor_of(launchers)
    monitor.follow(KEY, [D])
    await until(lambda: monitor.links(KEY))
    launchers.ids["http://d"] = None
    await until(lambda: not monitor.engines(KEY))
    assert not monitor.links(KEY)
    assert len(woken) == 2
    await monitor.stop()


async def test_an_answer_that_breaks_the_operator_is_no_answer_and_polling_goes_on() -> None:
    launchers = Launchers()
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [D])
    await until(lambda: monitor.engines(KEY))
    read = launchers.ready

    async def broken(url: str) -> EngineReport:
        raise RecursionError("maximum recursion depth exceeded")

    launchers.ready = broken  # type: ignore[method-assign]
    await until(lambda: not monitor.engines(KEY))
    launchers.ready = read  # type: ignore[method-assign]
    await until(lambda: monitor.engines(KEY))
    await monitor.stop()


async def test_one_missed_poll_is_no_silence() -> None:
    launchers = Launchers()
    monitor, woken = monitor_of(launchers)
    monitor.follow(KEY, [D])
    await until(lambda: monitor.links(KEY))
    before = list(woken)
    for _ in range(3):  # one at a time: answers between them make each the first
        launchers.misses = 1
        await until(lambda: not launchers.misses)
        answered = launchers.polls + 2
        await until(lambda answered=answered: launchers.polls >= answered)
    assert woken == before, "what was known would have gone and come back"
    assert monitor.engines(KEY)
    launchers.misses = 2
    await until(lambda: len(woken) == len(before) + 2)  # silent, and heard again
    assert monitor.engines(KEY)
    await monitor.stop()


async def test_one_that_hangs_delays_nobody() -> None:
    launchers = Launchers()
    launchers.hang.add("http://p")
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [P, D])
    await until(lambda: D.engine in monitor.engines(KEY))
    assert P.engine not in monitor.engines(KEY)
    await monitor.stop()


async def test_what_an_old_process_said_goes_with_it() -> None:
    launchers = Launchers()
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [P, D])
    await until(lambda: len(monitor.engines(KEY)) == 2)
    launchers.hang.add("http://d")
    monitor.follow(KEY, [P, Target(D.engine, D.role, D.url, "2/1")])
    assert set(monitor.engines(KEY)) == {P.engine}
    assert monitor.links(KEY) == {}
    monitor.follow(KEY, [])
    assert monitor.engines(KEY) == {}
    await monitor.stop()


async def test_another_engine_on_the_address_is_not_believed() -> None:
    launchers = Launchers()
    launchers.engines["http://d"] = "ns.other.decode.a.0"
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [D])
    await asyncio.sleep(0.05)
    assert monitor.engines(KEY) == {}
    await monitor.stop()


async def test_all_are_heard_when_every_engine_has_answered() -> None:
    launchers = Launchers()
    monitor, woken = monitor_of(launchers)
    monitor.follow(KEY, [P, D])
    assert not monitor.all_heard(KEY)
    await until(lambda: len(woken) == 2)
    assert monitor.all_heard(KEY)
    assert set(monitor.engines(KEY)) == {P.engine, D.engine}
    await monitor.stop()


async def test_all_are_heard_and_the_cluster_wakes_when_an_engine_stays_silent() -> None:
    launchers = Launchers()
    launchers.ids["http://d"] = None
    monitor, woken = monitor_of(launchers)
    monitor.follow(KEY, [D])
    await until(lambda: woken)
    assert monitor.all_heard(KEY)
    assert not monitor.engines(KEY)
    await asyncio.sleep(0.05)
    assert len(woken) == 1, "silence that goes on is no news"
    await monitor.stop()


async def test_one_that_hangs_stays_unheard_until_it_is_gone() -> None:
    launchers = Launchers()
    launchers.hang.add("http://p")
    monitor, _ = monitor_of(launchers)
    assert monitor.followed_seconds(KEY) == 0
    monitor.follow(KEY, [P, D])
    await until(lambda: D.engine in monitor.engines(KEY))
    assert not monitor.all_heard(KEY)
    await until(lambda: monitor.followed_seconds(KEY) > 0)
    monitor.follow(KEY, [D])
    assert monitor.all_heard(KEY), "an engine that is gone is not waited for"
    monitor.forget(KEY)
    assert monitor.followed_seconds(KEY) == 0
    await monitor.stop()


async def test_a_launcher_without_news_is_not_polled_and_news_come_in() -> None:
    launchers = Launchers()
    launchers.revision = "1"
    monitor, woken = monitor_of(launchers)
    monitor.follow(KEY, [P])
    await until(lambda: launchers.waits >= 4)
    assert launchers.polls == 1
    launchers.ids["http://p"], launchers.revision = "p/2", "2"
    await until(lambda: monitor.engines(KEY)[P.engine].engine_id == "p/2")
    assert len(woken) == 2
    await monitor.stop()


async def test_new_peers_do_not_wait_for_news() -> None:
    launchers = Launchers()
    launchers.revision = "1"
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [D])
    await until(lambda: launchers.waits >= 2)
    for generation in (1, 2):
        monitor.assign(KEY, peers(generation), frozenset())
        await until(lambda generation=generation: len(launchers.told) == generation)
    monitor.assign(KEY, peers(2), frozenset())
    waits = launchers.waits
    await until(lambda: launchers.waits >= waits + 3)
    assert len(launchers.told) == 2
    await monitor.stop()


async def test_news_that_come_with_all_that_is_told_need_no_other_question() -> None:
    launchers = Launchers()
    launchers.revision = "1"
    monitor, woken = monitor_of(launchers)
    monitor.follow(KEY, [D])
    await until(lambda: launchers.waits)
    assert D.engine in monitor.links(KEY)
    monitor.assign(KEY, peers(1), frozenset())
    await until(lambda: launchers.told)
    assert launchers.asked == [(Role.DECODE, False), (Role.DECODE, True)], "one still waits"
    launchers.linked, launchers.revision = (LinkReport(prefill=P.engine),), "2"
    await until(lambda: monitor.links(KEY)[D.engine].links)
    await until(lambda: launchers.waits == 2)
    assert len(woken) == 2
    await monitor.stop()


async def test_an_engine_that_refused_peers_while_it_was_asked_for_news_is_followed_on() -> None:
    launchers = Launchers()
    launchers.revision = "1"
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [D])
    await until(lambda: launchers.waits)
    launchers.refuse_peers = True
    monitor.assign(KEY, peers(1), frozenset())
    await until(lambda: len(launchers.told) >= 2)
    launchers.refuse_peers = False
    waits = launchers.waits
    await until(lambda: launchers.waits > waits)
    launchers.ids[D.url], launchers.revision = "d/2", "2"
    await until(lambda: monitor.engines(KEY)[D.engine].engine_id == "d/2")
    await monitor.stop()


async def test_a_launcher_without_news_is_asked_for_all_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher_monitor, "CHECK_SECONDS", 1.5)
    launchers = Launchers()
    launchers.revision = "1"
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [D])
    await until(lambda: monitor.links(KEY))
    launchers.prompts = PromptsReport(1000, 0, "")  # a number, which is no news
    await until(lambda: local_share(monitor.links(KEY).values()) == 0)
    assert launchers.asked.count((Role.DECODE, False)) == 2
    await monitor.stop()


async def test_a_launcher_that_dies_while_it_is_asked_for_news_is_polled_at_once() -> None:
    launchers = Launchers()
    launchers.revision = "1"
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [P])
    await until(lambda: launchers.waits >= 2)
    launchers.ids["http://p"] = None
    await until(lambda: not monitor.engines(KEY))
    launchers.ids["http://p"] = "p/2"
    await until(lambda: monitor.engines(KEY))
    await monitor.stop()


async def test_the_log_says_once_why_a_launcher_does_not_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    launchers = Launchers()
    launchers.ids[P.url] = None
    monitor, _ = monitor_of(launchers)
    with caplog.at_level(logging.INFO):
        monitor.follow(KEY, [P])
        await until(lambda: len(launchers.asked) > 10)
        assert caplog.messages == [f"{P.engine} does not answer: refused"]
        launchers.ids[P.url] = "p/1"
        await until(lambda: monitor.engines(KEY))
        launchers.ids[P.url] = None
        await until(lambda: len(caplog.messages) == 2)
    await monitor.stop()


@pytest.mark.parametrize("revision", [None, "a"])
async def test_peers_that_change_while_others_are_sent_are_sent_next(revision: str | None) -> None:
    class Slow(Launchers):
        async def put_peers(self, target: Target, document: PeersDocument) -> None:
            await super().put_peers(target, document)
            monitor.assign(KEY, peers(2), frozenset())

    launchers = Slow()
    launchers.revision = revision
    monitor, _ = monitor_of(launchers)
    monitor.follow(KEY, [D])
    await until(lambda: monitor.engines(KEY))
    monitor.assign(KEY, peers(1), frozenset())
    await until(lambda: len(launchers.told) >= 2)
    await asyncio.sleep(0.1)
    assert [body.generation for _, body in launchers.told] == [1, 2]
    await monitor.stop()
