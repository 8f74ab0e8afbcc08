"""Reads of KV that hang while the side channels live: they end, and they hold up nobody else."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import pairwise

import pytest
from transfer_rig import Prefill
from turn_by_turn import LEASE, Bench

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.testing.nixl import Behaviour, Transfer
from pdcluster_connector.transfer.agent_rebuild import (
    HEALTHY_SECONDS,
    RENEWAL_SECONDS,
    RETRY_SECONDS,
)
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.probing import BEHIND_KV_SECONDS, RECENT_SECONDS

DRAIN = 30.0
STALL = 300.0


@pytest.fixture
def bench() -> Bench:
    return Bench(ReceiverOptions(drain_deadline_seconds=DRAIN, transfer_stall_seconds=STALL))


def renewed(bench: Bench, seconds: float, *requests: str, every: float = 1.0) -> None:
    """Let time pass. Prefill acknowledges the leases of ``requests`` every so many seconds."""
    for _ in range(int(seconds / every)):
        bench.acknowledge(requests, bench.now + LEASE)
        bench.pass_time(every)


def agents(bench: Bench) -> set[str]:
    return {name for name in bench.fabric.agents if name.startswith("decode")}


def check_that_hangs(bench: Bench, prefill: Prefill) -> Future[ProbeResult]:
    """Start a check that never ends; all other reads go on as the bench has them."""
    as_before = bench.fabric.behave

    def behave(transfer: Transfer) -> Behaviour:
        if transfer.nbytes == 4096 and transfer.peer.startswith(prefill.engine_id):
            return Behaviour(hang=True)
        return as_before(transfer)

    bench.pass_time(RECENT_SECONDS)  # where KV has just landed, a check reads nothing
    bench.fabric.behave = behave
    future: Future[ProbeResult] = Future()
    bench.connections.probing.begin(prefill.metadata, future, check=True)
    bench.turns()
    return future


def test_a_read_that_hangs_ends_although_its_lease_is_renewed(bench: Bench) -> None:
    cut, well = bench.prefill("cut/1"), bench.prefill("well/1")
    bench.hanging.add(cut.engine_id)
    hung = bench.send(cut)
    renewed(bench, STALL - 1, hung)
    assert bench.send(well) in bench.take().received, "others go on meanwhile"
    assert hung in bench.executor.jobs
    renewed(bench, 1, hung)
    # It has failed. Its transfer may still write, so its blocks stay until the agent is destroyed.
    renewed(bench, DRAIN - 1, hung)
    bench.hanging.add(well.engine_id)
    slow = bench.send(well)
    before = agents(bench)
    assert not bench.take().finished
    renewed(bench, 1, hung, slow)
    assert not bench.take().finished
    bench.hanging.discard(well.engine_id)
    renewed(bench, HEALTHY_SECONDS, hung, slow)
    results = bench.take()
    assert results.failed[hung].reason is Reason.TRANSFER_STALLED
    assert results.failed[hung].message == (
        f"1 transfer under way, and none has landed for {STALL:.0f} s"
    )
    assert not before & agents(bench), "reported before its transfer could write no more"
    assert bench.fabric.land() == 0
    assert not bench.written(hung)
    assert slow in results.received, "it is read again over the new agent"
    assert bench.right(slow)


def test_a_read_and_a_check_that_hang_hold_up_no_other_peer(bench: Bench) -> None:
    cut, well = bench.prefill("cut/1"), bench.prefill("well/1")
    assert bench.send(well) in bench.take().received
    bench.hanging.add(cut.engine_id)
    hung = bench.send(cut)
    before = agents(bench)
    check = check_that_hangs(bench, cut)
    renewed(bench, BEHIND_KV_SECONDS, hung)
    failure = check.result(0).failure
    assert failure is not None
    assert failure.reason is Reason.TRANSFER_STALLED
    renewed(bench, DRAIN - 1, hung)
    assert bench.send(well) in bench.take().received
    renewed(bench, 1, hung)
    held = bench.send(well)
    assert not bench.take().finished, "held: the agent would be renewed now"
    renewed(bench, RENEWAL_SECONDS, hung)
    results = bench.take()
    assert results.finished == {held}
    assert held in results.received, "the present agent serves it"
    assert bench.right(held)
    for seconds in (1, RETRY_SECONDS - 2):
        renewed(bench, seconds, hung)
        assert bench.send(well) in bench.take().received, "not tried again at once"
    renewed(bench, 1, hung)
    held = bench.send(well)
    assert not bench.take().finished, "tried again"
    assert before == agents(bench), "a transfer that may be healthy was cut for a check"
    bench.fabric.land()  # also the read that hung: now nothing is under way
    bench.turns()
    assert bench.take().finished == {hung, held}
    assert not before & agents(bench), "renewed as soon as nothing runs on the agent"


def test_a_slow_receive_whose_transfers_land_one_by_one_is_done() -> None:
    bench = Bench(
        ReceiverOptions(
            drain_deadline_seconds=DRAIN, transfer_stall_seconds=STALL, descriptors_per_transfer=1
        )
    )
    slow = bench.prefill("slow/1")
    bench.hanging.add(slow.engine_id)
    request = bench.send(slow, blocks=4)
    transfers = list(bench.fabric.flying)
    assert len(transfers) == 8  # of four blocks in two layers
    for transfer in transfers:
        renewed(bench, STALL - 10, request, every=10.0)
        assert not bench.take().finished
        bench.fabric.land(transfer)
        bench.turns()
    results = bench.take()
    assert request in results.received, results.failed
    assert bench.right(request, blocks=4)


def cut_off(bench: Bench, prefill: Prefill, seconds: int, seen: set[str]) -> None:
    """Let time pass while a link's keeper probes a peer of which nothing comes."""
    future: Future[ProbeResult] | None = None
    for _ in range(seconds):
        if future is None or future.done():
            future = Future()
            bench.connections.probing.probe(prefill.metadata, future)
        bench.pass_time(1.0)
        seen |= agents(bench)


def test_a_peer_that_is_cut_off_for_an_hour_costs_few_agents(bench: Bench) -> None:
    cut = bench.prefill("cut/1")
    bench.fabric.behave = lambda transfer: Behaviour(hang=transfer.peer.startswith("cut"))
    seen: set[str] = set()
    cut_off(bench, cut, 60, seen)
    assert len(seen) == 2, "the first time soon"
    cut_off(bench, cut, 3600, seen)
    assert len(seen) < 20
    bench.fabric.mend()
    bench.fabric.land()
    bench.turns()
    bench.pass_time(3 * STALL)
    before = agents(bench)
    cut_off(bench, cut, 60, before)
    assert len(before) == 2, "later faults are as soon over as the first"


def renewals(bench: Bench, prefill: Prefill, seconds: int) -> list[float]:
    """Return how long after each agent the next one came while a keeper probes a peer."""
    came, known = [bench.now], agents(bench)
    future: Future[ProbeResult] | None = None
    for _ in range(seconds):
        if future is None or future.done():
            future = Future()
            bench.connections.probing.probe(prefill.metadata, future)
        bench.pass_time(1.0)
        if agents(bench) - known:
            came.append(bench.now)
            known |= agents(bench)
    return [later - sooner for sooner, later in pairwise(came)]


def test_each_pause_between_renewals_is_twice_as_long_as_the_one_before(bench: Bench) -> None:
    """Until they are as long as a read may hang."""
    cut = bench.prefill("cut/1")
    bench.fabric.behave = lambda transfer: Behaviour(hang=transfer.peer.startswith("cut"))
    _ = bench.connections.agent
    for _ in range(2):
        pauses = renewals(bench, cut, 1200)
        assert pauses[:2] == [41.0, 40.0], "a read of ten seconds that hangs for half a minute"
        assert pauses[2:7] == [60.0, 120.0, 240.0, 300.0, 300.0]
        bench.fabric.land()
        bench.pass_time(3 * STALL)  # then a later fault is as soon over as the first
