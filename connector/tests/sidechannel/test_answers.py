"""What a side channel answers, without a socket: statuses, values and log lines."""

from __future__ import annotations

import json
import logging
import time

import pytest
from aiohttp import web
from loopback_engines import DECODE, PREFILL, SHAPE, shards_of
from msgspec.structs import replace

from pdcluster_connector.protocol import messages as m
from pdcluster_connector.protocol.engine_id import engine_name
from pdcluster_connector.sidechannel.lease_desk import LeaseDesk
from pdcluster_connector.sidechannel.server import SideChannelError, SideChannelServer

LEASE = ("r", 7)


def answers(leases: LeaseDesk | None = None, role: str = "prefill") -> SideChannelServer:
    return SideChannelServer(
        "127.0.0.1",
        0,
        PREFILL,
        SHAPE,
        shards=shards_of(PREFILL),
        leases=leases,
        role=role,
    )


def test_an_engine_that_no_peer_could_read_does_not_start() -> None:
    """Each of its links would fail, with a cause that names the peer's connector."""
    (shard,) = shards_of(PREFILL)[:1]
    (region,) = shard.regions[:1]
    unreadable = replace(shard, regions=(replace(region, layer="l" * 513),))
    with pytest.raises(SideChannelError, match=r"describes its KV: .*length <= 512"):
        SideChannelServer("127.0.0.1", 0, PREFILL, SHAPE, shards=[unreadable])


def asked(oldest: int = 3, newest: int = 3) -> bytes:
    return m.encode(m.HandshakeRequest((oldest, newest), DECODE, SHAPE))


def refusal(answer: web.Response) -> m.Refusal:
    found = m.decode_handshake_reply(answer.body)
    assert isinstance(found, m.Refusal)
    return found


def test_a_decode_engine_learns_what_is_in_memory() -> None:
    engine = answers()
    answer = engine.handshake(asked(), None)
    assert (answer.status, answer.content_type) == (200, "application/msgpack")
    assert m.decode_handshake_reply(answer.body) == m.EngineMetadata(
        3, PREFILL, SHAPE, shards_of(PREFILL)
    )


@pytest.mark.parametrize(
    ("oldest", "newest", "theirs"), [(4, 9, "4..9"), (1, 2, "1..2"), (4, 4, "4..4")]
)
def test_without_a_common_protocol_both_ranges_are_told(
    oldest: int, newest: int, theirs: str
) -> None:
    engine = answers()
    answer = engine.handshake(asked(oldest, newest), None)
    assert answer.status == 409
    assert refusal(answer) == m.Refusal(
        "ProtocolVersionMismatch",
        f"prefill speaks protocol 3..3, decode {theirs}; give both engines the same connector",
        "3..3",
        theirs,
    )


@pytest.mark.parametrize(("oldest", "newest"), [(1, 3), (3, 9), (1, 9)])
def test_one_common_protocol_is_enough(oldest: int, newest: int) -> None:
    engine = answers()
    assert engine.handshake(asked(oldest, newest), None).status == 200


def test_a_lease_message_for_the_former_incarnation_names_both() -> None:
    desk = LeaseDesk(60.0)
    answer = answers(desk).lease(m.encode(m.LeaseRequest("ns.c.prefill.r.0/old", DECODE)), None)
    assert answer.status == 409
    assert refusal(answer) == m.Refusal(
        "PeerRestarted",
        f"ns.c.prefill.r.0/old is gone; {PREFILL} listens here now",
        PREFILL,
        "ns.c.prefill.r.0/old",
    )


def test_a_decode_engine_grants_no_leases() -> None:
    engine = answers(leases=None, role="decode")
    answer = engine.lease(m.encode(m.LeaseRequest(PREFILL, DECODE)), None)
    assert (answer.status, answer.body) == (404, b"this engine grants no leases")


def test_a_renewal_is_answered_with_how_long_it_holds() -> None:
    desk = LeaseDesk(42.0)
    desk.arm(*LEASE)
    desk.grant("r")
    engine = answers(desk)
    answer = engine.lease(m.encode(m.LeaseRequest(PREFILL, DECODE, renewals=(LEASE,))), None)
    assert (answer.status, answer.content_type) == (200, "application/msgpack")
    assert m.decode_lease_reply(answer.body) == m.LeaseReply(42.0, (LEASE,))


def test_health_says_who_listens_in_which_role_and_with_how_many_shards() -> None:
    before = time.time()
    answer = answers(role="decode").health()
    assert (answer.status, answer.content_type) == (200, "application/json")
    said = json.loads(answer.body)
    assert before <= said.pop("time") <= time.time(), "what its clock shows now"
    assert said == {"engine_id": PREFILL, "role": "decode", "shards": 1}


def test_malformed_messages_are_logged_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    """A client that sends many fills no disk."""
    engine = answers(LeaseDesk(60.0))
    with caplog.at_level(logging.WARNING):
        for number in range(20):
            ask = engine.lease if number % 2 else engine.handshake
            answer = ask(b"\xc1", None)
            assert (answer.status, answer.content_type) == (400, "text/plain")
            assert answer.body
    numbers = [int(record.getMessage().split()[2].rstrip(":")) for record in caplog.records]
    assert numbers == [1, 2, 4, 8, 16]


def test_a_client_whose_certificate_names_another_engine_is_told_nothing() -> None:
    desk = LeaseDesk(60.0)
    desk.arm(*LEASE)
    desk.grant("r")
    engine = answers(desk)
    stranger = (engine_name("ns.c.decode.r.1/ee"),)
    message = m.encode(m.LeaseRequest(PREFILL, DECODE, releases=(LEASE,)))
    for answer in (engine.handshake(asked(), stranger), engine.lease(message, stranger)):
        assert answer.status == 403
        assert b"its certificate names ns.c.decode.r.1.engine.pdcluster.dev" in answer.body
    assert desk.held == 1
    own = (engine_name(DECODE),)
    assert engine.handshake(asked(), own).status == 200
    assert engine.lease(message, own).status == 200
    assert desk.held == 0


def test_a_refusal_says_of_each_engine_what_is_its_own() -> None:
    engine = answers()
    other = m.HandshakeRequest((3, 3), DECODE, replace(SHAPE, kv_dtype="bfloat16"))
    answer = engine.handshake(m.encode(other), None)
    assert answer.status == 409
    found = refusal(answer)
    assert (found.prefill_value, found.decode_value) == ("float32", "bfloat16")
