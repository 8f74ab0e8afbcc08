"""Reads turn by turn: in which order they are posted, and what is read again over a new agent."""

from __future__ import annotations

import dataclasses
import time

import pytest
from left_open import open_handles
from msgspec.structs import replace
from transfer_rig import Decode, FakePeers, Prefill
from turn_by_turn import CACHE, LEASE, Bench

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import NixlErrorKind
from pdcluster_connector.plan.block_pairs import GroupBlocks
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive_order import ReceiveOrder
from pdcluster_connector.testing.nixl import Behaviour, Fabric, Transfer
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.planned_reads import Job
from pdcluster_connector.transfer.receive_machine import Signal

DRAIN = 30.0
BLOCK_BYTES = 2 * 4 * 4 * 4  # two layers, four heads, four tokens of four bytes


def request_of(prefill: Prefill, seed: int, blocks: int) -> ReceiveOrder:
    """A request that the test hands over itself, into blocks of its own."""
    tokens = 4 * blocks
    ticket = prefill.ticket(seed, range(4 * seed, 4 * seed + blocks), tokens)
    own = GroupBlocks(list(range(4 * seed, 4 * seed + blocks)))
    return ReceiveOrder(f"r{seed}", ticket, (own,), 0, tokens, LEASE, True)


def of_kv(transfer: Transfer) -> bool:
    return transfer.nbytes not in (8, 4096)


def post_slowly(bench: Bench) -> None:
    """From now on, posting a read takes a millisecond, and no read of KV lands."""

    def slow(transfer: Transfer) -> Behaviour:
        bench.now += 1 / 1024
        return Behaviour(hang=of_kv(transfer))

    bench.fabric.behave = slow


def test_requests_are_posted_in_turn_so_that_none_waits_for_a_long_one() -> None:
    bench = Bench(ReceiverOptions(descriptors_per_transfer=1))
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    bench.hanging.add(prefill.engine_id)
    first, second = (request_of(prefill, seed, 3) for seed in (2, 3))
    order: list[str] = []
    begins = {
        block: request.request_id
        for request in (first, second)
        for block in request.blocks[0].blocks
    }
    layer, block = bench.cache.bytes[0].nbytes, bench.cache.bytes[0][0].nbytes
    start, as_before = bench.cache.bytes.ctypes.data, bench.fabric.behave

    def behave(transfer: Transfer) -> Behaviour:
        order.append(begins[(transfer.copies[0][0] - start) % layer // block])
        return as_before(transfer)

    bench.fabric.behave = behave
    bench.receive(first, second)
    bench.turns()
    assert order == ["r2", "r3"] * 6  # of three blocks in two layers


def test_posting_stops_after_two_milliseconds_so_that_what_has_landed_is_noticed() -> None:
    """All of it is posted in the end."""
    bench = Bench(ReceiverOptions(descriptors_per_transfer=1))
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received

    post_slowly(bench)
    bench.receive(request_of(prefill, 2, 4))
    posted = []
    for _ in range(4):
        bench.executor.turn()
        posted.append(len(bench.fabric.flying))
    assert posted == [3, 6, 8, 8]


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_fence_does_not_wait_for_the_kv_of_others(tensor: int) -> None:
    """Otherwise no request of a crowd is done before all of its KV is posted."""
    bench = Bench(ReceiverOptions(descriptors_per_transfer=1))
    prefill = Prefill(bench.fabric, "p/1", tensor=tensor, **CACHE)
    bench.peers.table["p/1"] = prefill.metadata
    assert bench.send(prefill) in bench.take().received
    posted: list[bool] = []

    def slow(transfer: Transfer) -> Behaviour:
        bench.now += 1 / 1024
        posted.append(of_kv(transfer))
        return Behaviour()

    bench.fabric.behave = slow
    bench.receive(request_of(prefill, 2, 1), request_of(prefill, 3, 4))
    while all(posted):
        bench.executor.turn()
    words = posted.index(False)
    assert words % 3 == 0, "a turn posts three, and the words come first"
    assert posted[words : words + tensor] == [False] * tensor, "one word of each rank"
    assert posted[:words].count(True) < posted.count(True), "the other one's KV goes on"
    bench.turns()
    assert set(bench.take().received) == {"r2", "r3"}


def test_a_request_that_comes_twice_hides_no_other_of_its_batch() -> None:
    bench = Bench()
    prefill = bench.prefill("p/1")
    first, second = (request_of(prefill, seed, 1) for seed in (2, 3))
    bench.receive(first, first, second)
    bench.turns()
    assert set(bench.take().received) == {"r2", "r3"}


def test_what_is_read_again_is_counted_once() -> None:
    bench = Bench(ReceiverOptions(drain_deadline_seconds=DRAIN))
    cut, slow = bench.prefill("cut/1"), bench.prefill("slow/1")
    bench.hanging |= {cut.engine_id, slow.engine_id}
    hung, again = bench.send(cut), bench.send(slow, blocks=2)
    bench.abandon(hung)
    bench.pass_time(DRAIN)
    bench.hanging.clear()
    bench.pass_time(1.0)
    assert bench.take().received[again].nbytes == 2 * BLOCK_BYTES


def test_a_lease_word_that_did_not_come_is_not_taken_for_an_older_one() -> None:
    """The place in memory may still hold this very ticket's word, of an earlier read."""
    bench = Bench()
    prefill = bench.prefill("p/1")
    first = request_of(prefill, 2, 1)
    bench.receive(first)
    bench.turns()
    assert "r2" in bench.take().received
    bench.fabric.behave = lambda transfer: Behaviour(drop=transfer.nbytes == 8)
    bench.receive(first)
    bench.turns()
    assert bench.take().failed["r2"].reason is Reason.LEASE_LOST


def test_without_room_for_all_lease_words_a_receive_fails_and_keeps_none() -> None:
    bench = Bench()
    prefill = Prefill(bench.fabric, "p/1", tensor=2, **CACHE)
    bench.peers.table["p/1"] = prefill.metadata
    assert bench.send(prefill) in bench.take().received
    free = bench.connections.fence_words.free
    taken = [free.pop() for _ in range(len(free) - 1)]
    request = bench.send(prefill)
    failure = bench.take().failed[request]
    assert failure.reason is Reason.BACKEND_ERROR
    assert failure.message == "too many lease words are being read at the same time"
    assert len(free) == 1
    assert bench.connections.by_engine["p/1"].transfers == 0
    free.extend(taken)
    assert bench.send(prefill) in bench.take().received


def test_a_new_agent_is_there_before_anybody_needs_it() -> None:
    """To register the memory of a large cache takes seconds."""
    bench = Bench(ReceiverOptions(drain_deadline_seconds=DRAIN))
    cut = bench.prefill("cut/1")
    bench.hanging.add(cut.engine_id)
    bench.abandon(bench.send(cut))
    before = set(bench.fabric.agents)
    bench.pass_time(DRAIN)
    bench.pass_time(1.0)
    after = set(bench.fabric.agents)
    assert len([name for name in after - before if name.startswith("decode")]) == 1
    assert len(after) == len(before)


def test_a_second_read_that_hangs_does_not_put_off_the_end_of_the_agent() -> None:
    """Healthy reads have a second, from the first that asked for it on."""
    bench = Bench(ReceiverOptions(drain_deadline_seconds=DRAIN))
    cut, slow = bench.prefill("cut/1"), bench.prefill("slow/1")
    bench.hanging |= {cut.engine_id, slow.engine_id}
    first, second, _healthy = bench.send(cut), bench.send(cut), bench.send(slow)
    bench.abandon(first)
    bench.pass_time(0.5)
    bench.abandon(second)
    agents = set(bench.fabric.agents)
    bench.pass_time(DRAIN - 0.5)
    bench.pass_time(0.5)
    assert agents == set(bench.fabric.agents)
    bench.pass_time(0.25)
    assert agents == set(bench.fabric.agents)
    bench.pass_time(0.25)
    assert agents != set(bench.fabric.agents)
    assert set(bench.take().failed) == {first, second}


def test_an_agent_that_survives_is_told_of_once() -> None:
    """The worker ends then. A test's worker does not."""
    said: list[str] = []
    bench = Bench(ReceiverOptions(drain_deadline_seconds=DRAIN, fatal=said.append))
    lost, slow = bench.prefill("lost/1"), bench.prefill("slow/1")
    assert bench.send(lost) in bench.take().received
    bench.peers.hold = True
    bench.send(slow)  # waits for its handshake, and has nothing under way
    bench.fabric.survive_close = True
    bench.fabric.behave = lambda transfer: (
        Behaviour(poll_error=NixlErrorKind.LOST) if of_kv(transfer) else Behaviour()
    )
    bench.send(lost)
    for _ in range(10):
        bench.pass_time(1.0)
    assert said == ["survives, as asked"]
    assert not bench.take().finished, "its blocks may still be written"


def test_an_agent_with_a_read_that_nobody_can_observe_has_five_seconds() -> None:
    """So long at most, healthy reads may go on, and new ones wait."""
    bench = Bench(ReceiverOptions(drain_deadline_seconds=1e6))
    lost, slow = bench.prefill("lost/1"), bench.prefill("slow/1")
    bench.hanging.add(slow.engine_id)
    bench.send(slow)
    as_before = bench.fabric.behave
    bench.fabric.behave = lambda transfer: (
        Behaviour(poll_error=NixlErrorKind.LOST)
        if of_kv(transfer) and transfer.peer.startswith("lost")
        else as_before(transfer)
    )
    bench.send(lost)
    agents = set(bench.fabric.agents)
    bench.pass_time(4.75)
    assert agents == set(bench.fabric.agents)
    bench.pass_time(0.25)
    assert agents != set(bench.fabric.agents)


def test_a_read_whose_posting_breaks_may_have_been_posted() -> None:
    """So its blocks stay until the agent is destroyed, and the request fails with the cause."""
    bench = Bench(ReceiverOptions(drain_deadline_seconds=1e6))
    prefill, slow = bench.prefill("p/1"), bench.prefill("slow/1")
    assert bench.send(prefill) in bench.take().received
    bench.hanging.add(slow.engine_id)
    bench.send(slow)
    as_before = bench.fabric.behave

    def behave(transfer: Transfer) -> Behaviour:
        if of_kv(transfer) and transfer.peer.startswith("p/1"):
            raise RuntimeError("a broken library")
        return as_before(transfer)

    bench.fabric.behave = behave
    broken = bench.send(prefill)
    assert not bench.take().finished
    bench.pass_time(5.0)
    failure = bench.take().failed[broken]
    assert failure.reason is Reason.BACKEND_ERROR
    assert failure.message == "posting failed: RuntimeError: a broken library"


@pytest.mark.parametrize(("where", "kept"), [("poll_error", 1), ("post_error", 0)])
def test_the_place_of_a_lease_word_that_nobody_can_observe_goes_to_no_other_read(
    where: str, kept: int
) -> None:
    bench = Bench(ReceiverOptions(drain_deadline_seconds=1e6))
    prefill, slow = bench.prefill("p/1"), bench.prefill("slow/1")
    assert bench.send(prefill) in bench.take().received
    free = len(bench.connections.fence_words.free)
    bench.hanging.add(slow.engine_id)
    bench.send(slow)
    as_before, handles = bench.fabric.behave, open_handles(bench.fabric)
    bench.fabric.behave = lambda transfer: (
        Behaviour(**{where: NixlErrorKind.LOST}) if transfer.nbytes == 8 else as_before(transfer)
    )
    lost = bench.send(prefill)
    assert len(bench.connections.fence_words.free) == free - 1
    assert open_handles(bench.fabric) == handles + kept
    bench.fabric.behave = as_before
    bench.pass_time(5.0)
    assert len(bench.connections.fence_words.free) == free
    assert bench.take().failed[lost].reason is Reason.BACKEND_ERROR


def test_a_lease_word_that_was_not_posted_is_given_back_once() -> None:
    """Its place was given to two reads after the agent was destroyed: one fell to the other."""
    bench = Bench(ReceiverOptions(drain_deadline_seconds=1e6))
    prefill = Prefill(bench.fabric, "p/1", tensor=2, **CACHE)
    bench.peers.table["p/1"] = prefill.metadata
    assert bench.send(prefill) in bench.take().received
    free = bench.connections.fence_words.free
    count, as_before = len(free), bench.fabric.behave
    bench.fabric.behave = lambda transfer: (
        Behaviour(post_error=NixlErrorKind.LOST) if transfer.nbytes == 8 else as_before(transfer)
    )
    lost = bench.send(prefill)
    assert len(free) == count - 1, "of two: the first may still be written, the second never was"
    bench.fabric.behave = as_before
    bench.pass_time(5.0)
    assert bench.take().failed[lost].reason is Reason.BACKEND_ERROR
    free = bench.connections.fence_words.free
    assert len(free) == len(set(free)) == count
    assert bench.send(prefill) in bench.take().received


def test_the_first_lease_word_is_one_like_the_others() -> None:
    bench = Bench()
    prefill = bench.prefill("p/1")
    request = request_of(prefill, 5, 1)
    prefill.write_word(5, 0)
    prefill.write_word(0, 5)
    ticket = replace(request.ticket, fence_slot=0)
    bench.receive(dataclasses.replace(request, ticket=ticket))
    bench.turns()
    assert "r5" in bench.take().received


def test_a_rank_without_a_layer_that_has_kv_reads_nothing_and_waits_for_the_claim() -> None:
    """A stage of a pipeline may have none. The lease words are read by the other stages."""
    cache = CACHE | {"layers": 1}
    fabric, peers = Fabric(), FakePeers()
    prefill = Prefill(fabric, "p/1", **cache)
    peers.table["p/1"] = prefill.metadata
    decode = Decode(fabric, peers, stage=0, pipeline=2, **cache)
    assert decode.cache.shard.regions == ()
    request = decode.request("r", prefill.ticket(1, [3], 4), [4], claimed=False)
    decode.receive(request)
    decode.nothing()
    decode.acknowledge("r", until=time.monotonic() + request.seconds)
    assert decode.wait("r").received["r"].nbytes == 0
    assert decode.receiver.close()


def test_of_a_peer_that_falls_silent_nothing_more_is_posted() -> None:
    """What is posted already may land, and then the request ends with the cause."""
    bench = Bench(ReceiverOptions(descriptors_per_transfer=1))
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received

    post_slowly(bench)
    bench.receive(request_of(prefill, 2, 4))
    bench.executor.turn()
    posted = len(bench.fabric.flying)
    silent = Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "no answer")
    bench.executor.gone("p/1", silent)
    bench.turns()
    assert len(bench.fabric.flying) == posted == 3
    assert not bench.take().finished
    bench.fabric.land()
    bench.turns()
    assert bench.take().failed == {"r2": silent}


def test_a_handshake_that_ends_after_its_request_connects_nobody() -> None:
    bench = Bench()
    prefill = bench.prefill("p/1")
    bench.peers.hold = True
    left, other = bench.send(prefill), bench.send(prefill)
    bench.abandon(left, other)
    assert set(bench.take().failed) == {left, other}
    bench.peers.release()
    bench.turns()
    assert bench.connections.by_engine == {}
    assert bench.send(prefill) in bench.take().received


def test_a_request_that_wants_tokens_is_not_done_without_having_read_any() -> None:
    """Whatever has become of its connection: destroyed, or never there."""
    bench = Bench()
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    connection = bench.connections.by_engine["p/1"]
    connection.sources.clear()  # as if its agent was destroyed
    assert bench.send(prefill) in bench.take().failed
    bench = Bench()
    prefill = bench.prefill("p/1")
    bench.peers.hold = True
    waits = bench.send(prefill)
    bench.executor.dispatch(bench.executor.jobs[waits], Signal.CONNECTED)
    bench.turns()
    assert bench.take().failed[waits].reason is Reason.BACKEND_ERROR


def test_a_request_that_cannot_start_hides_no_other_of_its_batch() -> None:
    bench = Bench()
    prefill = bench.prefill("p/1")
    first, second = (request_of(prefill, seed, 1) for seed in (2, 3))
    connect = bench.executor.connect

    def broken(job: Job) -> None:
        if job.request is first:
            raise OSError("a fault that nobody thought of")
        connect(job)

    bench.executor.connect = broken
    bench.receive(first, second)
    bench.turns()
    results = bench.take()
    assert set(results.received) == {"r3"}
    assert results.failed["r2"].reason is Reason.BACKEND_ERROR
