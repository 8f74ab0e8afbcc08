"""A peer that is silent may live; one that refuses connections is gone. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
from loopback_engines import DECODE, PREFILL, SHAPE, shards_of
from own_loop import Here, now

import virtual_time
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol import messages as m
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.sidechannel import handshake, peers
from pdcluster_connector.sidechannel.handshake import SILENT_SECONDS, TryAgain
from pdcluster_connector.sidechannel.peers import ANSWER_SECONDS, PeerBook

ADDRESS = ("10.0.0.1", 5600)
METADATA = m.EngineMetadata(3, PREFILL, SHAPE, shards_of(PREFILL))
REFUSED = TryAgain("10.0.0.1:5600: connection refused", refused=True)
Told = tuple[float, m.EngineMetadata | Failure]


class Network:
    """A book and its peer, which answers, drops packets or refuses connections."""

    def __init__(self, book: PeerBook) -> None:
        self.book = book
        self.refuses = False
        self.asked = self.refusals = 0
        self.answers = asyncio.Event()
        self.silences: list[tuple[float, str, Failure]] = []
        self.gone: list[tuple[float, str, Failure]] = []
        book.listen(self._listen(self.silences), silence=True)
        book.on_gone = self._listen(self.gone)

    @staticmethod
    def _listen(
        kept: list[tuple[float, str, Failure]],
    ) -> Callable[[str, Failure], None]:
        return lambda engine_id, failure: kept.append((now(), engine_id, failure))

    async def _answer(self, seconds: float, answer: object) -> object:
        if self.refuses:
            self.refusals += 1
            return REFUSED
        try:
            await asyncio.wait_for(self.answers.wait(), seconds)
        except TimeoutError:
            return TryAgain("10.0.0.1:5600: no answer in time", silent=True)
        return answer

    async def shake_hands(self, *_: object) -> object:
        return await self._answer(15.0, METADATA)

    async def ask_health(self, *question: object) -> object:
        self.asked += 1
        return await self._answer(float(str(question[-2])), m.HealthReply(PREFILL, "prefill", 1))

    def connect(self, seconds: float = 60.0, since: float | None = None) -> list[Told]:
        """Ask for the peer; a lease of so many seconds is the deadline."""
        told: list[Told] = []
        ends = now() + seconds
        self.book.connect(
            PREFILL,
            *ADDRESS,
            lambda: ends,
            lambda outcome: told.append((now(), outcome)),
            since,
        )
        return told

    async def met_and_silent(self, met: float, silent: float) -> None:
        """Meet the peer, which answers for so many seconds, and then nothing for so many."""
        self.answers.set()
        self.connect()
        await asyncio.sleep(met)
        self.answers.clear()
        await asyncio.sleep(silent)


Play = Callable[[Callable[[Network], Awaitable[None]]], None]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    def played(story: Callable[[Network], Awaitable[None]]) -> None:
        book = PeerBook(DECODE, SHAPE, (0, 0))
        book.close()
        book._closed = False

        async def run() -> None:
            network = Network(book)
            for module in (peers, handshake):
                monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=now, time=now))
            monkeypatch.setattr(peers.handshake, "shake_hands", network.shake_hands)
            monkeypatch.setattr(peers.handshake, "ask_health", network.ask_health)
            monkeypatch.setattr(book, "_thread", Here())
            monkeypatch.setattr(book, "_session", object())
            await story(network)
            for peer in book._peers.values():
                if peer.task is not None:
                    peer.task.cancel()

        virtual_time.run(run())

    return played


async def answers(outcome: object) -> object:
    return outcome


def failed_within_two_seconds(told: list[Told], since: float) -> str:
    ((at, failure),) = told
    assert isinstance(failure, Failure)
    assert failure.reason is Reason.SIDE_CHANNEL_UNREACHABLE
    assert at - since <= 2.0
    return failure.message


def test_who_comes_after_five_seconds_of_silence_waits_no_more_than_two(play: Play) -> None:
    async def story(network: Network) -> None:
        await network.met_and_silent(10.0, 4.0)
        assert network.connect() == [(14.0, METADATA)], "a short silence is nothing"
        await asyncio.sleep(6.0)
        late = network.connect()
        await asyncio.sleep(2.0)
        assert "no answer for 1" in failed_within_two_seconds(late, 20.0)
        await asyncio.sleep(3600.0)
        hours = network.connect()
        await asyncio.sleep(2.0)
        assert "no answer for 36" in failed_within_two_seconds(hours, 3622.0)
        ((at, engine_id, failure),) = network.gone
        assert 300.0 < at < 330.0, "silent is not gone; but no lease stands so long"
        assert (engine_id, failure.reason) == (PREFILL, Reason.SIDE_CHANNEL_UNREACHABLE)
        assert network.book._peers == {}
        at, engine_id, failure = network.silences[0]
        assert (engine_id, failure.reason) == (PREFILL, Reason.SIDE_CHANNEL_UNREACHABLE)
        assert at <= 15.0, "the link says so within five seconds"
        assert len(network.silences) == 2, "when it became silent, and when it is gone"

    play(story)


def test_a_peer_that_answers_again_is_used_again_at_once(play: Play) -> None:
    async def story(network: Network) -> None:
        await network.met_and_silent(1.5, 20.0)
        waits = network.connect()
        await asyncio.sleep(1.0)
        assert waits == []
        network.answers.set()
        await asyncio.sleep(ANSWER_SECONDS)
        assert [outcome for _, outcome in waits] == [METADATA]
        assert network.connect() == [(now(), METADATA)]
        assert network.book.silence.seconds(ADDRESS) == 0.0
        network.answers.clear()
        await asyncio.sleep(20.0)
        assert len(network.silences) == 2, "each silence is said"

    play(story)


def test_who_waited_before_the_silence_goes_on_while_its_lease_stands(play: Play) -> None:
    """The first contact with an engine that has just stopped, for twenty seconds."""

    async def story(network: Network) -> None:
        first = network.connect()
        await asyncio.sleep(SILENT_SECONDS + 1.0)
        second = network.connect()
        await asyncio.sleep(2.0)
        failed_within_two_seconds(second, SILENT_SECONDS + 1.0)
        await asyncio.sleep(12.0)
        assert first == []
        network.answers.set()
        await asyncio.sleep(2.0)
        assert [outcome for _, outcome in first] == [METADATA]

    play(story)


def test_what_is_asked_beside_the_book_counts_too(play: Play) -> None:
    """A link that was never established is asked for by its keeper alone."""

    async def story(network: Network) -> None:
        await network.book.silence.asking(
            ADDRESS, answers(TryAgain("no answer in time", silent=True))
        )
        await asyncio.sleep(30.0)
        late = network.connect()
        await asyncio.sleep(2.0)
        failed_within_two_seconds(late, 30.0)
        waits = network.connect()
        await asyncio.sleep(1.0)
        await network.book.silence.asking(ADDRESS, answers(m.HealthReply(PREFILL, "prefill", 1)))
        await asyncio.sleep(4.0)
        assert waits == [], "the handshake may take its time with a peer that answers"

    play(story)


def test_what_began_before_the_silence_is_not_new(play: Play) -> None:
    """Its reads begin again, because the agent was rebuilt for another's fault."""

    async def story(network: Network) -> None:
        await network.met_and_silent(9.0, 11.0)
        waits, new = network.connect(since=8.0), network.connect()
        await asyncio.sleep(9.0)
        assert waits == []
        failed_within_two_seconds(new, 20.0)
        network.answers.set()
        await asyncio.sleep(2.0)
        assert [outcome for _, outcome in waits] == [METADATA]

    play(story)


@pytest.mark.parametrize("rank", [0, 1])
def test_many_that_come_in_a_silence_ask_once_and_go_on_with_the_answer(
    play: Play, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Other ranks than the first ask rarely of their own accord."""

    async def story(network: Network) -> None:
        network.book._asks_often = rank == 0
        network.answers.set()
        network.connect()
        await asyncio.sleep(0.1)
        await network.book.silence.asking(ADDRESS, answers(TryAgain("", silent=True)))
        network.answers.clear()
        await asyncio.sleep(6.0)
        asked, network.asked = network.asked, 0
        waits = [network.connect() for _ in range(500)]
        await asyncio.sleep(0.5)
        network.answers.set()
        await asyncio.sleep(0.6)
        assert all([outcome for _, outcome in told] == [METADATA] for told in waits)
        assert network.asked <= 2, asked

    play(story)


def test_another_rank_that_hears_of_a_silence_asks_itself_and_ends_nobody(play: Play) -> None:
    """It asks rarely. Until it did, what is new would be posted, and hang until its lease ends."""
    silent = Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "the first rank got no answer")

    async def story(network: Network) -> None:
        network.book._asks_often = False
        await network.met_and_silent(6.0, 4.0)
        network.book.hear("ns.c.prefill.r.1/0", silent)  # a peer that it does not know
        assert (network.book.silence.seconds(ADDRESS), network.asked) == (0.0, 0)
        network.book.hear(PREFILL, silent)
        assert network.connect() == [(10.0, METADATA)], (
            "for three seconds, as far as the first rank knows"
        )
        await asyncio.sleep(SILENT_SECONDS - sum(peers.HEALTH_SECONDS))
        late = network.connect()
        await asyncio.sleep(2.0)
        failed_within_two_seconds(late, 12.0)
        network.answers.set()
        await asyncio.sleep(ANSWER_SECONDS)
        assert network.connect() == [(now(), METADATA)]
        assert network.gone == []

    play(story)


def test_a_peer_that_answers_another_rank_is_not_silent_there(play: Play) -> None:
    async def story(network: Network) -> None:
        network.book._asks_often = False
        await network.met_and_silent(10.0, 0.0)
        network.answers.set()
        network.book.hear(PREFILL, Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "no answer"))
        await asyncio.sleep(0.1)
        assert (network.asked, network.book.silence.seconds(ADDRESS)) == (1, 0.0)
        assert (network.silences, network.gone) == ([], [])

    play(story)


def test_a_question_that_is_given_up_is_no_silence(play: Play) -> None:
    async def story(network: Network) -> None:
        never: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(network.book.silence.asking(ADDRESS, never), 1.0)
        await asyncio.sleep(10.0)
        assert network.book.silence.seconds(ADDRESS) == 0.0

    play(story)


def test_a_refused_connection_is_the_end_at_once(play: Play) -> None:
    async def story(network: Network) -> None:
        network.refuses = True
        told = network.connect()
        await asyncio.sleep(2.0)
        assert "connection refused" in failed_within_two_seconds(told, 0.0)
        network.refuses = False
        network.answers.set()
        again = network.connect()
        await asyncio.sleep(0.1)
        assert [outcome for _, outcome in again] == [METADATA], "a refusal is not remembered"
        network.refuses = True
        await asyncio.sleep(2.0)
        gone = [(engine_id, failure.dead) for _, engine_id, failure in network.gone]
        assert gone == [(PREFILL, True)]

    play(story)


def test_refusals_with_silence_between_them_are_not_one(play: Play) -> None:
    """A process that starts refuses for a moment, and so may another one in its place later."""

    async def story(network: Network) -> None:
        network.refuses = True
        told = network.connect()
        await asyncio.sleep(0.5)
        network.refuses = False
        await asyncio.sleep(14.0)  # a question is under way that is not answered
        network.refuses, before = True, network.refusals
        while network.refusals == before:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.01)
        network.refuses = False
        network.answers.set()
        await asyncio.sleep(2.0)
        assert [outcome for _, outcome in told] == [METADATA]

    play(story)


def test_a_peer_for_which_somebody_waits_is_not_forgotten(play: Play) -> None:
    """However long its silence: the lease of who waits stands."""

    async def story(network: Network) -> None:
        await network.met_and_silent(1.5, 20.0)
        waits = network.connect(peers.FORGET_SECONDS * 2, since=0.0)
        await asyncio.sleep(peers.FORGET_SECONDS + 30.0)
        assert (waits, network.gone) == ([], [])
        network.answers.set()
        await asyncio.sleep(5.0)
        assert [outcome for _, outcome in waits] == [METADATA]

    play(story)


def test_a_silent_peer_that_is_gone_after_all_ends_what_waits(play: Play) -> None:
    async def story(network: Network) -> None:
        await network.met_and_silent(1.5, 20.0)
        waits = network.connect()
        network.refuses = True
        await asyncio.sleep(6.0)
        assert [engine_id for _, engine_id, _ in network.gone] == [PREFILL]
        assert [outcome.reason for _, outcome in waits if isinstance(outcome, Failure)] == [
            Reason.SIDE_CHANNEL_UNREACHABLE
        ]

    play(story)


def test_questions_of_engines_that_are_long_gone_are_forgotten(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "MOST_ADDRESSES", 10)

    async def story(network: Network) -> None:
        for number in range(1000):
            await network.book.silence.asking(
                ("10.0.1.1", number), answers(TryAgain("", silent=True))
            )
        assert len(network.book.silence._asked_at) <= 10

    play(story)


def test_what_another_rank_says_of_a_silence_does_not_shorten_it(play: Play) -> None:
    """The first rank reports a silence when it is three seconds old, whatever this one has seen."""

    async def story(network: Network) -> None:
        silence = network.book.silence
        await silence.asking(ADDRESS, answers(TryAgain("", silent=True)))
        await asyncio.sleep(4.0)
        silence.hear(ADDRESS, 3.0)
        assert silence.seconds(ADDRESS) == pytest.approx(4.0)
        await asyncio.sleep(1.0)
        assert silence.is_long(ADDRESS)
        silence.hear(("10.0.0.2", 5600), 3.0)
        assert silence.seconds(("10.0.0.2", 5600)) == pytest.approx(3.0)

    play(story)
