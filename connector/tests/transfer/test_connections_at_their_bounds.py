"""Connections and receives turn by turn on one thread, with a clock that the test moves."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from msgspec.structs import replace
from transfer_rig import Prefill
from turn_by_turn import LEASE, PROBE_SECONDS, Bench

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.plan.block_pairs import GroupBlocks
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive_order import Receipt, ReceiveOrder
from pdcluster_connector.transfer.planned_reads import HANDSHAKE_GRACE_SECONDS
from pdcluster_connector.transfer.probing import NO_ROOM, PROBE_SLOTS
from pdcluster_connector.transfer.receive_machine import Signal


@pytest.fixture
def bench() -> Bench:
    return Bench()


# Probes that find no room.


def test_a_probe_without_room_says_nothing_of_its_connection(bench: Bench) -> None:
    good = bench.prefill("good/1")
    bench.send(good)
    assert bench.take().received
    stuck = [bench.prefill(f"stuck{n}/1") for n in range(PROBE_SLOTS)]
    bench.hanging |= {engine.engine_id for engine in stuck}
    for engine in stuck:
        probed = bench.probe(engine)
        bench.pass_time(PROBE_SECONDS)
        failure = probed.result(0).failure
        assert failure is not None
        assert failure.reason is Reason.TRANSFER_STALLED
    # Their reads may still write into their slots, of which no other is left.
    assert bench.probe(good).result(0).failure == NO_ROOM
    connection = bench.connections.by_engine.get(good.engine_id)
    assert connection is not None
    assert connection.broken is None
    assert connection.transfers == 0, "or it could never close"
    assert good.engine_id not in bench.peers.forgotten
    assert bench.send(good) in bench.take().received
    # A slot that is free again is used again.
    bench.fabric.land()
    bench.turns()
    assert bench.probe(good).result(0).failure is None


# The lease's end against a cause that is known better.


@pytest.mark.parametrize("late", [0.0, HANDSHAKE_GRACE_SECONDS / 2])
def test_why_no_handshake_came_is_said_rather_than_that_the_lease_ended(
    bench: Bench, late: float
) -> None:
    """The peer source ends its attempts at the same deadline, and tells a moment later."""
    prefill = bench.prefill("p/1")
    refused = Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "connection refused by 10.0.0.1")
    bench.peers.hold = True
    request = bench.send(prefill)
    bench.pass_time(LEASE + late)
    assert not bench.take().finished, "its cause is about to come"
    bench.peers.table["p/1"] = refused
    bench.peers.release()
    bench.turns()
    assert bench.take().failed == {request: refused}


def test_a_peer_source_that_says_nothing_is_not_waited_for_longer(bench: Bench) -> None:
    bench.peers.hold = True
    request = bench.send(bench.prefill("p/1"))
    bench.pass_time(LEASE + HANDSHAKE_GRACE_SECONDS)
    assert bench.take().failed[request].reason is Reason.LEASE_EXPIRED


# Why a connection broke: the first cause, unless a later one says more.

UNREACHABLE = Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "p does not answer")
RESTARTED = Failure(Reason.PEER_RESTARTED, "p has another incarnation")
TRANSPORT = Failure(Reason.BACKEND_ERROR, "the transport broke")


def break_off(bench: Bench, *failures: Failure) -> tuple[Prefill, str]:
    """Break a connection off on which a transfer hangs; return its peer and the request."""
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    bench.hanging.add(prefill.engine_id)
    under_way = bench.send(prefill)
    for failure in failures:
        bench.connections.break_off(bench.connections.by_engine["p/1"], failure)
    bench.hanging.clear()
    return prefill, under_way


def test_a_peer_that_answers_again_is_read_over_the_same_connection(bench: Bench) -> None:
    prefill, under_way = break_off(bench, UNREACHABLE)
    connection = bench.connections.by_engine["p/1"]
    assert bench.send(prefill) in bench.take().received
    assert bench.connections.by_engine["p/1"] is connection
    bench.fabric.land()
    bench.turns()
    assert under_way in bench.take().received


@pytest.mark.parametrize(
    "failures", [(TRANSPORT, UNREACHABLE), (UNREACHABLE, TRANSPORT), (RESTARTED, UNREACHABLE)]
)
def test_a_connection_that_broke_for_another_cause_is_not_used_again(
    bench: Bench, failures: tuple[Failure, ...]
) -> None:
    """That the peer answers a handshake says nothing of the transport."""
    prefill, under_way = break_off(bench, *failures)
    connection = bench.connections.by_engine["p/1"]
    later = bench.send(prefill)
    at_once = bench.take()
    bench.fabric.land()
    bench.turns()
    assert bench.connections.by_engine.get("p/1") is not connection
    ended = bench.take()
    assert under_way in ended.received
    if RESTARTED in failures:
        assert at_once.failed == {later: RESTARTED}
    else:  # it waited for the connection to close
        assert not at_once.finished
        assert later in ended.received


# What has to be read, and nothing to read it over.


def test_a_receive_without_a_connection_fails_although_nothing_is_under_way(bench: Bench) -> None:
    """It would be done otherwise: all that was planned has landed."""
    bench.peers.hold = True
    request = bench.send(bench.prefill("p/1"))
    bench.executor.pass_on([(request, Signal.CONNECTED)])
    failure = bench.take().failed[request]
    assert failure == Failure(Reason.BACKEND_ERROR, "there is no connection to read over")


@pytest.mark.parametrize("broken", [None, Failure(Reason.PEER_RESTARTED, "it is gone")])
def test_a_receive_whose_connection_has_ended_fails(bench: Bench, broken: Failure | None) -> None:
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    bench.peers.hold = bench.peers.silent = True
    request = bench.send(prefill)
    connection = bench.connections.by_engine["p/1"]
    sources, connection.sources, connection.broken = connection.sources, [], broken
    bench.executor.jobs[request].connection = connection
    bench.executor.pass_on([(request, Signal.CONNECTED)])
    ended = Failure(Reason.BACKEND_ERROR, "the connection has ended")
    assert bench.take().failed[request] == (broken or ended)
    assert not bench.written(request)
    connection.sources = sources


def test_a_rank_without_kv_reads_nothing_and_waits_for_the_claim(bench: Bench) -> None:
    """Its pipeline stage has no layer with KV, so it has no sources to read from either."""
    bench.connections._shard = replace(bench.connections._shard, regions=())
    request = bench.send(bench.prefill("p/1"), claimed=False)
    assert bench.connections.by_engine["p/1"].plan.sources == ()
    assert not bench.take().finished
    bench.acknowledge([request], bench.now + LEASE)
    bench.turns()
    assert bench.take().received == {request: Receipt(0, 0.0)}
    assert not bench.written(request)


@pytest.mark.parametrize("left", ["no shard", "no region"])
def test_a_rank_with_kv_never_gets_a_connection_without_sources(bench: Bench, left: str) -> None:
    prefill = bench.prefill("p/1")
    shards = [replace(one, regions=()) for one in prefill.metadata.shards]
    kept = () if left == "no shard" else tuple(shards)
    bench.peers.table["p/1"] = replace(prefill.metadata, shards=kept)
    request = bench.send(prefill)
    assert bench.take().failed[request].reason is Reason.LAYER_MISMATCH


@pytest.mark.parametrize("theirs", [(), (0,), (1,)], ids=str)
@pytest.mark.parametrize("ours", [(), (0,), (30,)], ids=str)
def test_tokens_without_a_block_on_either_side_are_never_taken_as_read(
    bench: Bench, theirs: tuple[int, ...], ours: tuple[int, ...]
) -> None:
    """Block 0 is vLLM's null block: it stands for a block that a request does not have."""
    ticket = bench.prefill("p/1").ticket(1, theirs, 4)
    bench.receive(ReceiveOrder("r1", ticket, (GroupBlocks(ours),), 0, 4, LEASE, claimed=True))
    bench.turns()
    ended = bench.take()
    if (theirs, ours) == ((1,), (30,)):
        assert ended.received["r1"].nbytes == bench.cache.bytes[:, 30].nbytes
    else:
        assert ended.failed["r1"].reason is Reason.COVERAGE_INCOMPLETE


@pytest.mark.parametrize("check", [True, False])
def test_only_who_has_just_shaken_hands_ends_a_silence(bench: Bench, check: bool) -> None:
    """A check asks nobody whether the peer lives, and a probe comes after a handshake."""
    prefill, _ = break_off(bench, UNREACHABLE)
    connection = bench.connections.by_engine["p/1"]
    asked: Future[ProbeResult] = Future()
    probing = bench.connections.probing
    if check:
        probing.begin(prefill.metadata, asked, check=True)
    else:
        probing.probe(prefill.metadata, asked)
    bench.turns()
    assert asked.result(0).failure == (UNREACHABLE if check else None)
    assert connection.broken == (UNREACHABLE if check else None)
