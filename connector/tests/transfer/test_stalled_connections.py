"""A probe that does not land in time proves nothing: what waits goes on, only what is new fails."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from left_open import open_handles
from transfer_rig import Prefill
from turn_by_turn import LEASE, PROBE_SECONDS, Bench

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.testing.nixl import Behaviour, Transfer
from pdcluster_connector.transfer.agent_rebuild import HEALTHY_SECONDS, RENEWAL_SECONDS
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.probing import RECENT_SECONDS

CHECK = ReceiverOptions().check_seconds
DRAIN = 30.0
STALL = 300.0


@pytest.fixture
def bench() -> Bench:
    return Bench(
        ReceiverOptions(
            drain_deadline_seconds=DRAIN, transfer_stall_seconds=STALL, descriptors_per_transfer=1
        )
    )


def small(transfer: Transfer) -> bool:
    return len(transfer.copies) == 1 and transfer.nbytes == 4096


def check(bench: Bench, prefill: Prefill) -> Future[ProbeResult]:
    future: Future[ProbeResult] = Future()
    bench.connections.probing.begin(prefill.metadata, future, check=True)
    bench.turns()
    return future


def stalled(bench: Bench) -> tuple[Prefill, Failure]:
    """Have a connection whose check hangs; KV would land."""
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    bench.pass_time(RECENT_SECONDS)
    bench.fabric.behave = lambda transfer: Behaviour(hang=small(transfer))
    checked = check(bench, prefill)
    bench.pass_time(CHECK)
    failure = checked.result(0).failure
    assert failure is not None
    assert failure.reason is Reason.TRANSFER_STALLED
    return prefill, failure


def warming_up(bench: Bench) -> tuple[Prefill, str, Failure]:
    """Have a request wait for a warm-up that is late."""
    prefill = bench.prefill("p/1")
    bench.fabric.behave = lambda _: Behaviour(hang=True)
    waits = bench.send(prefill)
    probed = bench.probe(prefill)
    bench.pass_time(PROBE_SECONDS)
    failure = probed.result(0).failure
    assert failure is not None
    assert failure.reason is Reason.TRANSFER_STALLED
    assert not bench.take().finished
    return prefill, waits, failure


def test_what_is_new_fails_at_once_until_the_read_has_landed(bench: Bench) -> None:
    prefill, failure = stalled(bench)
    connection = bench.connections.by_engine["p/1"]
    new = bench.send(prefill)
    assert bench.take().failed == {new: failure}
    assert check(bench, prefill).result(0).failure == failure
    assert bench.probe(prefill).result(0).failure == failure
    assert bench.peers.forgotten == [], "the peer is watched as before"
    bench.fabric.land()
    bench.turns()
    bench.fabric.behave = lambda _: Behaviour()
    assert bench.send(prefill) in bench.take().received
    assert bench.connections.by_engine["p/1"] is connection
    assert bench.probe(prefill).result(0).failure is None
    assert (open_handles(bench.fabric), connection.transfers) == (0, 0)


def test_reads_that_were_not_yet_posted_are_posted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Posting what many requests want takes longer than a check may."""
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    bench.pass_time(RECENT_SECONDS)
    bench.fabric.behave = lambda transfer: Behaviour(hang=small(transfer))
    checked = check(bench, prefill)
    with monkeypatch.context() as patch:
        patch.setattr(bench.executor.transfers, "post_some", lambda: False)
        waits = bench.send(prefill, blocks=4)
        bench.pass_time(CHECK)
        assert checked.result(0).failure is not None
    bench.turns()
    assert waits in bench.take().received
    assert bench.right(waits, blocks=4)


def test_kv_that_lands_shows_that_a_connection_lives_although_its_check_is_lost(
    bench: Bench,
) -> None:
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    bench.pass_time(RECENT_SECONDS)
    bench.fabric.behave = lambda _: Behaviour(hang=True)
    check(bench, prefill)
    waits = bench.send(prefill)
    bench.pass_time(DRAIN)
    new = bench.send(prefill)
    assert set(bench.take().failed) == {new}
    bench.pass_time(1.0)
    for transfer in list(bench.fabric.flying):
        if not small(transfer):
            bench.fabric.land(transfer)
    bench.fabric.behave = lambda _: Behaviour()
    bench.turns()
    assert waits in bench.take().received
    assert bench.send(prefill) in bench.take().received

    bench.fabric.behave = lambda _: Behaviour(hang=True)
    bench.pass_time(RECENT_SECONDS)
    check(bench, prefill)  # the lost one must not hide what this one finds
    bench.pass_time(CHECK)
    bench.pass_time(1.0)
    assert bench.send(prefill) in bench.take().failed


def test_who_waits_for_a_warm_up_that_is_late_goes_on_with_it(bench: Bench) -> None:
    prefill, waits, failure = warming_up(bench)
    new = bench.send(prefill)
    assert bench.take().failed == {new: failure}
    bench.fabric.behave = lambda _: Behaviour()
    bench.pass_time(DRAIN - 1.0)
    assert not bench.take().finished
    bench.fabric.land()
    bench.turns()
    assert waits in bench.take().received
    assert bench.right(waits)


@pytest.mark.parametrize("behaviour", ["corrupt", "error"])
def test_a_late_warm_up_that_fails_ends_who_waits(bench: Bench, behaviour: str) -> None:
    _, waits, _ = warming_up(bench)
    if behaviour == "corrupt":
        for transfer in bench.fabric.flying:
            transfer.behaviour = Behaviour(hang=True, corrupt=True)
        bench.fabric.land()
    else:
        bench.fabric.kill("p/1")
    bench.turns()
    why = bench.take().failed[waits].reason
    assert why is (Reason.PROBE_CORRUPTED if behaviour == "corrupt" else Reason.BACKEND_ERROR)
    assert bench.peers.forgotten == ["p/1"]
    assert bench.connections.by_engine == {}
    assert not bench.executor.busy


def test_who_waits_until_the_lease_ends_hears_what_it_has_waited_for(bench: Bench) -> None:
    _, waits, failure = warming_up(bench)
    bench.pass_time(LEASE - PROBE_SECONDS + 1.0)
    assert bench.take().failed == {waits: failure}


def test_a_lease_that_is_renewed_lets_nobody_wait_for_ever(bench: Bench) -> None:
    _, waits, _ = warming_up(bench)
    for _ in range(int(STALL)):
        bench.acknowledge([waits], bench.now + LEASE)
        bench.pass_time(1.0)
    assert bench.take().failed[waits].reason is Reason.TRANSFER_STALLED


@pytest.mark.parametrize(
    "reason",
    [Reason.PEER_RESTARTED, Reason.SIDE_CHANNEL_UNREACHABLE, Reason.AUTHENTICATION_FAILED],
)
def test_evidence_ends_who_waits_for_a_warm_up_at_once(bench: Bench, reason: Reason) -> None:
    _, waits, _ = warming_up(bench)
    gone = Failure(reason, "connection refused, for example")
    bench.executor.gone("p/1", gone)
    assert bench.take().failed == {waits: gone}


def test_two_living_starts_of_one_engine_end_nothing_of_each_other(bench: Bench) -> None:
    """Which of them is gone is for the peer book to find out (``test_peer_liveness.py``)."""
    starts = bench.prefill("ns.c.prefill.r.0/1"), bench.prefill("ns.c.prefill.r.0/2")
    bench.hanging |= {start.engine_id for start in starts}
    slow = {bench.send(start) for start in starts}
    bench.hanging.clear()
    for start in starts * 2:
        assert bench.send(start) in bench.take().received
    bench.fabric.land()
    bench.turns()
    assert set(bench.take().received) == slow


def test_a_new_agent_lets_new_requests_in_when_its_warm_up_has_landed(bench: Bench) -> None:
    """What waits is tried again over it; of what is new, none waits behind what still hangs."""
    prefill, waits, _ = warming_up(bench)
    agents = set(bench.fabric.agents)
    bench.pass_time(DRAIN)
    assert agents != set(bench.fabric.agents), "renewed"
    bench.pass_time(RENEWAL_SECONDS + HEALTHY_SECONDS)
    new = bench.send(prefill)
    assert [why.reason for why in bench.take().failed.values()] == [Reason.TRANSFER_STALLED]
    assert new not in bench.executor.jobs
    bench.fabric.behave = lambda _: Behaviour()
    bench.fabric.land()
    bench.turns()
    assert waits in bench.take().received
    assert bench.send(prefill) in bench.take().received


@pytest.mark.parametrize("rebuilds", [1, 2, 3])
def test_a_stall_outlasts_every_rebuild_that_another_peer_causes(
    bench: Bench, rebuilds: int
) -> None:
    """Nobody asks for the stalled peer in between: neither a request, nor a check."""
    prefill, failure = stalled(bench)
    other = bench.prefill("q/1")
    bench.fabric.behave = lambda _: Behaviour()
    for _ in range(rebuilds):
        agents = set(bench.fabric.agents)
        assert bench.send(other) in bench.take().received
        bench.fabric.behave = lambda _: Behaviour(hang=True)
        hangs = bench.send(other)
        bench.abandon(hangs)
        bench.pass_time(DRAIN)
        bench.pass_time(HEALTHY_SECONDS)
        assert hangs in bench.take().finished
        assert agents != set(bench.fabric.agents), "rebuilt"
        bench.fabric.behave = lambda transfer: Behaviour(hang=transfer.peer.startswith("p/1"))
        bench.turns()
    new = bench.send(prefill)
    assert bench.take().failed == {new: failure}
    assert bench.send(other) in bench.take().received, "no other peer pays for it"
    bench.fabric.behave = lambda _: Behaviour()
    bench.fabric.land()
    bench.turns()
    assert bench.send(prefill) in bench.take().received
    assert open_handles(bench.fabric) == 0


def test_a_rebuild_opens_no_connection_to_a_peer_that_is_gone(bench: Bench) -> None:
    stalled(bench)
    bench.executor.gone("p/1", Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "refused", dead=True))
    bench.executor.rebuild(Failure(Reason.BACKEND_ERROR, "the thread failed"))
    assert bench.connections.by_engine == {}


def test_a_peer_that_cannot_be_opened_again_costs_a_rebuild_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, _ = stalled(bench)
    with monkeypatch.context() as patch:
        patch.setattr(bench.connections, "open", lambda _: {}["not there"])
        bench.executor.rebuild(Failure(Reason.BACKEND_ERROR, "the thread failed"))
    assert bench.connections.by_engine == {}
    bench.fabric.behave = lambda _: Behaviour()
    assert bench.send(prefill) in bench.take().received
