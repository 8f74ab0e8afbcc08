"""Releases and renewals from decode's scheduler to prefill's, over a real side channel."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from loopback_engines import DECODE, PREFILL, HeardServer, until

from loopback import free_port
from pdcluster_connector.protocol.messages import CLEARED, LeaseRequest, Standing
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.sidechannel.lease_client import (
    BATCH,
    GATHER_SECONDS,
    UNSENT_SECONDS,
    LeaseAnswer,
    LeaseClient,
)
from pdcluster_connector.sidechannel.lease_desk import LeaseChanges, LeaseDesk

Serve = Callable[..., HeardServer]
LEASE = 60.0


@pytest.fixture
def client() -> Iterator[LeaseClient]:
    client = LeaseClient(DECODE)
    client.start()
    yield client
    client.close(0.1)


def desk(*granted: tuple[str, int]) -> LeaseDesk:
    """A prefill engine whose requests have ended and left leases behind."""
    leases = LeaseDesk(LEASE)
    for request_id, token in granted:
        leases.arm(request_id, token)
        assert leases.grant(request_id)
    assert leases.take().words == {slot: token for slot, (_, token) in enumerate(granted)}
    return leases


def ticket(host: str, port: int, engine_id: str, request_id: str, token: int) -> Ticket:
    return Ticket(engine_id, host, port, request_id, token, (), 16, 0, b"d" * 16, 0.0)


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def answers(client: LeaseClient, count: int) -> list[LeaseAnswer]:
    heard: list[LeaseAnswer] = []
    until(lambda: heard.extend(client.answers()) or len(heard) >= count)
    assert len(heard) == count
    return heard


def test_what_one_step_asks_wakes_the_thread_once_and_is_taken_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, calls = LeaseClient(DECODE), []
    monkeypatch.setattr(client._thread, "call", lambda *call: calls.append(call))
    added: list[str] = []
    monkeypatch.setattr(client, "_add", lambda ticket, *_: added.append(ticket.request_id))
    call_later, asked = client._thread.loop.call_later, iter("abcdefgh")

    def release() -> None:
        client.release(ticket("h", 1, PREFILL, next(asked), 1), soon())

    def renew() -> None:
        client.renew(ticket("h", 1, PREFILL, next(asked), 1), soon())

    release()
    release()
    client.send()
    renew()
    renew()
    client.send()
    [(*_, due), (*_, unsent), (sent,)] = calls
    assert calls[:2] == [(call_later, GATHER_SECONDS, due), (call_later, UNSENT_SECONDS, unsent)]
    sent()
    assert added == [*"abcd"]
    release()
    unsent()
    assert added == [*"abcd"], "a release does not go with renewals that were sent"
    renew()
    assert len(calls) == 4, "later ones wake it again"
    due()
    assert added == [*"abcdef"]
    release()
    assert len(calls) == 5
    client.close()


def test_a_thousand_releases_arrive_once_in_few_messages(serve: Serve) -> None:
    """All of them wait before the first message goes, as those of one engine step do."""
    tokens = [(f"r{number}", 2**63 + number) for number in range(1000)]
    leases = desk(*tokens, ("kept", 5))
    server = serve(leases=leases)
    client = LeaseClient(DECODE)
    for request_id, token in tokens:
        client.release(ticket("127.0.0.1", server.port, PREFILL, request_id, token), soon(60))
    client.renew(ticket("127.0.0.1", server.port, PREFILL, "kept", 5), soon(60))
    client.start()  # what was called before runs first
    client.close(60.0)  # which sends what waits
    changes = leases.take()
    assert sorted(changes.released) == sorted(request_id for request_id, _ in tokens)
    assert changes.words == dict.fromkeys(range(1000), CLEARED)
    assert [answer.standing for answer in client.answers()] == [Standing.HELD]
    assert leases.held == 1
    assert server.answered == [("lease", 200)] * math.ceil(1001 / BATCH)
    assert leases.take() == LeaseChanges()


def test_a_release_supersedes_a_renewal(serve: Serve) -> None:
    leases = desk(("r", 1))
    server = serve(leases=leases)
    client = LeaseClient(DECODE)
    client.renew(ticket("127.0.0.1", server.port, PREFILL, "r", 1), soon())
    client.release(ticket("127.0.0.1", server.port, PREFILL, "r", 1), soon())
    client.renew(ticket("127.0.0.1", server.port, PREFILL, "r", 1), soon())
    client.start()
    client.close(60.0)  # which sends what waits
    assert server.answered == [("lease", 200)]
    assert leases.take().released == ["r"]
    assert client.answers() == []


def test_each_renewal_is_answered(serve: Serve, client: LeaseClient) -> None:
    leases = desk(("mine", 1), ("theirs", 2))
    leases.answer(LeaseRequest(PREFILL, "ns.c.decode.r.1/other", renewals=(("theirs", 2),)))
    server = serve(leases=leases)
    before = time.monotonic()
    for key in (("mine", 1), ("mine", 9), ("theirs", 2), ("unknown", 4)):
        client.renew(ticket("127.0.0.1", server.port, PREFILL, *key), soon())
    heard = {(answer.request_id, answer.token): answer for answer in answers(client, 4)}
    assert {key: answer.standing for key, answer in heard.items()} == {
        ("mine", 1): Standing.HELD,
        ("mine", 9): Standing.GONE,
        ("theirs", 2): Standing.CLAIMED,
        ("unknown", 4): Standing.GONE,
    }
    until_ = heard["mine", 1].until
    assert before + LEASE <= until_ <= time.monotonic() + LEASE, "counted from the question on"
    assert all(answer.engine_id == PREFILL for answer in heard.values())


def test_who_waits_goes_on_when_the_answer_is_there(serve: Serve, client: LeaseClient) -> None:
    server = serve(leases=desk(("r", 1), ("s", 2)))
    for key in (("r", 1), ("s", 2)):
        client.renew(ticket("127.0.0.1", server.port, PREFILL, *key), soon())
        before = time.monotonic()
        client.wait(60.0)
        client.wait(60.0)
        assert time.monotonic() - before < 60.0
        assert len(client.answers()) == 1
    client.wait(0.001)
    assert client.answers() == []


def test_the_first_engine_that_asks_holds_the_lease(serve: Serve, client: LeaseClient) -> None:
    """One ticket at two decode engines: the second neither holds the lease nor ends it."""
    leases = desk(("r", 1))
    server = serve(leases=leases)
    client.renew(ticket("127.0.0.1", server.port, PREFILL, "r", 1), soon())
    assert answers(client, 1)[0].standing is Standing.HELD
    second = LeaseClient("ns.c.decode.r.1/00000000000000ee")
    second.start()
    second.renew(ticket("127.0.0.1", server.port, PREFILL, "r", 1), soon())
    assert answers(second, 1)[0].standing is Standing.CLAIMED
    second.release(ticket("127.0.0.1", server.port, PREFILL, "r", 1), soon())
    until(lambda: server.answered == [("lease", 200)] * 3)
    second.close()
    assert leases.held == 1
    client.release(ticket("127.0.0.1", server.port, PREFILL, "r", 1), soon())
    until(lambda: leases.held == 0)
    until(lambda: not client._outboxes)  # before that, it asks for no more
    client.renew(ticket("127.0.0.1", server.port, PREFILL, "r", 1), soon())
    assert answers(client, 1)[0].standing is Standing.GONE


def test_an_answer_does_not_wait_for_the_engine_step(serve: Serve, client: LeaseClient) -> None:
    """The side channel answers while the scheduler is away, and what it said holds."""
    now = [100.0]
    leases = LeaseDesk(10.0, clock=lambda: now[0])
    leases.arm("r", 1)
    leases.grant("r")
    server = serve(leases=leases)
    now[0] = 109.0
    client.renew(ticket("127.0.0.1", server.port, PREFILL, "r", 1), soon())
    assert answers(client, 1)[0].standing is Standing.HELD
    now[0] = 118.0
    assert leases.take().expired == []
    now[0] = 119.0
    assert leases.take().expired == ["r"]
    client.renew(ticket("127.0.0.1", server.port, PREFILL, "r", 1), soon())
    assert answers(client, 1)[0].standing is Standing.EXPIRED
    client.renew(ticket("127.0.0.1", server.port, PREFILL, "r", 2), soon())
    assert answers(client, 1)[0].standing is Standing.GONE, "it was another lease"


def test_a_renewal_and_an_expiry_at_the_same_moment() -> None:
    """Whatever was said to be held is not expired, over many races of the two threads."""
    for _ in range(300):
        now = [0.0]
        leases = LeaseDesk(10.0, clock=lambda now=now: now[0])
        leases.arm("r", 1)
        leases.grant("r")
        now[0] = 10.0  # due, and not yet looked at
        said: list[tuple[tuple[str, int], ...]] = []
        request = LeaseRequest(PREFILL, DECODE, renewals=(("r", 1),))
        asker = threading.Thread(
            target=lambda said=said, leases=leases, request=request: said.append(
                leases.answer(request).renewed
            )
        )
        asker.start()
        expired = leases.take().expired
        asker.join()
        assert bool(said[0]) != bool(expired)


def test_retried_until_prefill_listens_again(serve: Serve, client: LeaseClient) -> None:
    port = free_port()  # which nobody else takes meanwhile
    client.release(ticket("127.0.0.1", port, PREFILL, "r", 1), soon(200))
    client.release(ticket("127.0.0.1", port, PREFILL, "hopeless", 2), soon(0.4))
    time.sleep(0.6)
    leases = desk(("r", 1), ("hopeless", 2))
    server = serve(port=port, leases=leases)
    until(lambda: server.answered)
    until(lambda: not client._outboxes)
    assert server.answered == [("lease", 200)]
    assert leases.take().released == ["r"], "the other one's deadline has passed"
    assert leases.held == 1


def test_a_restarted_prefill_ends_the_matter(serve: Serve, client: LeaseClient) -> None:
    leases = desk(("r", 1))
    server = serve("ns.c.prefill.r.0/new", leases=leases)
    client.release(ticket("127.0.0.1", server.port, PREFILL, "r", 1), soon(60))
    until(lambda: server.answered)
    assert leases.held == 1
    until(lambda: not client._outboxes)
    assert server.answered == [("lease", 409)]
    client.renew(ticket("127.0.0.1", server.port, PREFILL, "r", 1), soon(60))
    until(lambda: len(server.answered) > 1)
    until(lambda: not client._outboxes)
    assert server.answered == [("lease", 409)] * 2
    assert client.answers() == [], "the handshake says what has happened"


def test_a_dead_prefill_does_not_delay_the_others(serve: Serve, client: LeaseClient) -> None:
    server = serve(leases=desk())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client.release(ticket("127.0.0.1", silent.getsockname()[1], "dead/1", "r", 1), soon(60))
        silent.settimeout(60.0)
        held, _ = silent.accept()
        with held:
            held.settimeout(60.0)
            assert held.recv(100)  # its message is under way, and nobody answers it
            client.release(ticket("127.0.0.1", server.port, PREFILL, "r", 1), soon())
            until(lambda: server.answered == [("lease", 200)])
            until(lambda: list(client._outboxes) == [(*silent.getsockname(), "dead/1")])


def test_closing_sends_what_waits(serve: Serve) -> None:
    leases = desk(("r", 1))
    server = serve(leases=leases)
    client = LeaseClient(DECODE)
    client.start()
    client.release(ticket("127.0.0.1", server.port, PREFILL, "r", 1), soon())
    client.close(60.0)
    assert leases.take().released == ["r"]
    client.release(ticket("127.0.0.1", server.port, PREFILL, "late", 1), soon())  # no error
    client.close()


def test_a_host_that_makes_no_address(client: LeaseClient) -> None:
    client.release(ticket("not a host", 80, PREFILL, "r", 1), soon(0.5))
    client.close(60.0)  # which waits for what is under way
    assert client._outboxes == {}
