"""What hangs or is slow at one peer, or is given up by one client, fails no receive of others."""

from __future__ import annotations

from concurrent.futures import Future
from math import inf

import pytest
from transfer_rig import Prefill
from turn_by_turn import CACHE, LEASE, PROBE_SECONDS, Bench

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import NixlErrorKind
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.testing.nixl import Behaviour, Transfer
from pdcluster_connector.transfer.agent_rebuild import HEALTHY_SECONDS, RENEWAL_SECONDS
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.probing import BEHIND_KV_SECONDS, RECENT_SECONDS

DRAIN = 30.0
STALL = 300.0


@pytest.fixture
def bench() -> Bench:
    return Bench(ReceiverOptions(drain_deadline_seconds=DRAIN, transfer_stall_seconds=STALL))


def second(bench: Bench) -> dict[str, Failure | None]:
    """Let a second pass, renew all leases; return what ended, and how."""
    jobs = bench.executor.jobs.values()
    bench.acknowledge([job.request.request_id for job in jobs], bench.now + LEASE)
    bench.pass_time(1.0)
    results = bench.take()
    return {name: results.failed.get(name) for name in results.finished}


def of_kv(transfer: Transfer) -> bool:
    return not (len(transfer.copies) == 1 and transfer.nbytes in (8, 4096))


def land_first(bench: Bench, engine_id: str) -> None:
    """Let the transfer land that is first in the queue of a link."""
    queue = [one for one in bench.fabric.flying if one.peer.startswith(engine_id)]
    if queue:
        bench.fabric.land(queue[0])


def test_who_waits_for_a_connection_lives_on_when_another_who_waited_has_ended() -> None:
    bench = Bench(ReceiverOptions(drain_deadline_seconds=5.0))  # sooner than the warm-up's end
    cut, slow = bench.prefill("cut/1"), bench.prefill("slow/1")
    bench.hanging.add(cut.engine_id)
    hung = bench.send(cut)
    bench.fabric.behave = lambda transfer: Behaviour(hang=transfer.peer.startswith("slow/1"))
    waiting = [bench.send(slow) for _ in range(3)]  # for a warm-up
    bench.abandon(waiting[0], hung)
    bench.fabric.behave = bench._behave
    ended: dict[str, Failure | None] = {}
    for _ in range(7):
        ended |= second(bench)
    assert set(ended) == {hung, *waiting}
    assert [ended[one] for one in waiting[1:]] == [None, None]


def test_a_queue_that_moves_is_no_stall(bench: Bench) -> None:
    slow = bench.prefill("slow/1")
    bench.hanging.add(slow.engine_id)
    sent = [bench.send(slow) for _ in range(12)]
    ended: dict[str, Failure | None] = {}
    for passed in range(600):
        if passed % 40 == 39:
            land_first(bench, "slow/1")
        ended |= second(bench)
    assert ended == dict.fromkeys(sent)


def test_what_waited_in_a_queue_that_moved_is_not_stalled_after_a_rebuild(bench: Bench) -> None:
    cut, slow = bench.prefill("cut/1"), bench.prefill("slow/1")
    bench.hanging |= {cut.engine_id, slow.engine_id}
    sent = [bench.send(slow) for _ in range(12)]
    hung = bench.send(cut)
    ended: dict[str, Failure | None] = {}
    for passed in range(600):
        if passed % 40 == 39:
            land_first(bench, "slow/1")
        if passed == int(STALL - DRAIN) - 2:  # so that the agent is destroyed at 299 s
            bench.abandon(hung)
        ended |= second(bench)
    assert {name: ended[name] for name in sent} == dict.fromkeys(sent)


class Counted(dict):  # type: ignore[type-arg]
    """Counts how many of its items are looked at."""

    looked = 0

    def items(self):  # type: ignore[no-untyped-def]
        self.looked += len(self)
        return super().items()

    def __getitem__(self, key: int) -> object:
        self.looked += 1
        return super().__getitem__(key)


def test_many_that_stall_together_do_not_hold_up_the_thread() -> None:
    """Each looks at its own transfers, not at those of all: 2,000 receives took seconds."""
    bench = Bench(ReceiverOptions(drain_deadline_seconds=1e6, descriptors_per_transfer=1))
    cut = bench.prefill("cut/1")
    bench.hanging.add(cut.engine_id)
    sent = [bench.send(cut) for _ in range(28)]
    transfers = len(bench.fabric.flying)
    assert transfers == 2 * len(sent)  # one for each layer
    counted = bench.executor.transfers._under_way = Counted(bench.executor.transfers._under_way)
    bench.acknowledge(sent, bench.now + 2 * STALL)
    bench.now += STALL
    bench.executor.tick()
    assert all(job.machine.failure is not None for job in bench.executor.jobs.values())
    assert counted.looked <= 4 * transfers


def test_each_receive_sees_its_own_deadline(bench: Bench) -> None:
    slow = bench.prefill("slow/1")
    bench.hanging.add(slow.engine_id)
    first, second = bench.send(slow), bench.send(slow)
    assert bench.executor.due == bench.now + LEASE
    bench.acknowledge([first], bench.now + 3 * LEASE)
    bench.acknowledge([second], bench.now + 2 * LEASE)
    for at, open_receives in ((1.0, 2), (2.0, 1), (3.0, 0)):
        bench.now += LEASE
        bench.executor.tick()
        going_on = [job.machine.failure is None for job in bench.executor.jobs.values()]
        assert sum(going_on) == open_receives, at
    assert bench.executor.due == bench.now + DRAIN, "of the first one's quarantine"
    bench.executor.rebuild(Failure(Reason.BACKEND_ERROR, "the end"), final=True)
    bench.now += DRAIN
    bench.executor.tick()
    assert bench.executor.due == inf


def test_a_transfer_that_later_ones_overtake_stalls(bench: Bench) -> None:
    prefill = bench.prefill("cut/1")
    bench.hanging.add(prefill.engine_id)
    hung = bench.send(prefill)
    bench.hanging.clear()
    ended: dict[str, Failure | None] = {}
    for passed in range(int(STALL + DRAIN + HEALTHY_SECONDS)):
        if passed % 40 == 0:
            bench.sent = 5
            bench.send(prefill)
        ended |= second(bench)
    failure = ended[hung]
    assert failure is not None
    assert failure.reason is Reason.TRANSFER_STALLED


def test_clients_that_hang_up_cost_others_nothing_on_a_slow_link(bench: Bench) -> None:
    slow = bench.prefill("slow/1")
    bench.hanging.add(slow.engine_id)
    kept = [bench.send(slow) for _ in range(5)]
    left = [bench.send(slow) for _ in range(3)]
    agents, ended = set(bench.fabric.agents), dict[str, Failure | None]()
    for passed in range(400):
        if passed % 35 == 5 and left:
            bench.abandon(left.pop())
        if passed % 29 == 28:
            land_first(bench, "slow/1")
        ended |= second(bench)
    assert {name: ended[name] for name in kept} == dict.fromkeys(kept)
    assert agents == set(bench.fabric.agents), "an agent was destroyed though its link moves"


def test_a_slow_read_is_read_again_however_often_another_peer_hangs(bench: Bench) -> None:
    cut, slow = bench.prefill("cut/1"), bench.prefill("slow/1")
    bench.hanging |= {cut.engine_id, slow.engine_id}
    victim = bench.send(slow)
    bench.sent = 9
    for _ in range(6):
        bench.abandon(bench.send(cut))
        for _ in range(int(DRAIN + HEALTHY_SECONDS) + 1):
            assert victim not in second(bench)
    bench.hanging.discard(slow.engine_id)
    bench.abandon(bench.send(cut))
    ended: dict[str, Failure | None] = {}
    for _ in range(int(DRAIN + HEALTHY_SECONDS) + 1):
        ended |= second(bench)
    assert ended[victim] is None


def hung_check(bench: Bench, prefill: Prefill) -> None:
    """Let one check of a peer hang; its KV and later checks are well."""
    bench.pass_time(RECENT_SECONDS)
    before = bench.fabric.behave
    bench.fabric.behave = lambda transfer: (
        Behaviour(hang=True) if transfer.peer.startswith(prefill.engine_id) else before(transfer)
    )
    bench.connections.probing.begin(prefill.metadata, Future(), check=True)
    bench.turns()
    bench.fabric.behave = before


def test_rebuilds_for_others_do_not_make_a_read_that_hangs_last(bench: Bench) -> None:
    cut = bench.prefill("cut/1")
    bench.hanging.add(cut.engine_id)
    hung = bench.send(cut)
    ended: dict[str, Failure | None] = {}
    for passed in range(int(STALL + 2 * DRAIN)):
        if passed % 60 == 10:
            bench.sent = 9
            other = bench.send(cut)
        if passed % 60 == 30:
            bench.abandon(other)
        ended |= second(bench)
    failure = ended[hung]
    assert failure is not None
    assert failure.reason is Reason.TRANSFER_STALLED


@pytest.mark.parametrize("times", [1, 2])
def test_reads_that_overlap_do_not_put_a_renewal_off_for_ever(bench: Bench, times: int) -> None:
    checked, busy = bench.prefill("checked/1"), bench.prefill("busy/1")
    assert bench.send(checked) in bench.take().received
    assert bench.send(busy) in bench.take().received
    bench.hanging.add(busy.engine_id)
    for attempt in range(times):
        hung_check(bench, checked)
        agents = set(bench.fabric.agents)
        failures: list[Failure] = []
        born: dict[Transfer, float] = {}
        seconds = (STALL + DRAIN) * (attempt + 1) + 2 * BEHIND_KV_SECONDS
        for passed in range(int(seconds)):
            if passed % 4 == 0:
                bench.sent = 10 + passed // 4 % 12
                bench.send(busy)
            for transfer in bench.fabric.flying:
                if of_kv(transfer) and transfer.peer.startswith("busy/1"):
                    born.setdefault(transfer, bench.now)
            for transfer in [one for one in bench.fabric.flying if one in born]:
                if bench.now - born[transfer] >= 10:
                    bench.fabric.land(transfer)
            failures += [why for why in second(bench).values() if why is not None]
            if passed < STALL * (attempt + 1):
                assert agents == set(bench.fabric.agents), "each time twice as late"
        assert agents != set(bench.fabric.agents)
        assert failures == []
    bench.sent = 3
    assert bench.send(checked) in (bench.take().received or second(bench))


def test_a_transfer_that_nobody_can_observe_holds_others_for_seconds(bench: Bench) -> None:
    lost, slow, well = (bench.prefill(name) for name in ("lost/1", "slow/1", "well/1"))
    assert bench.send(well) in bench.take().received
    bench.hanging.add(slow.engine_id)
    read = bench.send(slow)
    as_before = bench.fabric.behave
    bench.fabric.behave = lambda transfer: (
        Behaviour(poll_error=NixlErrorKind.LOST)
        if transfer.peer.startswith("lost/1") and of_kv(transfer)
        else as_before(transfer)
    )
    bench.send(lost)
    held = bench.send(well)
    bench.hanging.clear()
    ended: dict[str, Failure | None] = {}
    for _ in range(int(RENEWAL_SECONDS + HEALTHY_SECONDS) + 1):
        ended |= second(bench)
    assert ended[held] is None
    assert ended[read] is None, "it was read again"


def test_a_check_waits_behind_slow_kv(bench: Bench) -> None:
    slow = bench.prefill("slow/1")
    assert bench.send(slow) in bench.take().received
    bench.pass_time(RECENT_SECONDS)
    bench.fabric.behave = lambda transfer: Behaviour(hang=transfer.nbytes != 8)
    big = bench.send(slow)
    future: Future[ProbeResult] = Future()
    bench.connections.probing.begin(slow.metadata, future, check=True)
    for _ in range(int(BEHIND_KV_SECONDS) - 1):
        assert second(bench) == {}
    assert not future.done()
    bench.fabric.land()
    assert second(bench) == {big: None}
    assert future.result(0).failure is None


def test_a_check_that_waits_behind_kv_that_hangs_fails(bench: Bench) -> None:
    slow = bench.prefill("slow/1")
    assert bench.send(slow) in bench.take().received
    bench.pass_time(RECENT_SECONDS)
    bench.fabric.behave = lambda _: Behaviour(hang=True)
    bench.send(slow)
    future: Future[ProbeResult] = Future()
    bench.connections.probing.begin(slow.metadata, future, check=True)
    for _ in range(int(BEHIND_KV_SECONDS) + 1):
        second(bench)
    failure = future.result(0).failure
    assert failure is not None
    assert failure.reason is Reason.TRANSFER_STALLED


def test_the_time_of_a_check_begins_with_its_read() -> None:
    bench = Bench()
    bench.fabric.behave = lambda _: Behaviour(polls=1)  # not done at the first look
    checked, other = Prefill(bench.fabric, "checked/1", tensor=2, **CACHE), bench.prefill("new/1")
    bench.peers.table["checked/1"] = checked.metadata
    assert bench.send(checked) in bench.take().received
    bench.pass_time(10)
    future: Future[ProbeResult] = Future()
    bench.connections.probing.begin(checked.metadata, future, check=True)
    bench.now += 6.0  # a call of NIXL for another peer took so long
    bench.connections.probing.begin(other.metadata, Future(), check=True)
    bench.turns()
    assert future.result(0).failure is None


def test_a_probe_waits_for_no_other_peer_that_is_cut_off(bench: Bench) -> None:
    bench.fabric.behave = lambda transfer: Behaviour(hang=transfer.peer.startswith("cut"))
    cut = [bench.probe(bench.prefill(f"cut{number}/1")) for number in range(20)]
    well = bench.probe(bench.prefill("well/1"))
    assert well.result(0).failure is None
    bench.pass_time(PROBE_SECONDS)
    failures = [future.result(0).failure for future in cut]
    assert {failure and failure.reason for failure in failures} == {Reason.TRANSFER_STALLED}


def test_a_probe_that_nobody_waits_for_opens_no_connection(bench: Bench) -> None:
    future: Future[ProbeResult] = Future()
    bench.connections.probing.probe(bench.prefill("left/1").metadata, future)
    assert future.cancel()
    bench.turns()
    assert not bench.connections.by_engine
    assert not bench.executor.busy


def test_a_late_check_of_an_incarnation_that_is_gone_costs_its_successor_nothing(
    bench: Bench,
) -> None:
    before, after = bench.prefill("ns.c.prefill.r.0/1"), bench.prefill("ns.c.prefill.r.0/2")
    assert bench.send(before) in bench.take().received
    assert bench.send(after) in bench.take().received
    del bench.peers.table[before.engine_id]
    bench.executor.gone(before.engine_id, Failure(Reason.PEER_RESTARTED, "its place is taken"))
    bench.hanging.add(after.engine_id)
    slow = bench.send(after)
    bench.hanging.clear()
    future: Future[ProbeResult] = Future()
    bench.connections.probing.begin(before.metadata, future, check=True)
    bench.turns()
    failure = future.result(0).failure
    assert failure is not None
    assert failure.reason is Reason.SIDE_CHANNEL_UNREACHABLE
    assert set(bench.connections.by_engine) == {after.engine_id}
    assert bench.send(after) in bench.take().received
    bench.fabric.land()
    bench.turns()
    assert slow in bench.take().received


@pytest.mark.parametrize("reason", [Reason.SIDE_CHANNEL_UNREACHABLE, Reason.AUTHENTICATION_FAILED])
def test_a_connection_heals_when_the_peer_answers_again(bench: Bench, reason: Reason) -> None:
    prefill = bench.prefill("x/1")
    assert bench.send(prefill) in bench.take().received
    bench.hanging.add(prefill.engine_id)
    slow = bench.send(prefill)
    bench.hanging.clear()
    bench.executor.gone("x/1", Failure(reason, "a hiccup"))
    bench.turns()
    assert bench.send(prefill) in bench.take().received
    assert slow in bench.executor.jobs


def test_what_waits_for_the_claim_of_a_peer_that_refuses_connections_fails_at_once(
    bench: Bench,
) -> None:
    """Its process has ended: it will acknowledge no claim, however long the lease stands."""
    prefill = bench.prefill("x/1")
    assert bench.send(prefill) in bench.take().received
    waits = bench.send(prefill, claimed=False)
    refused = Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "connection refused", dead=True)
    assert not bench.take().finished
    bench.executor.gone("x/1", refused)
    assert bench.take().failed == {waits: refused}
    assert bench.send(prefill) in bench.take().received


def test_a_probe_that_fails_in_an_unforeseen_way_ends_with_its_agent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = bench.prefill("x/1")
    assert bench.send(prefill) in bench.take().received
    bench.pass_time(RECENT_SECONDS)
    agents = set(bench.fabric.agents)
    with monkeypatch.context() as patch:
        patch.setattr(
            "pdcluster_connector.transfer.probing.serving_agent.describe_difference",
            lambda *_: 1 / 0,
        )
        future: Future[ProbeResult] = Future()
        bench.connections.probing.begin(prefill.metadata, future, check=True)
        bench.turns()
    failure = future.result(0).failure
    assert failure is not None
    assert "ZeroDivisionError" in failure.message
    for _ in range(int(DRAIN) + 6):
        second(bench)
    assert agents != set(bench.fabric.agents)
    assert bench.send(prefill) in bench.take().received


def test_a_check_is_no_answer_of_a_peer_that_failed_to_authenticate(bench: Bench) -> None:
    prefill = bench.prefill("x/1")
    assert bench.send(prefill) in bench.take().received
    bench.hanging.add(prefill.engine_id)
    bench.send(prefill)
    bench.hanging.clear()
    failure = Failure(Reason.AUTHENTICATION_FAILED, "no peer of ours")
    bench.executor.gone("x/1", failure)
    future: Future[ProbeResult] = Future()
    bench.connections.probing.begin(prefill.metadata, future, check=True)
    bench.turns()
    assert future.result(0).failure == failure
    bench.peers.table["x/1"] = failure
    refused = bench.send(prefill)
    assert bench.take().failed == {refused: failure}
