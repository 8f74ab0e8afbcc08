"""One link over hours, in virtual time: when its peer is asked, and what is reported."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace as replace_probe
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from loopback_engines import SHAPE, probed, shards_of
from msgspec.structs import replace

import virtual_time
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.protocol import launcher_documents as links, messages as m
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.launcher_documents import LinkState, RankLink
from pdcluster_connector.protocol.load_report import ReceiveRate
from pdcluster_connector.sidechannel.handshake import TryAgain
from pdcluster_connector.vllm.worker_side import link_keeper

ENGINE = "ns.c.prefill.r.0"
FIRST, SECOND = f"{ENGINE}/00000000000000aa", f"{ENGINE}/00000000000000bb"
ENTRY = links.PeerEntry(ENGINE, "10.0.0.1:5600", FIRST)
REFUSED = Failure(Reason.MODEL_MISMATCH, "another model")
SILENT = TryAgain("10.0.0.1:5600: connection refused")


class Peer:
    """A prefill engine: what it answers, after how many seconds, and when it was asked."""

    def __init__(self) -> None:
        self.health: m.HealthReply | Failure | TryAgain = m.HealthReply(FIRST, "prefill", 1)
        self.handshake: Failure | None = None
        self.probed: ProbeResult | Failure | Exception | None = probed()
        self.answers_after = self.shakes_after = self.probed_after = 0.0
        self.asked: list[float] = []
        self.shaken: list[tuple[str, str, int]] = []
        self.answers: list[Callable[[m.EngineMetadata | Failure], None]] = []
        self.probes: list[tuple[float, bool, Future[Any]]] = []
        self.tls: list[object] = []
        self.noted: list[tuple[str, int]] = []

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def ask_health(
        self, _session: object, _engine: str, _host: str, _port: int, seconds: float, tls: object
    ) -> object:
        self.asked.append(self.now)
        self.tls.append(tls)
        await asyncio.sleep(min(self.answers_after, seconds))
        return self.health if self.answers_after < seconds else SILENT

    def connect(
        self,
        engine_id: str,
        host: str,
        port: int,
        deadline: Callable[[], float],
        done: Callable[[m.EngineMetadata | Failure], None],
    ) -> None:
        self.shaken.append((engine_id, host, port))
        self.answers.append(done)
        late = Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "no handshake in time")
        metadata = m.EngineMetadata(1, engine_id, SHAPE, shards_of(engine_id))
        ready = self.now + self.shakes_after
        answer = late if ready > deadline() else self.handshake or metadata
        asyncio.get_running_loop().call_at(min(ready, deadline()), done, answer)

    @property
    def silence(self) -> Peer:
        return self

    async def asking(self, address: tuple[str, int], question: Awaitable[Any]) -> Any:
        self.noted.append(address)
        return await question

    def probe(self, _metadata: m.EngineMetadata, /, *, check: bool = False) -> Future[Any]:
        future: Future[Any] = Future()
        self.probes.append((self.now, check, future))
        loop, found = asyncio.get_running_loop(), self.probed
        if isinstance(found, Exception):
            loop.call_later(self.probed_after, future.set_exception, found)
        elif found is not None:
            loop.call_later(self.probed_after, _answer, future, found)
        return future

    @property
    def checks(self) -> list[float]:
        return [moment for moment, check, _ in self.probes if check]


def _answer(future: Future[Any], found: object) -> None:
    if not future.cancelled():
        future.set_result(found)


class Kept:
    """A keeper at work, and all that it has reported."""

    def __init__(self, module: ModuleType, peer: Peer, entry: links.PeerEntry, rank: int) -> None:
        self.peer = peer
        self.reports: list[tuple[float, RankLink]] = []
        self.keeper = module.LinkKeeper(entry, rank, peer, peer.probe, self._changed, "tls")
        self.first = self.keeper.report

    def _changed(self) -> None:
        self.reports.append((self.peer.now, self.keeper.report))

    @property
    def states(self) -> list[LinkState]:
        return [report.state for _, report in self.reports]

    @property
    def last(self) -> RankLink:
        return self.reports[-1][1]


Story = Callable[[Kept], Awaitable[None]]
Tell = Callable[..., Kept]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Run ``story`` beside a keeper, in a process that has made no link before."""
    spec = importlib.util.find_spec(link_keeper.__name__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def told(peer: Peer, story: Story, entry: links.PeerEntry = ENTRY, data_rank: int = 0) -> Kept:
        async def play() -> Kept:
            monkeypatch.setattr(module.handshake, "ask_health", peer.ask_health)
            clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
            monkeypatch.setattr(module, "time", clock)
            kept = Kept(module, peer, entry, data_rank)
            task = asyncio.create_task(kept.keeper.keep(object()))
            await story(kept)
            assert not task.done(), "a keeper never ends by itself"
            task.cancel()
            await asyncio.wait({task})
            return kept

        return virtual_time.run(play())

    return told


def for_seconds(seconds: float) -> Story:
    async def story(_kept: Kept) -> None:
        await asyncio.sleep(seconds)

    return story


def pauses(moments: list[float]) -> list[float]:
    return [later - sooner for sooner, later in pairwise(moments)]


def test_before_the_first_answer_a_link_is_pending_under_the_name_that_is_known(tell: Tell) -> None:
    peer = Peer()
    peer.answers_after = 2.0
    known = tell(peer, for_seconds(1.0), replace(ENTRY, data_parallel_size=4), 3)
    assert known.first == RankLink(ENGINE, FIRST, LinkState.PENDING, data_rank=3)
    assert known.reports == []
    unknown = tell(peer, for_seconds(1.0), replace(ENTRY, engine_id=""))
    assert unknown.first == RankLink(ENGINE, ENGINE, LinkState.PENDING)


def test_an_established_link_tells_what_was_measured(tell: Tell) -> None:
    peer = Peer()
    peer.probed = probed(notice="slow")
    kept = tell(peer, for_seconds(1.0))
    [(moment, report)] = kept.reports
    assert moment == 0.0
    assert report == RankLink(
        ENGINE, FIRST, LinkState.ESTABLISHED, "", "slow", 2**31, report.establishment
    )
    assert report.establishment > 0, "0 stands for a link that is not established"
    assert peer.shaken == [(FIRST, "10.0.0.1", 5600)]
    assert peer.tls == ["tls"], "the side channel is asked with this engine's certificate"


def test_a_failed_link_tells_why_and_nothing_that_was_measured_before(tell: Tell) -> None:
    async def story(kept: Kept) -> None:
        await asyncio.sleep(1.0)
        kept.peer.health = SILENT
        kept.keeper.gone(FIRST, Failure(Reason.PEER_RESTARTED, "it is gone"))
        await asyncio.sleep(0.1)

    kept = tell(Peer(), story)
    assert kept.states == [LinkState.ESTABLISHED, LinkState.FAILED]
    assert kept.last == RankLink(
        ENGINE, FIRST, LinkState.FAILED, Reason.PEER_RESTARTED.value, "it is gone"
    )


@pytest.mark.parametrize(
    ("wrong", "least", "most"),
    [
        ({"health": SILENT}, 0.25, 0.5),
        ({"handshake": Failure(Reason.PEER_RESTARTED, "")}, 0.25, 0.5),
        ({"handshake": Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "")}, 0.25, 0.5),
        ({"health": Failure(Reason.AUTHENTICATION_FAILED, "")}, 2.5, 5.0),
        ({"handshake": REFUSED}, 2.5, 5.0),
        ({"probed": probed(Failure(Reason.PROBE_CORRUPTED, ""))}, 2.5, 5.0),
        ({"probed": OSError("no device")}, 2.5, 5.0),
        ({"health": m.HealthReply(f"{ENGINE}7/aa", "prefill", 1)}, 2.5, 5.0),
    ],
)
def test_a_peer_that_may_be_back_is_asked_sooner_than_one_that_refuses(
    tell: Tell, wrong: dict[str, Any], least: float, most: float
) -> None:
    """The pauses differ, so that the ranks of an engine do not ask all at the same time."""
    peer = Peer()
    vars(peer).update(wrong)
    kept = tell(peer, for_seconds(60 * most))
    found = pauses(peer.asked)
    assert least <= min(found) < least * 1.4
    assert most / 1.3 < max(found) <= most
    assert kept.states == [LinkState.FAILED], "nothing has changed since"


def test_a_link_that_was_held_is_tried_again_soon_whatever_ended_it(tell: Tell) -> None:
    async def story(kept: Kept) -> None:
        for _ in range(40):
            await asyncio.sleep(1.0)
            kept.keeper.gone(FIRST, Failure(Reason.BACKEND_ERROR, "dropped"))
            kept.reports.append((kept.peer.now, kept.keeper.report))

    kept = tell(Peer(), story)
    lost = [moment for moment, one in kept.reports if one.state is LinkState.FAILED]
    later = [next(again for again in kept.peer.asked if again > moment) for moment in lost]
    waited = [again - moment for moment, again in zip(lost, later, strict=True)]
    assert 0.25 <= min(waited) <= max(waited) <= 0.5
    numbers = [one.establishment for _, one in kept.reports if one.establishment]
    assert sorted(set(numbers)) == list(dict.fromkeys(numbers)), "each one has a higher number"
    assert len(set(numbers)) > 30


@pytest.mark.parametrize(("after", "answers"), [(2.9, True), (3.1, False)])
def test_a_peer_has_three_seconds_to_say_that_it_lives(
    tell: Tell, after: float, answers: bool
) -> None:
    peer = Peer()
    peer.answers_after = after
    kept = tell(peer, for_seconds(4.0))
    assert kept.last.state is (LinkState.ESTABLISHED if answers else LinkState.FAILED)
    assert kept.reports[0][0] == min(after, 3.0)


@pytest.mark.parametrize(("after", "in_time"), [(29.9, True), (30.1, False)])
def test_a_handshake_has_half_a_minute(tell: Tell, after: float, in_time: bool) -> None:
    peer = Peer()
    peer.shakes_after = after
    kept = tell(peer, for_seconds(31.0))
    assert kept.last.state is (LinkState.ESTABLISHED if in_time else LinkState.FAILED)
    assert kept.reports[0][0] == min(after, 30.0)


@pytest.mark.parametrize(("after", "in_time"), [(59.9, True), (60.1, False)])
def test_a_probe_has_a_minute_and_is_given_up_then(tell: Tell, after: float, in_time: bool) -> None:
    peer = Peer()
    peer.probed_after = after
    kept = tell(peer, for_seconds(62.0))
    [(_, _, probe), *_] = peer.probes
    assert kept.states == [LinkState.ESTABLISHED if in_time else LinkState.FAILED]
    assert probe.cancelled() is not in_time
    if not in_time:
        assert kept.last.reason == Reason.TRANSFER_STALLED.value
        assert "more than 60 s" in kept.last.message


def test_a_probe_that_the_receiver_gives_up_is_a_failed_link(tell: Tell) -> None:
    async def story(kept: Kept) -> None:
        await asyncio.sleep(1.0)
        [(_, _, probe)] = kept.peer.probes
        probe.cancel()
        await asyncio.sleep(0.1)

    peer = Peer()
    peer.probed = None
    kept = tell(peer, story)
    assert (kept.last.reason, kept.last.message) == ("BackendError", "the probe was cancelled")


def test_a_peer_that_is_gone_ends_a_probe_that_hangs(tell: Tell) -> None:
    async def story(kept: Kept) -> None:
        await asyncio.sleep(10.0)
        kept.keeper.gone(FIRST, Failure(Reason.PEER_RESTARTED, "it is gone"))
        await asyncio.sleep(0.1)

    peer = Peer()
    peer.probed = None
    kept = tell(peer, story)
    [(moment, report)] = kept.reports
    assert (moment, report.message) == (10.0, "it is gone")
    assert peer.probes[0][2].cancelled(), "its place is free again"


def test_an_established_link_is_checked_every_five_to_seven_seconds(tell: Tell) -> None:
    peer = Peer()
    kept = tell(peer, for_seconds(600.0))
    found = pauses([0.0, *peer.checks])
    assert 5.0 <= min(found) < 5.5
    assert 6.5 < max(found) <= 7.0
    assert len(peer.probes) == len(peer.checks) + 1, "all of the probe region is read once"
    assert kept.states == [LinkState.ESTABLISHED], "checks that pass are no news"
    assert len(peer.asked) == 1


def test_a_check_brings_how_fast_receives_were_and_a_link_that_is_lost_forgets_it(
    tell: Tell,
) -> None:
    slow = ReceiveRate(1e8, 9e7, 16, 2**30)

    async def story(kept: Kept) -> None:
        await asyncio.sleep(1.0)
        assert not kept.keeper.report.receives
        kept.peer.probed = replace_probe(probed(), receives=slow)
        await asyncio.sleep(7.0)
        assert kept.keeper.report.receives == slow
        kept.peer.probed = probed()
        await asyncio.sleep(7.0)
        assert not kept.keeper.report.receives, "too few are left"
        kept.peer.probed = replace_probe(probed(), receives=slow)
        await asyncio.sleep(7.0)
        kept.keeper.gone(FIRST, Failure(Reason.PEER_RESTARTED, "it is gone"))
        await asyncio.sleep(0.1)

    kept = tell(Peer(), story)
    assert kept.states == [LinkState.ESTABLISHED, LinkState.FAILED], "a rate alone is no news"
    assert not kept.last.receives


def test_a_check_that_finds_nothing_ends_the_link(tell: Tell) -> None:
    async def story(kept: Kept) -> None:
        await asyncio.sleep(1.0)
        kept.peer.probed = probed(Failure(Reason.TRANSFER_STALLED, "a read did not land"))
        await asyncio.sleep(7.0)

    kept = tell(Peer(), story)
    assert kept.states == [LinkState.ESTABLISHED, LinkState.FAILED]
    assert kept.last.message == "a read did not land"


def test_news_of_another_incarnation_or_of_one_that_is_gone_already_are_no_news(tell: Tell) -> None:
    async def story(kept: Kept) -> None:
        await asyncio.sleep(1.0)
        kept.keeper.gone(SECOND, Failure(Reason.PEER_RESTARTED, "another one"))
        await asyncio.sleep(1.0)
        assert kept.states == [LinkState.ESTABLISHED]
        kept.peer.health = m.HealthReply(SECOND, "prefill", 1)
        for cause in ("the first cause", "the second cause"):
            kept.keeper.gone(FIRST, Failure(Reason.PEER_RESTARTED, cause))
        await asyncio.sleep(1.0)
        kept.keeper.gone(FIRST, Failure(Reason.PEER_RESTARTED, "the former one"))
        await asyncio.sleep(1.0)

    kept = tell(Peer(), story)
    assert [(one.state.value, one.engine_id, one.message) for _, one in kept.reports] == [
        ("Established", FIRST, ""),
        ("Failed", FIRST, "the first cause"),
        ("Established", SECOND, ""),
    ]


def test_an_entry_may_name_the_incarnation_until_the_peer_has_said_it(tell: Tell) -> None:
    async def story(kept: Kept) -> None:
        await asyncio.sleep(1.0)
        kept.keeper.rename(ENTRY)
        assert kept.keeper.report.engine_id == FIRST
        kept.keeper.rename(replace(ENTRY, engine_id=""))
        assert kept.keeper.report.engine_id == FIRST, "it names none"
        await asyncio.sleep(3.0)
        kept.keeper.rename(replace(ENTRY, engine_id=FIRST))
        assert kept.keeper.report.engine_id == SECOND, "the operator knows it later"

    peer = Peer()
    peer.health, peer.answers_after = m.HealthReply(SECOND, "prefill", 1), 2.0
    kept = tell(peer, story, replace(ENTRY, engine_id=""))
    assert (kept.first.engine_id, kept.last.engine_id) == (ENGINE, SECOND)


def test_a_failure_of_many_words_fits_into_a_report(tell: Tell) -> None:
    peer = Peer()
    peer.handshake = Failure(Reason.LAYER_MISMATCH, "x" * 10_000)
    report = links.RankReport((0, 0), (1, 1), (tell(peer, for_seconds(1.0)).last,))
    assert links.decode_report(links.encode_json(report)) == report


@pytest.mark.parametrize(
    ("runs", "size", "rank", "message"),
    [
        ("", 1, 0, ""),
        ("_dp0", 2, 0, ""),
        ("_dp1", 2, 1, ""),
        ("_dp0", 1, 0, "data-parallel rank 0 of ns.c.prefill.r.0, not the only rank"),
        ("", 2, 0, "the only rank of ns.c.prefill.r.0, not data-parallel rank 0"),
        ("_dp0", 2, 1, "data-parallel rank 0 of ns.c.prefill.r.0, not data-parallel rank 1"),
    ],
)
def test_who_answers_must_be_the_rank_that_is_meant(
    tell: Tell, runs: str, size: int, rank: int, message: str
) -> None:
    peer = Peer()
    peer.health = m.HealthReply(f"{FIRST}{runs}", "prefill", 1)
    kept = tell(peer, for_seconds(1.0), replace(ENTRY, data_parallel_size=size), rank)
    assert kept.last.data_rank == rank
    assert kept.last.engine_id == FIRST
    if message:
        assert kept.last.reason == Reason.ENGINE_ID_INCONSISTENT.value
        assert kept.last.message.startswith(f"10.0.0.1:{5600 + rank} is {message}")
        assert peer.shaken == []
    else:
        assert kept.last.state is LinkState.ESTABLISHED
        assert peer.shaken == [(f"{FIRST}{runs}", "10.0.0.1", 5600 + rank)]


def test_a_keeper_that_ended_meanwhile_may_be_answered(tell: Tell) -> None:
    """The peer book does not know that nobody waits any more."""
    peer = Peer()
    peer.shakes_after = 5.0
    tell(peer, for_seconds(1.0))
    (answer,) = peer.answers
    answer(REFUSED)
