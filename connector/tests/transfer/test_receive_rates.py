"""How fast receives move KV, by virtual time: what counts, what does not, and what is told."""

from __future__ import annotations

import random
from concurrent.futures import Future
from itertools import count

import pytest
from msgspec import UNSET, UnsetType
from transfer_rig import Prefill
from turn_by_turn import CACHE, Bench

from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.protocol.load_report import ReceiveRate
from pdcluster_connector.transfer import measures
from pdcluster_connector.transfer.measures import (
    LARGE_BYTES,
    LEAST_MEASUREMENTS,
    LEAST_SECONDS,
    MEASUREMENTS,
    STANDS_SECONDS,
    ReceiveRates,
)
from pdcluster_connector.transfer.receive_machine import Opened, Receive, Signal

MIB = 1024 * 1024
SLOW = 100 * MIB  # bytes a second
FEW = LEAST_MEASUREMENTS - 1
NUMBERS = count()


class World:
    """Receives over links, at times that the test chooses."""

    def __init__(self) -> None:
        self.rates, self.now = ReceiveRates(), 100.0
        self.under_way: dict[str, tuple[str, Receive, int]] = {}

    def begin(self, nbytes: int, prefill: str = "p", *, posted_after: float = 0.0) -> str:
        name = f"r{next(NUMBERS)}"
        receive = Receive(name, self.now + 1e6, 1e6, 1e6, claimed=True)
        for event in (Signal.STARTED, Signal.CONNECTED, Opened(0)):
            receive.on(event, self.now)
        receive.on(Signal.POSTED, self.now + posted_after)
        self.rates.began(prefill, name, nbytes, self.now)
        self.under_way[name] = prefill, receive, nbytes
        return name

    def land(self, name: str) -> None:
        prefill, receive, _ = self.under_way.pop(name)
        self.rates.landed(prefill, receive, self.now)

    def fail(self, name: str) -> None:
        prefill, _, _ = self.under_way.pop(name)
        self.rates.failed(prefill, name, self.now)

    def one(self, nbytes: int, seconds: float, times: int = 1, share: float = 0.0) -> None:
        """Receive one after the other, with pauses that do not count."""
        for _ in range(times):
            name = self.begin(nbytes, posted_after=share * seconds)
            self.now += seconds
            self.land(name)
            self.now += 1.0

    @property
    def told(self) -> ReceiveRate | None:
        return self.rates.told("p", self.now) or None


@pytest.fixture
def world() -> World:
    return World()


def test_large_receives_show_a_slow_link_once_there_are_enough(world: World) -> None:
    world.one(SLOW, 1.0, FEW)
    assert world.told is None
    world.one(SLOW, 1.0)
    found = world.told
    assert found is not None
    assert (found.count, found.bytes) == (LEAST_MEASUREMENTS, LEAST_MEASUREMENTS * SLOW)
    assert (found.best, found.median) == (pytest.approx(SLOW), pytest.approx(SLOW))


def test_small_receives_say_nothing_however_long_they_take(world: World) -> None:
    world.one(LARGE_BYTES - 1, 1.0, 100)
    assert world.told is None
    world.one(LARGE_BYTES, 1.0, LEAST_MEASUREMENTS)
    assert world.told is not None


def test_what_latency_or_posting_may_have_made_slow_says_nothing(world: World) -> None:
    world.one(LARGE_BYTES, LEAST_SECONDS * 0.99, 100)
    assert world.told is None
    world.one(LARGE_BYTES, 1.0, MEASUREMENTS, share=0.95)
    assert world.told is None
    world.one(LARGE_BYTES, 1.0, MEASUREMENTS, share=0.8)
    assert world.told is not None


def test_short_ones_that_are_fast_push_slow_ones_out(world: World) -> None:
    world.one(SLOW, 1.0, MEASUREMENTS)
    world.one(4 * LARGE_BYTES, LEAST_SECONDS / 2)
    found = world.told
    assert found is not None
    assert found.best == pytest.approx(4 * LARGE_BYTES / LEAST_SECONDS * 2), "it is fast at least"
    assert found.median == pytest.approx(SLOW)
    world.one(4 * LARGE_BYTES, LEAST_SECONDS / 2, MEASUREMENTS // 2 - 1)
    assert world.told is None, "half of the latest do not show that it is slow"


def test_receives_side_by_side_share_the_time(world: World) -> None:
    """They all land at one moment: none of them alone would show how fast the link is."""
    for _ in range(LEAST_MEASUREMENTS):
        names = [world.begin(SLOW) for _ in range(4)]
        world.now += 4.0
        for name in names:
            world.land(name)
    found = world.told
    assert found is not None
    assert found.count == LEAST_MEASUREMENTS, "one for each time that the link was busy"
    assert found.best == pytest.approx(SLOW)


def test_links_side_by_side_share_the_network_of_the_rank(world: World) -> None:
    for _ in range(LEAST_MEASUREMENTS):
        names = [world.begin(SLOW, prefill) for prefill in ("p", "q")]
        world.now += 2.0
        for name in names:
            world.land(name)
    for prefill in ("p", "q"):
        found = world.rates.told(prefill, world.now) or None
        assert found is not None
        assert found.best == pytest.approx(SLOW)


@pytest.mark.parametrize("in_turn", [True, False], ids=["in turn", "fair"])
@pytest.mark.parametrize("seed", range(20))
def test_a_busy_wire_is_measured_to_a_third(seed: int, in_turn: bool) -> None:
    """Receives of many sizes come at any time; a wire carries them in turn, or all at once."""
    draw, world = random.Random(seed), World()
    left: dict[str, float] = {}
    for _ in range(2000):
        if len(left) < draw.choice((1, 2, 8)) or not left:
            nbytes = draw.choice((MIB, LARGE_BYTES, SLOW, 8 * SLOW))
            left[world.begin(nbytes)] = nbytes
            if draw.random() < 0.8:
                continue
        moving = list(left)[:1] if in_turn else list(left)
        step = min(left[name] for name in moving)
        world.now += step * len(moving) / SLOW
        for name in moving:
            left[name] -= step
            if left[name] <= 0:
                del left[name]
                world.land(name)
        if draw.random() < 0.1:  # nothing runs for a while
            for name in list(left):
                world.now += left.pop(name) / SLOW
                world.land(name)
            world.now += 5.0
    found = world.told
    assert found is not None
    assert SLOW / 1.34 < found.median < found.best * 1.001
    assert found.best < SLOW * 1.34


def test_what_stands_too_long_is_forgotten(world: World) -> None:
    world.one(SLOW, 1.0, LEAST_MEASUREMENTS)
    world.now += STANDS_SECONDS - 60.0
    assert world.told is not None
    world.now += 60.0
    assert world.told is None


def test_beside_a_failure_nothing_is_measured(world: World) -> None:
    world.one(SLOW, 1.0, FEW)
    for ends in (world.fail, world.land):
        names = [world.begin(SLOW), world.begin(SLOW)]
        world.now += 60.0
        ends(names[0])
        world.now += 60.0
        world.land(names[1])
        assert (world.told is None) == (ends == world.fail)
    world.fail(world.begin(SLOW))
    world.rates.failed("another", "r", world.now)
    assert world.told is not None


def test_small_changes_of_the_number_are_not_told(world: World) -> None:
    world.one(SLOW, 1.0, MEASUREMENTS)
    before = world.told
    world.one(SLOW, 1.05, MEASUREMENTS)
    assert world.told is before
    world.one(SLOW, 1.2, MEASUREMENTS)
    assert world.told != before


def test_a_link_that_is_forgotten_is_measured_anew(world: World) -> None:
    world.one(SLOW, 1.0, FEW)
    late = world.begin(SLOW)
    world.rates.forget("p")
    world.now += 1.0
    world.land(late)
    assert world.told is None
    world.one(SLOW, 1.0, FEW)
    assert world.told is None


def test_small_ones_beside_a_large_one_share_the_wire(world: World) -> None:
    for _ in range(LEAST_MEASUREMENTS):
        large = world.begin(LARGE_BYTES)
        for _ in range(7):
            small = world.begin(LARGE_BYTES - 1)
            world.now += LARGE_BYTES / SLOW
            world.land(small)
        world.now += LARGE_BYTES / SLOW
        world.land(large)
    found = world.told
    assert found is not None
    assert found.best == pytest.approx(SLOW)


def test_small_ones_that_had_nearly_landed_make_no_link_fast(world: World) -> None:
    """A wire serves all in turn, so those that came before a large one may land just after it."""
    for landing in (world.land, world.fail):
        for _ in range(MEASUREMENTS):
            small = [world.begin(LARGE_BYTES - 1) for _ in range(15)]
            world.now += 15 * LARGE_BYTES / SLOW * 0.9
            large = world.begin(LARGE_BYTES)
            world.now += 15 * LARGE_BYTES / SLOW * 0.1
            for name in small:
                landing(name)
            world.now += LARGE_BYTES / SLOW
            world.land(large)
        assert world.told is None
    world.one(LARGE_BYTES, LARGE_BYTES / SLOW, LEAST_MEASUREMENTS)
    found = world.told
    assert found is not None
    assert found.best == pytest.approx(SLOW)


BLOCKS = 8


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    layers, heads, tokens, size = (
        CACHE[name] for name in ("layers", "kv_heads", "block_tokens", "token_bytes")
    )
    monkeypatch.setattr(measures, "LARGE_BYTES", BLOCKS * layers * heads * tokens * size)
    return made


def receive(bench: Bench, prefill: Prefill, blocks: int, seconds: float, times: int) -> None:
    """Receive KV of which nothing lands for ``seconds``."""
    for _ in range(times):
        bench.sent %= BLOCKS
        bench.hanging.add(prefill.metadata.engine_id)
        bench.send(prefill, blocks)
        bench.now += seconds
        bench.hanging.clear()
        bench.fabric.land()
        bench.turns()
    assert len(bench.take().received) == min(times, BLOCKS)


def checked(bench: Bench, prefill: Prefill) -> ReceiveRate | UnsetType:
    """Return what a check of the link tells, as its keeper asks for one every few seconds."""
    future: Future[ProbeResult] = Future()
    bench.connections.probing.begin(prefill.metadata, future, check=True)
    bench.turns()
    assert future.result(0).failure is None
    return future.result(0).receives


def test_a_link_whose_probe_was_fast_is_found_slow_by_its_receives(bench: Bench) -> None:
    prefill, other = bench.prefill("p"), bench.prefill("q")
    assert bench.probe(prefill).result(0).failure is None
    receive(bench, prefill, BLOCKS - 1, 10.0, MEASUREMENTS)
    assert checked(bench, prefill) is UNSET, "small receives say nothing"
    receive(bench, prefill, BLOCKS, 10.0, LEAST_MEASUREMENTS)
    receive(bench, other, BLOCKS, 0.001, MEASUREMENTS)
    found = checked(bench, prefill)
    assert found is not UNSET
    assert found.best == pytest.approx(measures.LARGE_BYTES / 10.0)
    assert checked(bench, other) is UNSET, "they were too short to show anything"
    bench.probe(prefill).result(0)
    assert checked(bench, prefill) is UNSET, "another probe measures the link anew"


def test_a_receive_that_fails_is_no_measurement(bench: Bench) -> None:
    prefill = bench.prefill("p")
    receive(bench, prefill, BLOCKS, 10.0, LEAST_MEASUREMENTS - 1)
    bench.hanging.add("p")
    request_id = bench.send(prefill, BLOCKS)
    bench.abandon(request_id)
    bench.pass_time(10.0)
    bench.fabric.land()
    bench.turns()
    assert request_id in bench.take().failed
    bench.hanging.clear()
    assert checked(bench, prefill) is UNSET
    receive(bench, prefill, BLOCKS, 10.0, 1)
    assert checked(bench, prefill) is not UNSET
