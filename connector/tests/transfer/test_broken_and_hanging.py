"""A connection that NIXL broke cannot close while a read over it hangs: who waits goes on."""

from __future__ import annotations

from itertools import pairwise

import pytest
from left_open import open_handles
from transfer_rig import Prefill
from turn_by_turn import LEASE, Bench

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import NixlErrorKind
from pdcluster_connector.testing.nixl import Behaviour, Transfer
from pdcluster_connector.transfer.agent_rebuild import HEALTHY_SECONDS
from pdcluster_connector.transfer.options import ReceiverOptions

DRAIN, STALL = 30.0, 300.0
TURN = Behaviour(hang=True, poll_error=NixlErrorKind.TRANSPORT)


def of_kv(bench: Bench, behaviour: Behaviour) -> None:
    def behave(transfer: Transfer) -> Behaviour:
        small = len(transfer.copies) == 1 and transfer.nbytes in (8, 4096)
        is_other = small or not transfer.peer.startswith("p/1")
        return bench._behave(transfer) if is_other else behaviour

    bench.fabric.behave = behave


def broken_while_one_hangs(bench: Bench, prefill: Prefill) -> str:
    """Have a connection that NIXL broke, and over which a read hangs; returns its request."""
    of_kv(bench, Behaviour(hang=True))
    hangs = bench.send(prefill)
    of_kv(bench, TURN)
    broken = bench.send(prefill)
    assert bench.take().failed[broken].reason is Reason.BACKEND_ERROR
    of_kv(bench, Behaviour())
    return hangs


@pytest.fixture
def bench() -> Bench:
    return Bench(ReceiverOptions(drain_deadline_seconds=DRAIN, transfer_stall_seconds=STALL))


def pass_time(bench: Bench, seconds: float, *renewed: str) -> None:
    for _ in range(int(seconds)):
        bench.acknowledge(renewed, bench.now + LEASE)
        bench.pass_time(1.0)


def test_who_waits_for_a_broken_connection_does_not_wait_until_the_stall_is_noticed(
    bench: Bench,
) -> None:
    prefill, other = bench.prefill("p/1"), bench.prefill("q/1")
    assert bench.send(prefill) in bench.take().received
    hangs = broken_while_one_hangs(bench, prefill)
    waits = bench.send(prefill)
    assert bench.send(other) in bench.take().received
    pass_time(bench, DRAIN - 1.0, hangs, waits)
    assert not bench.take().finished
    pass_time(bench, 1.0 + HEALTHY_SECONDS, hangs, waits)
    assert set(bench.take().received) == {hangs, waits}
    assert bench.right(hangs)
    assert bench.right(waits)
    assert bench.send(prefill) in bench.take().received
    assert (open_handles(bench.fabric), bench.connections.closing) == (0, {})


def test_nobody_is_cut_for_a_broken_connection_that_nobody_waits_for(bench: Bench) -> None:
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    agents = set(bench.fabric.agents)
    hangs = broken_while_one_hangs(bench, prefill)
    pass_time(bench, STALL - 1.0, hangs)
    assert set(bench.fabric.agents) == agents
    bench.fabric.land()
    bench.turns()
    assert hangs in bench.take().received


@pytest.mark.parametrize("how", ["abandoned", "given up"])
def test_nobody_is_cut_for_who_waited_and_has_ended(bench: Bench, how: str) -> None:
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    agents = set(bench.fabric.agents)
    hangs = broken_while_one_hangs(bench, prefill)
    waits = bench.send(prefill, claimed=how == "abandoned")
    assert not bench.take().finished
    if how == "abandoned":
        bench.abandon(waits)
    else:
        bench.acknowledge([waits], bench.now)
    bench.turns()
    assert waits in bench.take().finished
    pass_time(bench, STALL / 2, hangs)
    assert set(bench.fabric.agents) == agents
    bench.fabric.land()
    bench.turns()
    assert hangs in bench.take().received


def test_kv_that_lands_over_a_broken_connection_is_not_cut(bench: Bench) -> None:
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    agents = set(bench.fabric.agents)
    of_kv(bench, Behaviour(hang=True))
    first, second = bench.send(prefill), broken_while_one_hangs(bench, prefill)
    waits = bench.send(prefill)
    pass_time(bench, DRAIN - 1.0, first, second, waits)
    bench.fabric.land(next(one for one in bench.fabric.flying if len(one.copies) > 1))
    bench.turns()
    assert len(bench.take().received) == 1
    pass_time(bench, DRAIN - 1.0, first, second, waits)
    assert set(bench.fabric.agents) == agents
    bench.fabric.land()
    bench.turns()
    assert {second, waits} & set(bench.take().received) == {second, waits}


def test_such_cuts_leave_slow_reads_time_but_come_in_time_for_who_waits(bench: Bench) -> None:
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    cuts = []
    for _ in range(3):
        agents = set(bench.fabric.agents)
        hangs = broken_while_one_hangs(bench, prefill)
        waits = bench.send(prefill)
        while set(bench.fabric.agents) == agents:
            pass_time(bench, 1.0, hangs, waits)
        cuts.append(bench.now)
        assert set(bench.take().received) == {hangs, waits}
    assert [after - before for before, after in pairwise(cuts)] == [STALL / 2, STALL / 2]
    pass_time(bench, STALL / 2)
    agents, hangs = set(bench.fabric.agents), broken_while_one_hangs(bench, prefill)
    waits = bench.send(prefill)
    pass_time(bench, DRAIN + HEALTHY_SECONDS, hangs, waits)
    assert set(bench.fabric.agents) != agents


def test_a_peer_that_fails_again_and_again_cuts_a_slow_read_of_another_once(bench: Bench) -> None:
    prefill, other = bench.prefill("p/1"), bench.prefill("q/1")
    for one in (prefill, other):
        assert bench.send(one) in bench.take().received
    bench.hanging.add(other.engine_id)
    slow, began, agents = bench.send(other), bench.now, set(bench.fabric.agents)
    cuts, live, received = 0, set[str](), set[str]()
    while slow not in received or live:
        if not live:
            live = {broken_while_one_hangs(bench, prefill), bench.send(prefill)}
        pass_time(bench, 1.0, slow, *live)
        if set(bench.fabric.agents) != agents:
            cuts, began, agents = cuts + 1, bench.now, set(bench.fabric.agents)
            assert cuts == 1 or slow in received, "its read takes 200 s, and was cut twice"
        if bench.now == began + 200.0:
            for one in [one for one in bench.fabric.flying if one.peer.startswith("q/1")]:
                bench.fabric.land(one)
            bench.turns()
        results = bench.take()
        assert not results.failed
        received |= set(results.received)
        live -= received
    assert cuts == 2, "who waits for the other peer was served, too"
    assert bench.right(slow)


def test_reads_that_were_cut_and_hang_over_the_next_broken_connection_are_cut_again(
    bench: Bench,
) -> None:
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    agents = set(bench.fabric.agents)
    hangs = broken_while_one_hangs(bench, prefill)
    live = [hangs, bench.send(prefill)]
    of_kv(bench, Behaviour(hang=True))
    while set(bench.fabric.agents) == agents:
        pass_time(bench, 1.0, *live)
    cut_at, agents = bench.now, set(bench.fabric.agents)
    of_kv(bench, TURN)
    broken = bench.send(prefill)
    assert set(bench.take().failed) == {broken}
    of_kv(bench, Behaviour())
    live.append(bench.send(prefill))
    while set(bench.fabric.agents) == agents:
        pass_time(bench, 1.0, *live)
    assert bench.now == cut_at + STALL / 2
    assert set(bench.take().received) == set(live)
