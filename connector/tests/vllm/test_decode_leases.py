"""Tickets in use: renewed in time, released once, never used again."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.messages import Standing
from pdcluster_connector.protocol.receive_order import IDLE_SECONDS
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.sidechannel.lease_client import LeaseAnswer
from pdcluster_connector.vllm.scheduler_side import decode_leases
from pdcluster_connector.vllm.scheduler_side.decode_leases import CLAIM_SECONDS, DecodeLeases


class Sender:
    def __init__(self) -> None:
        self.sent: list[tuple[str, str, float]] = []
        self.said: list[LeaseAnswer] = []
        self.unanswered: set[str] = set()
        self.waits: list[float] = []

    def send(self, *, releases: bool = False) -> None:
        self.sent.append(("send all" if releases else "send", "", 0.0))

    def wait(self, seconds: float) -> None:
        assert self.sent[-1][0] == "send", "the claims that it waits for"
        self.waits.append(seconds)

    def answers(self) -> list[LeaseAnswer]:
        said, self.said = self.said, []
        return said

    def say(self, standing: Standing, until: float = 0.0, token: int = 7) -> None:
        self.said.append(LeaseAnswer("e/1", "r", token, standing, until))

    def release(self, of: Ticket, by: float) -> None:
        self.sent.append(
            ("release", f"{of.engine_id}@{of.host}:{of.port}/{of.request_id}#{of.token}", by)
        )

    def renew(self, of: Ticket, by: float) -> None:
        self.sent.append(
            ("renew", f"{of.engine_id}@{of.host}:{of.port}/{of.request_id}#{of.token}", by)
        )


def named(of: Ticket) -> str:
    return f"{of.engine_id}@{of.host}:{of.port}/{of.request_id}#{of.token}"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ticket(request: str = "r", token: int = 7, lease_seconds: float = 60.0) -> Ticket:
    return Ticket(
        "e/1", "h", 5, request, token, ((1,),), 16, 10, b"d" * 16, 0.0, lease_seconds=lease_seconds
    )


PREFILLS_CLOCK = 1.8e9  # when ours shows 0


def made(at: float, request: str, engine: str = "e/1") -> Ticket:
    """A ticket of a prefill engine that was made when our clock showed ``at``."""
    whole = msgspec.structs.replace(ticket(request), engine_id=engine)
    return msgspec.structs.replace(whole, expires_at=PREFILLS_CLOCK + at + 60.0)


def test_only_a_ticket_that_was_held_back_waits_for_the_claim() -> None:
    """Prefill's clock is compared with prefill's clock alone, as its tickets show it."""
    sender, clock = Sender(), Clock()
    book = DecodeLeases(sender, 60.0, clock)

    def waits(one: Ticket, *, shared: bool = False) -> bool:
        book.use(one, "d")
        return book.waits_for_claim(one, shared=shared)

    assert not waits(made(30.0, "first")), "nothing shows what that clock is"
    assert not waits(made(99.9, "fresh"))
    assert waits(made(99.9, "shared"), shared=True)
    clock.now = 150.0
    assert not waits(made(91.0, "slow"))
    assert waits(made(89.0, "late"))
    assert not waits(made(89.0, "late", engine="e/2")), "another engine has another clock"
    assert not waits(made(150.0, "fresh again"))
    sender.said.append(LeaseAnswer("e/1", "late", 7, Standing.HELD, 200.0))
    assert book.objection(made(89.0, "late")) is None
    assert not book.waits_for_claim(made(89.0, "late"), shared=True), "prefill decides"
    # Prefill's clock was set back by an hour. Prefill holds what seems over.
    clock.now = 160.0
    assert not waits(made(160.0, "before"))
    back = made(160.0 - 3600.0, "after")
    assert waits(back)
    sender.said.append(LeaseAnswer("e/1", "after", 7, Standing.HELD, 220.0))
    assert book.objection(back) is None
    assert not waits(made(160.0 - 3600.0, "next")), "one such ticket waits, and not all"


def test_nothing_waits_for_the_claim_of_an_engine_that_does_not_answer() -> None:
    """It may have been silent before: its answer to this claim may take a moment."""
    sender, clock = Sender(), Clock()
    book = DecodeLeases(sender, 60.0, clock)
    book.use(ticket(), "d")
    sender.unanswered.add("e/1")
    clock.now += CLAIM_SECONDS - 0.1
    assert book.waits_for_claim(ticket(), shared=True)
    clock.now += 0.2
    assert not book.waits_for_claim(ticket(), shared=True)
    sender.unanswered = {"e/2"}
    assert book.waits_for_claim(ticket(), shared=True), "it answers again"


def test_the_clocks_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_leases, "MAX_SPENT", 3)
    book = DecodeLeases(Sender(), 60.0, Clock())
    for number in range(20):
        book.use(made(99.0, "r", engine=f"e/{number}"), "d")
        assert len(book._ahead) <= 3


def test_the_last_user_releases_once() -> None:
    sender, clock = Sender(), Clock()
    book = DecodeLeases(sender, 60.0, clock)
    book.use(ticket(), "a")
    book.use(ticket(), "b")
    assert len(book.held) == 1
    book.done(ticket(), "a")
    assert [kind for kind, _, _ in sender.sent] == ["renew", "renew"]
    assert not book.is_spent(ticket())
    book.done(ticket(), "b")
    assert sender.sent[-1] == ("release", "e/1@h:5/r#7", 160.0)
    assert len(book.held) == 0
    assert book.is_spent(ticket())
    book.use(ticket(), "c")
    book.done(ticket(), "c")
    assert [kind for kind, _, _ in sender.sent].count("release") == 1
    assert not book.is_spent(ticket(token=8)), "the token is part of a ticket's identity"


@pytest.mark.parametrize(("said", "every"), [(60, 15.0), (8, 2.0), (600, 15.0), (1, 0.25)])
def test_renewals_keep_up_with_the_shorter_lease(said: float, every: float) -> None:
    """Each lease at its own pace: one short lease causes no more messages about the others."""
    sender, clock = Sender(), Clock()
    book = DecodeLeases(sender, 60.0, clock)
    book.use(ticket(lease_seconds=said), "a")
    book.use(ticket("other"), "b")
    sender.sent.clear()
    times: dict[str, list[float]] = {"r": [100.0], "other": [100.0]}
    for tenth in range(1, 1200):
        clock.now = 100 + tenth / 20
        book.renew_all()
        for _, what, _ in sender.sent:
            times[what.partition("/")[2].partition("/")[2].partition("#")[0]].append(clock.now)
        sender.sent.clear()
    for name, interval in (("r", every), ("other", 15.0)):
        steps = [b - a for a, b in itertools.pairwise(times[name])]
        assert max(steps) <= interval + 0.1
        assert min(steps) >= interval - 0.1


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_leases, "MAX_SPENT", 3)
    book = DecodeLeases(Sender(), 60.0, Clock())
    for i in range(5):
        book.use(ticket(f"r{i}"), "d")
        book.done(ticket(f"r{i}"), "d")
    assert [book.is_spent(ticket(f"r{i}")) for i in range(5)] == [False, False, True, True, True]


def test_a_ticket_is_good_only_while_its_last_answer_stands() -> None:
    sender, clock = Sender(), Clock()
    book = DecodeLeases(sender, 60.0, clock)
    book.use(ticket(), "d")
    assert book.objection(ticket()) is None, "the claim is under way, and the data need not wait"
    sender.say(Standing.HELD, until=150.0)
    clock.now = 149.0
    assert book.objection(ticket()) is None
    assert book.park(ticket(), "d") == (1.0, True)
    clock.now = 150.0
    objection = book.objection(ticket())
    assert objection is not None
    assert objection.reason is Reason.LEASE_EXPIRED
    sender.say(Standing.HELD, until=190.0)
    assert book.objection(ticket()) is None
    assert book.take_news() == ({"d": 40.0}, {})
    assert book.take_news() == ({}, {})


def test_without_any_answer_a_ticket_is_good_for_one_lease() -> None:
    clock = Clock()
    book = DecodeLeases(Sender(), 60.0, clock)
    book.use(ticket(), "d")
    clock.now = 159.0
    assert book.park(ticket(), "d") == (1.0, False)
    clock.now = 160.0
    objection = book.objection(ticket())
    assert objection is not None
    assert objection.reason is Reason.LEASE_EXPIRED


@pytest.mark.parametrize(
    ("standing", "reason"),
    [
        (Standing.GONE, Reason.LEASE_LOST),
        (Standing.EXPIRED, Reason.LEASE_EXPIRED),
        (Standing.CLAIMED, Reason.LEASE_CLAIMED),
    ],
)
def test_a_lost_lease_is_told_to_those_that_wait(standing: Standing, reason: Reason) -> None:
    sender, clock = Sender(), Clock()
    book = DecodeLeases(sender, 60.0, clock)
    book.use(ticket(), "d1")
    book.use(ticket(), "d2")
    book.park(ticket(), "d1")
    sender.say(standing)
    sender.say(standing, token=8)  # somebody else's
    renewed, lost = book.take_news()
    assert renewed == {}
    assert {request_id: failure.reason for request_id, failure in lost.items()} == {"d1": reason}
    objection = book.objection(ticket())
    assert objection is not None
    assert objection.reason is reason, "for the second request, too"
    sender.say(Standing.HELD, until=500.0)
    assert book.take_news() == ({}, {}), "what was lost stays lost"
    sent = len(sender.sent)
    clock.now = 115.0
    book.renew_all()
    assert len(sender.sent) == sent, "it is not renewed any more"


@pytest.mark.parametrize("done", [False, True])
def test_a_release_that_failed_is_made_good(done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next call for the request, or with the renewals: no lease is renewed for ever."""
    sender, clock = Sender(), Clock()
    book = DecodeLeases(sender, 60.0, clock)
    book.use(ticket(), "a")
    with monkeypatch.context() as broken:
        broken.setattr(sender, "release", None)
        with pytest.raises(TypeError):
            book.done(ticket(), "a")
    clock.now += 15.0
    if done:
        book.done(ticket(), "a")
    book.renew_all()
    assert [kind for kind, _, _ in sender.sent] == ["renew", "release"]
    assert not book.held
    book.done(ticket(), "a")
    clock.now += 60.0
    book.renew_all()
    assert len(sender.sent) == 2


def test_a_claim_that_failed_is_sent_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, clock = Sender(), Clock()
    book = DecodeLeases(sender, 60.0, clock)
    with monkeypatch.context() as broken:
        broken.setattr(book, "_renew", None)
        with pytest.raises(TypeError):
            book.use(ticket(), "a")
    book.renew_all()
    assert [kind for kind, _, _ in sender.sent] == ["renew"]


def test_a_step_waits_only_for_an_answer_that_a_receive_needs() -> None:
    sender, clock = Sender(), Clock()
    tickets = DecodeLeases(sender, 60.0, clock)  # type: ignore[arg-type]
    tickets.take_news(wait=True)
    tickets.use(ticket(), "d")
    tickets.take_news(wait=True)
    assert sender.waits == [], "nobody waits for KV yet"
    tickets.park(ticket(), "d")
    sender.unanswered = {"e/1"}
    tickets.take_news(wait=True)
    assert sender.waits == [], "prefill did not answer before"
    sender.unanswered = set()
    tickets.take_news()
    assert sender.waits == []
    tickets.take_news(wait=True)
    assert sender.waits == [IDLE_SECONDS]
    sender.say(Standing.HELD, 160.0)
    tickets.take_news()
    tickets.take_news(wait=True)
    assert sender.waits == [IDLE_SECONDS], "it is claimed"
    tickets.use(ticket(token=8), "e")
    tickets.park(ticket(token=8), "e")
    sender.say(Standing.CLAIMED, token=8)
    tickets.take_news()
    tickets.take_news(wait=True)
    assert sender.waits == [IDLE_SECONDS], "another engine has it"


def test_releases_go_at_once_when_no_receive_is_under_way() -> None:
    sender = Sender()
    book = DecodeLeases(sender, 60.0, Clock())
    first, second = ticket("a"), ticket("b")
    for one in (first, second):
        book.use(one, one.request_id)
        book.park(one, one.request_id)
    book.done(first, "a")
    book.end_receives()
    assert ("send all", "", 0.0) not in sender.sent, "the other one's release comes soon"
    book.done(second, "b")
    book.use(ticket("c"), "waits for its turn")
    book.end_receives()
    assert sender.sent[-1] == ("send all", "", 0.0)
