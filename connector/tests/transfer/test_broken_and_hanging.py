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
        return Behaviour() if small or not transfer.peer.startswith("p/1") else behaviour

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
