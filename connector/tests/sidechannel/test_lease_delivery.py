"""Releases and renewals from decode's scheduler to prefill's, over a real side channel."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from loopback_engines import PREFILL, until

from pdcluster_connector.protocol.messages import LeaseRequest
from pdcluster_connector.sidechannel.lease_client import BATCH, LeaseClient
from pdcluster_connector.sidechannel.lease_inbox import LeaseInbox, LeaseNews
from pdcluster_connector.sidechannel.server import SideChannelServer

Serve = Callable[..., SideChannelServer]


@pytest.fixture
def client() -> Iterator[LeaseClient]:
    client = LeaseClient()
    client.start()
    yield client
    client.close(0.1)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def test_a_thousand_releases_arrive_once_in_few_messages(serve: Serve) -> None:
    """All of them wait before the first message goes, as those of one engine step do."""
    inbox = LeaseInbox()
    server = serve(leases=inbox)
    client = LeaseClient()
    for number in range(1000):
        client.release("127.0.0.1", server.port, PREFILL, f"r{number}", 2**63 + number, soon(60))
    client.renew("127.0.0.1", server.port, PREFILL, "kept", 5, soon(60))
    client.start()  # what was called before runs first
    client.close(60.0)  # which sends what waits
    assert client.counts == {"delivered": 1001}
    news = inbox.drain()
    assert sorted(news.releases) == sorted((f"r{n}", 2**63 + n) for n in range(1000))
    assert news.renewals == (("kept", 5),)
    assert server.counts["lease_messages"] == math.ceil(1001 / BATCH)
    assert inbox.drain() == LeaseNews()


def test_a_release_supersedes_a_renewal(serve: Serve) -> None:
    inbox = LeaseInbox()
    server = serve(leases=inbox)
    client = LeaseClient()
    client.renew("127.0.0.1", server.port, PREFILL, "r", 1, soon())
    client.release("127.0.0.1", server.port, PREFILL, "r", 1, soon())
    client.renew("127.0.0.1", server.port, PREFILL, "r", 1, soon())
    client.start()
    client.close(10.0)  # which sends what waits
    assert client.counts == {"delivered": 1}
    assert inbox.drain() == LeaseNews(releases=(("r", 1),))


def test_retried_until_prefill_listens_again(serve: Serve, client: LeaseClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    client.release("127.0.0.1", port, PREFILL, "r", 1, soon(20))
    client.release("127.0.0.1", port, PREFILL, "hopeless", 2, soon(0.4))
    time.sleep(0.6)
    inbox = LeaseInbox()
    serve(port=port, leases=inbox)
    until(lambda: client.counts["delivered"] == 1)
    assert inbox.drain().releases == (("r", 1),)
    assert client.counts["expired"] == 1
    until(lambda: not client._outboxes)


def test_a_restarted_prefill_ends_the_matter(serve: Serve, client: LeaseClient) -> None:
    inbox = LeaseInbox()
    server = serve("ns.c.prefill.r.0/new", leases=inbox)
    client.release("127.0.0.1", server.port, PREFILL, "r", 1, soon(60))
    until(lambda: client.counts["refused"] == 1)
    assert inbox.drain() == LeaseNews()
    until(lambda: not client._outboxes)


def test_a_full_inbox_makes_the_client_wait(serve: Serve, client: LeaseClient) -> None:
    inbox = LeaseInbox(limit=2)
    server = serve(leases=inbox)
    assert inbox.put(LeaseRequest(PREFILL, (("a", 1), ("b", 2))))
    client.release("127.0.0.1", server.port, PREFILL, "c", 3, soon())
    time.sleep(0.3)
    assert client.counts["delivered"] == 0
    assert len(inbox.drain().releases) == 2
    until(lambda: client.counts["delivered"] == 1)
    assert inbox.drain().releases == (("c", 3),)


def test_a_dead_prefill_does_not_delay_the_others(serve: Serve, client: LeaseClient) -> None:
    inbox = LeaseInbox()
    server = serve(leases=inbox)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client.release("127.0.0.1", silent.getsockname()[1], "dead/1", "r", 1, soon(60))
        silent.settimeout(10.0)
        held, _ = silent.accept()
        with held:
            held.settimeout(10.0)
            assert held.recv(100)  # its message is under way, and nobody answers it
            client.release("127.0.0.1", server.port, PREFILL, "r", 1, soon())
            until(lambda: client.counts["delivered"] == 1)
            until(lambda: list(client._outboxes) == [(*silent.getsockname(), "dead/1")])


def test_closing_sends_what_waits(serve: Serve) -> None:
    inbox = LeaseInbox()
    server = serve(leases=inbox)
    client = LeaseClient()
    client.start()
    client.release("127.0.0.1", server.port, PREFILL, "r", 1, soon())
    client.close()
    assert inbox.drain().releases == (("r", 1),)
    client.release("127.0.0.1", server.port, PREFILL, "late", 1, soon())  # no error
    client.close()


def test_a_host_that_makes_no_address(client: LeaseClient) -> None:
    client.release("not a host", 80, PREFILL, "r", 1, soon(0.5))
    until(lambda: client.counts["refused"] + client.counts["expired"] == 1)
