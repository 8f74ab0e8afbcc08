"""When leases are renewed and released, in how many messages, and how often again: virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Self

import pytest
from loopback_engines import DECODE, PREFILL
from own_loop import Here, now

import virtual_time
from pdcluster_connector.protocol import messages as m
from pdcluster_connector.protocol.messages import Standing
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.sidechannel import lease_client
from pdcluster_connector.sidechannel.lease_client import (
    GATHER_SECONDS,
    UNSENT_SECONDS,
    LeaseAnswer,
    LeaseClient,
)

OTHER = "ns.c.prefill.r.1/00000000000000ff"


class Prefill:
    """A prefill engine's side channel, as far as aiohttp's session shows it."""

    def __init__(self) -> None:
        self.status = 200
        self.next: list[int] = []  # the statuses of the next messages; the last one stays
        self.body: bytes | None = None
        self.error: Exception | None = None
        self.answers_after = 0.0
        self.claimed: set[str] = set()
        self.gone: set[str] = set()
        self.asked: list[tuple[float, str, m.LeaseRequest]] = []
        self.arguments: list[dict[str, Any]] = []

    def request(self, method: str, url: str, data: bytes, **arguments: Any) -> Prefill:
        assert method == "POST"
        leases = m.decode_lease_request(data)
        assert isinstance(leases, m.LeaseRequest)
        self.asked.append((now(), url, leases))
        if self.next:
            self.status = self.next.pop(0)
        self.arguments.append(arguments)
        self.content = self
        return self

    async def iter_any(self) -> Any:
        *_, (_, _, request) = self.asked
        held = [key for key in request.renewals if key[0] not in self.gone | self.claimed]
        claimed = [key for key in request.renewals if key[0] in self.claimed]
        reply = m.encode(m.LeaseReply(60.0, tuple(held), tuple(claimed)))
        yield reply if self.body is None else self.body

    async def __aenter__(self) -> Self:
        await asyncio.sleep(self.answers_after)
        if self.error is not None:
            raise self.error
        return self

    async def __aexit__(self, *_: object) -> None: ...

    @property
    def times(self) -> list[float]:
        return [moment for moment, _, _ in self.asked]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """How many leases each message renews and releases."""
        return [(len(one.renewals), len(one.releases)) for _, _, one in self.asked]


Story = Callable[[LeaseClient, Prefill], Awaitable[None]]
Play = Callable[[Story], tuple[LeaseClient, Prefill]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Run a story with a client in virtual time; nothing of it is left at its end."""

    def played(story: Story) -> tuple[LeaseClient, Prefill]:
        client, prefill = LeaseClient(DECODE), Prefill()
        client.close()

        async def run() -> None:
            monkeypatch.setattr(lease_client, "time", SimpleNamespace(monotonic=now))
            monkeypatch.setattr(client, "_thread", Here())
            monkeypatch.setattr(client, "_session", prefill)
            await story(client, prefill)
            assert client._outboxes == {}

        virtual_time.run(run())
        return client, prefill

    return played


def _ticket(engine: str, name: str) -> Ticket:
    return Ticket(engine, "10.0.0.1", 5600, name, 7, (), 16, 0, b"d" * 16, 0.0)


def release(client: LeaseClient, name: str, *, ends: float = 1e6, engine: str = PREFILL) -> None:
    client.release(_ticket(engine, name), ends)


def renew(client: LeaseClient, name: str, *, ends: float = 1e6, engine: str = PREFILL) -> None:
    client.renew(_ticket(engine, name), ends)
    client.send()


def test_a_renewal_goes_at_once_and_releases_of_one_moment_go_together(play: Play) -> None:
    """A receive may wait for what prefill says to a renewal."""

    async def story(client: LeaseClient, prefill: Prefill) -> None:
        renew(client, "a")
        await asyncio.sleep(1.0)
        assert prefill.times == [0.0]
        release(client, "b")
        await asyncio.sleep(0.019)
        release(client, "c")
        await asyncio.sleep(1.0)
        assert prefill.times[1:] == [pytest.approx(1.02)]

    client, prefill = play(story)
    assert prefill.sizes == [(1, 0), (0, 2)]
    assert [answer.request_id for answer in client.answers()] == ["a"]
    for _, url, request in prefill.asked:
        assert url == "http://10.0.0.1:5600/v1/leases"
        assert (request.engine_id, request.holder) == (PREFILL, DECODE)
    for arguments in prefill.arguments:
        assert arguments["allow_redirects"] is False, "a redirect could lead to anybody"
        assert arguments["timeout"].total == 10.0


def test_a_renewal_does_not_wait_until_releases_are_gathered(play: Play) -> None:
    """One request ends, and the next one is admitted in the same step: its claim goes now."""

    async def story(client: LeaseClient, prefill: Prefill) -> None:
        release(client, "ended")
        await asyncio.sleep(0.001)
        renew(client, "next")
        await asyncio.sleep(1.0)

    client, prefill = play(story)
    assert prefill.times == [0.001]
    assert prefill.sizes == [(1, 1)]
    assert [answer.request_id for answer in client.answers()] == ["next"]


def test_releases_that_come_while_a_message_is_under_way_are_gathered_again(play: Play) -> None:
    """A crowd's requests end step by step. Each message takes the interpreter from the others."""

    async def story(client: LeaseClient, prefill: Prefill) -> None:
        prefill.answers_after = 0.002
        renew(client, "first")
        for number in range(60):  # one after each step
            await asyncio.sleep(0.001)
            release(client, f"{number}")
            if number == 29:
                renew(client, "next")
        await asyncio.sleep(1.0)

    client, prefill = play(story)
    assert [renewals for renewals, _ in prefill.sizes if renewals] == [1, 1]
    assert sum(releases for _, releases in prefill.sizes) == 60
    assert len(prefill.sizes) == 5, "every 20 ms, and with the renewal"
    assert [answer.request_id for answer in client.answers()] == ["first", "next"]


def test_what_no_step_sends_goes_soon_all_the_same(play: Play) -> None:
    """A paused engine makes no steps. It has taken a request in, and nobody else may use its KV."""

    async def story(client: LeaseClient, prefill: Prefill) -> None:
        client.send()
        for second in range(3):
            release(client, f"released {second}")
            client.renew(_ticket(PREFILL, f"a {second}"), 1e6)
            await asyncio.sleep(0.004)
            client.renew(_ticket(PREFILL, f"b {second}"), 1e6)
            await asyncio.sleep(0.996)
        client.send()
        await asyncio.sleep(1.0)

    _, prefill = play(story)
    assert prefill.times == [pytest.approx(second + 0.005) for second in range(3)]
    assert prefill.sizes == [(2, 1)] * 3


def test_a_release_goes_later_than_the_claim_of_another_rank_that_stands_still(play: Play) -> None:
    """Both claim one ticket when they get it. The lease ends when its last reader releases it."""

    async def story(client: LeaseClient, prefill: Prefill) -> None:
        renew(client, "read at once")
        await asyncio.sleep(0.001)
        release(client, "read at once")
        await asyncio.sleep(1.0)

    _, prefill = play(story)
    assert prefill.times == [0.0, pytest.approx(0.001 + GATHER_SECONDS)]
    assert prefill.times[1] > UNSENT_SECONDS * 2


def test_a_claim_that_went_by_itself_takes_no_release_with_it(play: Play) -> None:
    """Its step sends it in the moment in which it goes all the same."""

    async def story(client: LeaseClient, prefill: Prefill) -> None:
        client.renew(_ticket(PREFILL, "claimed"), 1e6)
        call = client._thread.call
        client._thread.call = lambda *late: asyncio.get_running_loop().call_later(0.001, *late)
        await asyncio.sleep(UNSENT_SECONDS - 0.0005)
        client.send()  # its thread gets to this a millisecond later
        client._thread.call = call
        await asyncio.sleep(0.0007)
        release(client, "later")
        await asyncio.sleep(1.0)

    _, prefill = play(story)
    assert prefill.sizes == [(1, 0), (0, 1)]
    assert prefill.times[1] > UNSENT_SECONDS + GATHER_SECONDS


def test_the_releases_of_the_last_receives_go_at_once(play: Play) -> None:
    """What is released afterwards waits for others again."""

    async def story(client: LeaseClient, prefill: Prefill) -> None:
        release(client, "a")
        release(client, "b")
        client.send()
        await asyncio.sleep(0.001)
        assert prefill.times == [], "no claim is among them"
        client.send(releases=True)
        await asyncio.sleep(0.001)
        assert prefill.times == [0.001]
        release(client, "c")
        await asyncio.sleep(1.0)

    _, prefill = play(story)
    assert prefill.sizes == [(0, 2), (0, 1)]
    assert prefill.times[1] == pytest.approx(GATHER_SECONDS), "one timer is enough"


def test_renewals_go_before_releases_and_256_leases_are_one_message(play: Play) -> None:
    async def story(client: LeaseClient, _prefill: Prefill) -> None:
        for number in range(300):
            release(client, f"done {number}")
        for number in range(300):
            renew(client, f"held {number}")
        await asyncio.sleep(1.0)

    client, prefill = play(story)
    assert prefill.sizes == [(256, 0), (44, 212), (0, 88)]
    assert len(client.answers()) == 300
    assert len({key for _, _, one in prefill.asked for key in one.renewals + one.releases}) == 600


def test_each_engine_has_messages_of_its_own(play: Play) -> None:
    async def story(client: LeaseClient, prefill: Prefill) -> None:
        prefill.answers_after = 5.0
        renew(client, "a")
        renew(client, "a", engine=OTHER)
        await asyncio.sleep(6.0)

    client, prefill = play(story)
    assert [request.engine_id for _, _, request in prefill.asked] == [PREFILL, OTHER]
    assert prefill.times == [0.0, 0.0]
    assert {answer.engine_id for answer in client.answers()} == {PREFILL, OTHER}


def test_what_comes_while_a_message_is_under_way_goes_with_the_next(play: Play) -> None:
    async def story(client: LeaseClient, prefill: Prefill) -> None:
        prefill.answers_after = 2.0
        renew(client, "a")
        await asyncio.sleep(1.0)
        renew(client, "b")
        release(client, "c")
        await asyncio.sleep(9.0)

    _, prefill = play(story)
    assert prefill.times == [0.0, 2.0]
    assert prefill.sizes == [(1, 0), (1, 1)]


def test_an_answer_holds_from_the_moment_of_the_question(play: Play) -> None:
    """Prefill counts from a later one, so decode never believes a lease that has ended."""

    async def story(client: LeaseClient, prefill: Prefill) -> None:
        await asyncio.sleep(100.0)
        prefill.answers_after = 3.0
        prefill.claimed, prefill.gone = {"theirs"}, {"gone"}
        for name in ("mine", "theirs", "gone"):
            renew(client, name)
        await asyncio.sleep(2.9)
        assert client.answers() == []
        await asyncio.sleep(0.2)

    client, _ = play(story)
    assert client.answers() == [
        LeaseAnswer(PREFILL, "mine", 7, Standing.HELD, 160.0),
        LeaseAnswer(PREFILL, "theirs", 7, Standing.CLAIMED, 160.0),
        LeaseAnswer(PREFILL, "gone", 7, Standing.GONE, 160.0),
    ]
    assert client.answers() == []


def pauses(moments: list[float]) -> list[float]:
    return [later - sooner for sooner, later in pairwise(moments)]


@pytest.mark.parametrize("fault", [429, 500, 503, ConnectionResetError("reset"), TimeoutError()])
def test_a_message_is_sent_again_ever_more_rarely_until_its_deadline(
    play: Play, fault: int | Exception
) -> None:
    async def story(client: LeaseClient, prefill: Prefill) -> None:
        prefill.status = fault if isinstance(fault, int) else 200
        prefill.error = None if isinstance(fault, int) else fault
        release(client, "a", ends=50.0)
        renew(client, "b", ends=100.0)
        await asyncio.sleep(103.0)

    client, prefill = play(story)
    found = pauses(prefill.times)
    for number, pause in enumerate(found[:5]):  # each is cut by up to a half, by chance
        most = 0.1 * 2**number
        assert most / 2 - 1e-9 <= pause <= most + 1e-9
    assert all(1.0 - 1e-9 <= pause <= 2.0 + 1e-9 for pause in found[5:])
    assert max(found) > 1.5
    assert max(moment for moment, _, one in prefill.asked if one.releases) < 50.0
    assert 97.0 < prefill.times[-1] < 100.0
    assert client.answers() == []


@pytest.mark.parametrize(
    "fault",
    [400, 403, 404, 409, 413, 503, ConnectionRefusedError(), TimeoutError(), b"\xc1"],
    ids=str,
)
def test_it_is_known_which_engine_does_not_answer(
    play: Play, fault: int | Exception | bytes
) -> None:
    """Until it answers a message as it should."""

    async def story(client: LeaseClient, prefill: Prefill) -> None:
        prefill.status = fault if isinstance(fault, int) else 200
        prefill.error = fault if isinstance(fault, Exception) else None
        prefill.body = fault if isinstance(fault, bytes) else None
        renew(client, "a", ends=2.0)
        await asyncio.sleep(3.0)
        assert client.unanswered == {PREFILL}
        prefill.status, prefill.error, prefill.body = 200, None, None
        renew(client, "b", engine=OTHER)
        await asyncio.sleep(1.0)
        assert client.unanswered == {PREFILL}
        release(client, "a")
        await asyncio.sleep(1.0)

    client, _ = play(story)
    assert client.unanswered == set()


def test_the_engines_that_do_not_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a ticket key, anybody may invent their names."""
    monkeypatch.setattr(lease_client, "MAX_PENDING", 3)
    client = LeaseClient(DECODE)
    for number in range(20):
        client.doubt([f"e/{number}"])
        assert f"e/{number}" in client.unanswered
        assert len(client.unanswered) <= 3


def test_after_a_message_that_arrived_the_next_fault_is_tried_again_soon(play: Play) -> None:
    async def story(client: LeaseClient, prefill: Prefill) -> None:
        prefill.status = 503
        for number in range(400):
            renew(client, f"{number}")
        await asyncio.sleep(20.0)
        before, prefill.next = len(prefill.asked), [200, 503]
        await asyncio.sleep(3.0)
        arrived, failed, again, *_ = prefill.times[before:]
        assert arrived == failed, "what waits goes with the next message at once"
        assert again - failed <= 0.1 + 1e-9
        prefill.status = 200
        await asyncio.sleep(3.0)

    client, _ = play(story)
    assert {answer.request_id for answer in client.answers()} == set(map(str, range(400)))


@pytest.mark.parametrize("status", [400, 403, 404, 409, 413])
def test_what_prefill_refuses_is_not_sent_again(play: Play, status: int) -> None:
    async def story(client: LeaseClient, prefill: Prefill) -> None:
        prefill.status = status
        release(client, "b")
        renew(client, "a")
        await asyncio.sleep(60.0)

    client, prefill = play(story)
    assert prefill.sizes == [(1, 1)]
    assert client.answers() == [], "the handshake says what has happened"


@pytest.mark.parametrize("fault", [b"\xc1", ValueError("a host that makes no URL")], ids=str)
def test_a_message_that_will_never_be_understood_is_sent_once(
    play: Play, fault: bytes | Exception
) -> None:
    async def story(client: LeaseClient, prefill: Prefill) -> None:
        prefill.body = fault if isinstance(fault, bytes) else None
        prefill.error = None if isinstance(fault, bytes) else fault
        renew(client, "a")
        await asyncio.sleep(60.0)

    client, prefill = play(story)
    assert len(prefill.asked) == 1
    assert client.answers() == []


def test_a_lease_whose_deadline_is_now_is_not_told_of(play: Play) -> None:
    async def story(client: LeaseClient, prefill: Prefill) -> None:
        renew(client, "a", ends=0.0)
        await asyncio.sleep(1.0)
        assert prefill.asked == []
        renew(client, "b", ends=1.1)
        await asyncio.sleep(1.0)

    client, prefill = play(story)
    assert [one.renewals for _, _, one in prefill.asked] == [(("b", 7),)]
    assert [answer.request_id for answer in client.answers()] == ["b"]


def told(prefill: Prefill) -> list[str]:
    """The leases of all messages."""
    return [name for _, _, one in prefill.asked for name, _ in one.renewals + one.releases]


def test_more_than_may_wait_is_dropped(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for all engines together. The engine that does not answer loses its oldest."""
    monkeypatch.setattr(lease_client, "MAX_PENDING", 3)

    async def story(client: LeaseClient, prefill: Prefill) -> None:
        prefill.answers_after = 1.0
        release(client, "a")
        renew(client, "b")
        release(client, "c", engine=OTHER)
        renew(client, "d", engine=OTHER)
        renew(client, "e")
        await asyncio.sleep(3.0)
        assert sorted(told(prefill)) == ["a", "c", "e"]
        renew(client, "d")
        await asyncio.sleep(3.0)

    client, prefill = play(story)
    assert told(prefill)[3:] == ["d"]
    assert [answer.request_id for answer in client.answers()] == ["e", "d"]


def test_an_engine_that_does_not_answer_costs_others_no_message(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_client, "MAX_PENDING", 300)

    async def story(client: LeaseClient, prefill: Prefill) -> None:
        for number in range(300):
            renew(client, f"silent {number}", engine=OTHER)
        for number in range(50):
            release(client, f"done {number}")
            renew(client, f"held {number}")
        await asyncio.sleep(1.0)

    _, prefill = play(story)
    heard = told(prefill)
    assert sum(name.startswith(("held", "done")) for name in heard) == 100
    assert sum(name.startswith("silent") for name in heard) == 200
