"""Each fault in each state of a request: what becomes of it, and of the others beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_world import LEASE_SECONDS, World

from pdcluster_connector.testing.engines import FREED, DecodeEngine
from pdcluster_connector.testing.judge import Judge, Verdict
from pdcluster_connector.transfer import receiver
from pdcluster_connector.transfer.receive_machine import State

STATES = (State.NEW, State.HANDSHAKE, State.POSTED, State.FENCE)
# A machine may stall for longer than a short lease lasts; then the case begins again.
LEASES = (LEASE_SECONDS, 5.0, 30.0)
REQUESTS = 4  # half of them are computed anew if they fail


@pytest.fixture(autouse=True)
def rare_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing moves, look five times less often: these tests wait for seconds."""
    monkeypatch.setattr(receiver, "LONGEST_SLEEP", 5e-3)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    made = Judge()
    yield made
    if page := os.environ.get("PDCLUSTER_FAULT_MATRIX"):
        Path(page).write_text(made.table() + "\n")


def send_in_state(world: World, state: State, fault: str, victim: str) -> list[str]:
    """Bring requests into ``state`` and have the fault happen there; none if their leases ended."""
    if state is State.NEW:
        busy = world.busy("D1")
        sent = [world.send("P1", "D1") for _ in range(REQUESTS)]
        if fault == "kill" and victim == "D1":
            busy.set()  # closing its threads is part of ending it here
        happen(world, fault, victim)
        busy.set()
        return sent
    hold = world.hold(state)
    sent = [world.send("P1", "D1") for _ in range(REQUESTS)]
    fetches = world.decodes["D1"].fetches
    assert world.run(
        lambda: (
            all(world.stands("D1", r, state) for r in sent) or any(fetches[r].ended for r in sent)
        )
    )
    if any(fetches[r].ended for r in sent):
        assert all(fetches[r].failure is not None for r in sent if fetches[r].ended)
        return []
    happen(world, fault, victim)
    hold.release()
    return sent


def happen(world: World, fault: str, victim: str) -> None:
    {"kill": world.kill, "stop": world.stop, "cut": world.cut}[fault](victim)


def end(world: World, fault: str, victim: str) -> None:
    if fault == "stop":
        world.go_on(victim)
    elif fault == "cut":
        world.mend(victim)


@pytest.mark.sampled
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("victim", ["P1", "D1"])
@pytest.mark.parametrize("fault", ["kill", "stop", "cut"])
def test_nobody_believes_foreign_bytes(judge: Judge, fault: str, victim: str, state: State) -> None:
    for lease_seconds in LEASES:
        world = World(lease_seconds=lease_seconds)
        try:
            engine = world.decodes["D1"]
            if sent := send_in_state(world, state, fault, victim):
                check(world, judge, engine, sent, fault, victim, state)
                return
        finally:
            world.close()
    raise AssertionError(f"no request came to {state.name} while its lease stood")


def check(
    world: World,
    judge: Judge,
    engine: DecodeEngine,
    sent: list[str],
    fault: str,
    victim: str,
    state: State,
) -> None:
    where = f"{fault} {victim[0]} in {state.name}"
    lost = fault == "kill" and victim == "D1"
    beside_pairs = [pair for pair in world.relays if pair[0] == "P2" and victim not in pair]
    beside = [(pair, world.send(*pair)) for pair in beside_pairs * 2]
    world.run_for(1.5 * world.lease_seconds if fault != "kill" else 0.05)
    end(world, fault, victim)
    assert world.run(lambda: lost or all(engine.fetches[r].ended for r in sent)), where
    assert world.run(lambda: all(world.decodes[d].fetches[r].ended for (_, d), r in beside))
    for number, request_id in enumerate(sent):
        judge.judge(where, engine, request_id, recompute=number % 2 == 0, lost=lost)
    for (_, d), request_id in beside:
        verdict = judge.judge(where + ", beside it", world.decodes[d], request_id)
        assert verdict is Verdict.RIGHT, where
    if lost:
        retry(world, judge, where, sent)
    for pair in world.relays:  # and every pair works again
        assert world.run(lambda pair=pair: works(world, judge, where, pair)), where
    for decode in world.decodes.values():
        for cache in decode.caches:
            landed = cache.bytes[:, decode.free]
            assert ((landed == FREED) | (landed == 0)).all(), "a freed block was written to"
        assert decode.fatal == []
    assert not [key for key in judge.faults if key[0].startswith(where)]
    free = world.size.num_blocks - 1
    assert world.run(lambda: all(len(p.free) == free for p in world.prefills.values()))


def retry(world: World, judge: Judge, where: str, sent: list[str]) -> None:
    """A router gives the tickets to the other engine, which is not the one that claimed them."""
    for request_id in sent:
        world.fetch(request_id, "D2")
    engine = world.decodes["D2"]
    assert world.run(lambda: all(engine.fetches[r].ended for r in sent)), where
    for request_id in sent:
        judge.judge(where + ", retried elsewhere", engine, request_id)


def works(world: World, judge: Judge, where: str, pair: tuple[str, str]) -> bool:
    request_id = world.send(*pair)
    engine = world.decodes[pair[1]]
    assert world.run(lambda: engine.fetches[request_id].ended)
    failed = engine.fetches[request_id].failure is not None
    judge.judge(where + ", afterwards" if not failed else where + ", too early", engine, request_id)
    return not failed
