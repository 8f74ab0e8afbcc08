"""How often a peer is asked, by the peer book and once it is connected: in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from loopback_engines import DECODE, PREFILL, SHAPE, shards_of
from own_loop import Here, now

import virtual_time
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol import messages as m
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.sidechannel import peers
from pdcluster_connector.sidechannel.handshake import TryAgain
from pdcluster_connector.sidechannel.peers import KnownPeer, PeerBook

WHERE = "10.0.0.1:5600"
TOLD = m.EngineMetadata(3, PREFILL, SHAPE, shards_of(PREFILL))
REFUSED = Failure(Reason.MODEL_MISMATCH, "another model")
SILENT = TryAgain(f"{WHERE}: no answer in time", silent=True)
Outcome = m.EngineMetadata | Failure | TryAgain


def pauses(moments: list[float]) -> list[float]:
    return [later - sooner for sooner, later in pairwise(moments)]


class Asked:
    """A book, when it has shaken hands, and what the peer answers."""

    def __init__(self, book: PeerBook) -> None:
        self.book = book
        self.outcome: Outcome = SILENT
        self.takes = 0.0
        self.times: list[float] = []
        self.introduced: list[object] = []

    async def shake_hands(self, _session: object, me: object, *peer: object) -> Outcome:
        self.times.append(now())
        self.introduced.append((me, *peer))
        await asyncio.sleep(self.takes)
        return self.outcome

    def connect(self, ends: float, engine_id: str = PREFILL) -> list[m.EngineMetadata | Failure]:
        told: list[m.EngineMetadata | Failure] = []
        self.book.connect(engine_id, "10.0.0.1", 5600, lambda: ends, told.append)
        return told


Story = Callable[[Asked], Awaitable[None]]
Play = Callable[[Story], Asked]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Run a story with a peer book whose handshakes the test answers."""

    def played(story: Story) -> Asked:
        book = PeerBook(DECODE, SHAPE, (0, 1))
        book.close()
        book._closed = False
        asked = Asked(book)

        async def run() -> None:
            monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=now))
            monkeypatch.setattr(peers.handshake, "shake_hands", asked.shake_hands)
            monkeypatch.setattr(book, "_thread", Here())
            monkeypatch.setattr(book, "_session", object())
            await story(asked)

        virtual_time.run(run())
        return asked

    return played


def test_a_silent_peer_is_tried_ever_more_rarely_at_least_once_a_second(play: Play) -> None:
    async def story(asked: Asked) -> None:
        told = asked.connect(60.0)
        await asyncio.sleep(59.9)
        assert told == []
        await asyncio.sleep(0.2)
        assert told == [
            Failure(
                Reason.SIDE_CHANNEL_UNREACHABLE,
                f"no handshake before the deadline; last: {SILENT.message}",
            )
        ]
        tried = len(asked.times)
        await asyncio.sleep(60.0)
        assert len(asked.times) == tried, "nobody waits for it any more"
        assert asked.book._peers == {}

    asked = play(story)
    found = pauses(asked.times)
    for number, pause in enumerate(found[:4]):  # each is cut by up to a half, by chance
        most = 0.05 * 2**number
        assert most / 2 - 1e-9 <= pause <= most + 1e-9
    assert all(0.4 - 1e-9 <= pause <= 1.0 + 1e-9 for pause in found[4:])
    assert max(found) > 0.8
    assert {one[1:] for one in asked.introduced} == {(PREFILL, "10.0.0.1", 5600, None)}


def test_a_deadline_is_told_with_the_reason_of_the_last_attempt(play: Play) -> None:
    async def story(asked: Asked) -> None:
        asked.outcome = TryAgain("it ended the connection", Reason.AUTHENTICATION_FAILED)
        told = asked.connect(5.0)
        await asyncio.sleep(5.1)
        assert [one.reason for one in told if isinstance(one, Failure)] == [
            Reason.AUTHENTICATION_FAILED
        ]

    play(story)


def test_a_refusal_is_not_kept_and_metadata_is(play: Play) -> None:
    async def story(asked: Asked) -> None:
        asked.outcome = REFUSED
        refused = asked.connect(60.0), asked.connect(60.0)
        await asyncio.sleep(0.1)
        assert refused == ([REFUSED], [REFUSED]), "both by one handshake"
        assert len(asked.times) == 1
        assert asked.book._peers == {}
        asked.outcome = TOLD
        told = asked.connect(600.0)
        await asyncio.sleep(0.1)
        assert told == [TOLD]
        assert len(asked.times) == 2
        await asyncio.sleep(10.0)
        assert asked.connect(600.0) == [TOLD], "metadata is kept"
        asked.book.forget(PREFILL, REFUSED)

    play(story)


def test_who_comes_while_a_handshake_is_under_way_waits_for_it(play: Play) -> None:
    async def story(asked: Asked) -> None:
        asked.outcome, asked.takes = TOLD, 3.0
        first = asked.connect(10.0)
        await asyncio.sleep(1.0)
        hurried, second = asked.connect(2.0), asked.connect(10.0)
        await asyncio.sleep(1.5)
        [late] = hurried
        assert isinstance(late, Failure)
        assert late.message.endswith(f"{WHERE} has not answered yet")
        await asyncio.sleep(1.0)
        assert first == second == [TOLD]
        assert len(asked.times) == 1
        asked.book.forget(PREFILL, REFUSED)

    play(story)


def test_to_forget_a_peer_ends_its_attempts_and_tells_who_waits(play: Play) -> None:
    async def story(asked: Asked) -> None:
        heard: list[object] = []
        asked.book.listen(lambda *news: heard.append(news))
        told = asked.connect(60.0)
        await asyncio.sleep(1.0)
        asked.book.forget(PREFILL, REFUSED)
        assert told == [REFUSED]
        tried = len(asked.times)
        await asyncio.sleep(10.0)
        assert len(asked.times) == tried
        assert heard == [], "it was never connected"
        asked.outcome = TOLD
        asked.connect(60.0)
        await asyncio.sleep(0.1)
        asked.book.forget(PREFILL, REFUSED)
        assert heard == [(PREFILL, REFUSED)]
        asked.book.forget(PREFILL, REFUSED)
        assert len(heard) == 1

    play(story)


def test_a_peer_that_says_nothing_is_left_when_nobody_waits_for_it(play: Play) -> None:
    """Its connection would otherwise stay open for a minute."""

    async def story(asked: Asked) -> None:
        asked.takes = 100.0
        told = asked.connect(5.0)
        await asyncio.sleep(4.9)
        assert len(attending()) == 1
        await asyncio.sleep(0.2)
        assert len(told) == 1
        assert attending() == []

    def attending() -> list[object]:
        return [one for one in asyncio.all_tasks() if "_attend" in str(one.get_coro())]

    play(story)


def test_who_waits_when_the_engine_shuts_down_is_told_so(play: Play) -> None:
    async def story(asked: Asked) -> None:
        told = asked.connect(60.0)
        await asyncio.sleep(1.0)
        asked.book._session = None
        await asked.book._close()
        closing = Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "this engine is shutting down")
        assert told == [closing]
        asked.book.close()
        assert asked.connect(60.0) == [closing]

    play(story)


# A peer that is connected.


class Health:
    """What a peer says when it is asked whether it lives, in order; then it lives."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.asked: list[tuple[float, float]] = []

    async def __call__(self, seconds: float) -> Any:
        self.asked.append((now(), seconds))
        return self.replies.pop(0) if self.replies else m.HealthReply(PREFILL, "prefill", 1)


def watched(health: Health, *, often: bool = True, seconds: float = 100.0) -> Failure | None:
    async def watch() -> Failure | None:
        try:
            book = PeerBook(DECODE, SHAPE, (0, 0) if often else (0, 1))
            host, port = WHERE.split(":")
            peer = KnownPeer(PREFILL, (host, int(port)))
            monkeypatch = pytest.MonkeyPatch()
            monkeypatch.setattr(book, "_health", lambda _, seconds: health(seconds))
            return await asyncio.wait_for(book._why_gone(peer), timeout=seconds)
        except TimeoutError:
            return None

    return virtual_time.run(watch())


def test_the_first_rank_asks_every_second() -> None:
    health = Health()
    assert watched(health) is None
    assert {round(pause, 6) for pause in pauses([0.0, *(at for at, _ in health.asked)])} == {1.0}
    assert {seconds for _, seconds in health.asked} == {2.0}


def test_the_other_ranks_ask_every_twenty_seconds_and_not_all_at_once() -> None:
    health = Health()
    assert watched(health, often=False, seconds=4000.0) is None
    found = pauses([0.0, *(at for at, _ in health.asked)])
    assert 16.0 <= min(found) < 18.0
    assert 22.0 < max(found) <= 24.0


def test_a_peer_that_answers_the_second_question_lives() -> None:
    health = Health(SILENT, m.HealthReply(PREFILL, "prefill", 1), SILENT)
    assert watched(health, seconds=4.5) is None
    assert [seconds for _, seconds in health.asked] == [2.0, 1.0, 2.0, 1.0, 2.0, 2.0]


def test_a_peer_that_answers_neither_question_is_gone_and_it_is_said_how_to_find_out_why() -> None:
    health = Health(TryAgain("h: the first"), TryAgain("h: the second"))
    failure = watched(health)
    assert failure is not None
    assert failure.reason is Reason.SIDE_CHANNEL_UNREACHABLE
    assert failure.message.startswith("the side channel at h: the second. Check that")


@pytest.mark.parametrize("replies", [(REFUSED,), (SILENT, REFUSED)])
def test_a_peer_that_this_engine_must_not_speak_to_is_gone(replies: tuple[object, ...]) -> None:
    health = Health(*replies)
    assert watched(health) is REFUSED
    assert len(health.asked) == len(replies)


@pytest.mark.parametrize("before", [(), (SILENT,)])
def test_another_incarnation_in_its_place_is_told_with_both_names(
    before: tuple[object, ...],
) -> None:
    other = "ns.c.prefill.r.0/00000000000000bb"
    health = Health(*before, m.HealthReply(other, "prefill", 1))
    assert watched(health) == Failure(
        Reason.PEER_RESTARTED, f"{PREFILL} is gone; {other} listens on {WHERE} now"
    )


class Clocks:
    """What a peer's clock shows: ``ahead`` of ours by so many seconds; None says nothing."""

    def __init__(self, *ahead: float | None) -> None:
        self.ahead = list(ahead)

    async def ask_health(self, *_: object) -> m.HealthReply:
        await asyncio.sleep(0.5)
        if (ahead := self.ahead.pop(0)) is None:
            return m.HealthReply(PREFILL, "prefill", 1)
        answered = 1.8e9 + now() + ahead
        await asyncio.sleep(0.5)
        return m.HealthReply(PREFILL, "prefill", 1, answered)


def skews(
    monkeypatch: pytest.MonkeyPatch, *ahead: float | None, rank: tuple[int, int] = (0, 0)
) -> list[float | None]:
    """What the book says of a peer's clock after each question."""

    async def ask() -> list[float | None]:
        ours = SimpleNamespace(time=lambda: 1.8e9 + now(), monotonic=now)
        monkeypatch.setattr(peers, "time", ours)
        monkeypatch.setattr(peers.handshake, "ask_health", Clocks(*ahead).ask_health)
        book = PeerBook(DECODE, SHAPE, rank)
        book._session = object()
        peer = book._peers[PREFILL] = KnownPeer(PREFILL, ("10.0.0.1", 5600))
        found = []
        for _ in ahead:
            await book._health(peer, 2.0)
            found.append(book.skew(PREFILL))
        assert book.skew("another") is None
        return found

    return virtual_time.run(ask())


@pytest.mark.parametrize("ahead", [61.0, -61.0, 3600.0, -3600.0, 5.0])
def test_a_clock_that_differs_is_warned_about_once_a_peer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ahead: float
) -> None:
    """Half of the time that the answer took is left out."""
    assert skews(monkeypatch, None, ahead, ahead, ahead + 2.0) == [None, ahead, ahead, ahead + 2.0]
    [record] = caplog.records
    assert f"the clock of {PREFILL} differs from ours by {ahead:+.0f} s" in record.getMessage()


def test_a_clock_that_is_nearly_right_or_that_another_rank_watches_is_not_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert skews(monkeypatch, 0.0, 0.9, 1.0, 4.9, -4.9) == [0.0, 0.0, 1.0, 4.9, -4.9]
    assert skews(monkeypatch, 3600.0, rank=(0, 1)) == [3600.0]
    assert caplog.records == []


RESET = TryAgain(f"{WHERE}: Connection reset by peer")
REFUSES = TryAgain(f"{WHERE}: Connection refused", refused=True)


@pytest.mark.parametrize(("found", "seconds"), [(REFUSES, 1.0), (RESET, 5.0)], ids=str)
def test_a_crowd_may_be_the_cause_of_a_reset_and_not_of_a_refusal(
    play: Play, found: TryAgain, seconds: float
) -> None:
    """An answer, or a silence, begins the time anew: only what lasts is believed."""

    async def story(asked: Asked) -> None:
        asked.outcome = found
        told = asked.connect(60.0)
        await asyncio.sleep(seconds - 0.1)
        asked.outcome = SILENT
        await asyncio.sleep(2.0)
        asked.outcome = found
        await asyncio.sleep(seconds - 0.1)
        assert told == []
        await asyncio.sleep(2.2)  # an attempt a second, the first up to a second late
        assert told == [peers.handshake.unreachable(found)]
        again = asked.connect(120.0)
        await asyncio.sleep(0.9 * seconds)
        asked.outcome = TOLD
        await asyncio.sleep(1.1)
        assert again == [TOLD], "a good request must not fail because of it"

    play(story)
