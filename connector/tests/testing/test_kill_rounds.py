"""Engines that are killed and started again and again leave nothing behind in the others."""

from __future__ import annotations

import itertools

import pytest
from fault_world import World

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.transfer.receive_machine import State

STATES = (State.NEW, State.HANDSHAKE, State.POSTED, State.FENCE)
VICTIMS = ("P1", "D1")
# A rank that asks a dead peer and its successor at the same time keeps both HTTP connections for
# later: one more for a pair of engines, of which this process holds four ends, relay included.
LATE = {Reason.LEASE_EXPIRED, Reason.TRANSFER_STALLED}
IDLE = {"file descriptors": 16}


def one_round(world: World, victim: str, state: State) -> bool:
    """Kill the victim while a receive stands in ``state``; return whether it stood there."""
    reached = True
    if state is State.HANDSHAKE:
        world.kill("P1")  # with the new one nobody has shaken hands yet
    survivor = world.decodes["D1"] if victim == "P1" else None
    if state is State.NEW:
        hold, busy = None, world.busy("D1")
    else:
        hold, busy = world.hold(state), None
    request_id = world.send("P1", "D1")
    if busy is not None:
        if victim == "D1":
            busy.set()
        world.kill(victim)
        busy.set()
    else:
        assert hold is not None
        fetch = world.decodes["D1"].fetches[request_id]
        # It has ended already if the machine stalled for as long as the lease lasts.
        assert world.run(lambda: world.stands("D1", request_id, state) or fetch.ended), state
        reached = world.stands("D1", request_id, state)
        world.kill(victim)
        hold.release()
    if survivor is not None:
        assert world.run(lambda: survivor.fetches[request_id].ended)
        assert survivor.fetches[request_id].failure is not None or survivor.right(request_id)
        survivor.forget(request_id)
    well(world)
    return reached


def well(world: World) -> None:
    """Every pair of engines works."""
    sent = [(prefill, decode, world.send(prefill, decode)) for prefill, decode in world.relays]
    for prefill, decode, request_id in sent:
        engine = world.decodes[decode]
        assert world.run(lambda engine=engine, r=request_id: engine.fetches[r].ended)
        failure = engine.fetches[request_id].failure
        if failure is not None and failure.reason in LATE and len(sent) < 40:
            sent.append((prefill, decode, world.send(prefill, decode)))  # the machine stalled
        else:
            assert failure is None, engine.fetches[request_id]
            assert engine.right(request_id)
        engine.forget(request_id)
    world.dead.clear()


@pytest.mark.parametrize("rounds", [20, pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_rounds_of_kill_and_restart_leave_nothing_behind(rounds: int) -> None:
    # No lease ends here but that of a decode engine that died; at the end, the test waits for it.
    world = World(lease_seconds=3.0)
    try:
        well(world)
        kinds = list(itertools.product(VICTIMS, STATES))
        # What is made once and kept is there after a few rounds. Those of P1 leave no lease behind.
        for victim, state in kinds if rounds > 100 else kinds[: len(STATES)]:
            one_round(world, victim, state)
        assert world.run(lambda: settled(world)), world.holdings()
        # What watches a dead peer looks once a second, and HTTP keeps idle connections for 15.
        world.run_for(20.0 if rounds > 100 else 1.5)
        before = world.holdings()
        for _, (victim, state) in zip(range(rounds), itertools.cycle(kinds), strict=False):
            assert any(one_round(world, victim, state) for _ in range(10)), (victim, state)
        world.run(lambda: grown(before, world.holdings()) == {})
        assert grown(before, world.holdings()) == {}
        assert not any(engine.fatal for engine in world.decodes.values())
    finally:
        world.close()


def settled(world: World) -> bool:
    held = world.holdings()
    return held["leases"] == held["receives"] == held["tickets in use"] == held["outboxes"] == 0


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {
        name: (was, after[name])
        for name, was in before.items()
        if after[name] > was + IDLE.get(name, 0)
    }
