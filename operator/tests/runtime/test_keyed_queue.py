from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest

from pdcluster_operator.runtime.interfaces import Key
from pdcluster_operator.runtime.queue import Backoff, KeyedQueue
from virtual_time import VirtualTime

A, B = Key("ns", "a"), Key("ns", "b")


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualTime()


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """Waits are over at once, in the order of their ends, however busy the machine is."""
    return _Policy()


def fixed(low: float, high: float) -> float:
    return (low + high) / 2


async def settle(queue: KeyedQueue, seconds: float = 0.05) -> None:
    """Let the queue work for so long, and then until nothing waits."""
    await asyncio.sleep(seconds)
    while queue.depth:  # noqa: ASYNC110 - it has no event for that
        await asyncio.sleep(0.005)


async def test_a_key_added_many_times_runs_once() -> None:
    runs: Counter[Key] = Counter()

    async def handler(key: Key) -> None:
        runs[key] += 1

    queue = KeyedQueue(handler)
    for _ in range(100):
        queue.add(A)
        queue.add(B)
    queue.start()
    await settle(queue)
    await queue.stop()
    assert runs == {A: 1, B: 1}


async def test_a_key_added_while_it_runs_runs_once_more_and_never_beside_itself() -> None:
    active = most = runs = 0
    release = asyncio.Event()

    async def handler(_: Key) -> None:
        nonlocal active, most, runs
        runs += 1
        active += 1
        most = max(most, active)
        await release.wait()
        active -= 1

    queue = KeyedQueue(handler, workers=8)
    queue.start()
    queue.add(A)
    await asyncio.sleep(0.02)
    for _ in range(20):
        queue.add(A)
    await asyncio.sleep(0.02)
    assert (runs, most) == (1, 1)
    release.set()
    await settle(queue)
    await queue.stop()
    assert (runs, most) == (2, 1)


async def run_in_order(queue: KeyedQueue, ran: list[str], count: int) -> list[str]:
    queue.start()
    async with asyncio.timeout(60):
        while len(ran) < count:  # noqa: ASYNC110 - the handler announces nothing
            await asyncio.sleep(0)
    await queue.stop()
    return ran


async def test_urgent_keys_and_others_take_turns() -> None:
    ran: list[str] = []

    async def handler(key: Key) -> None:
        ran.append(key.name)

    queue = KeyedQueue(handler, workers=1)
    for number in range(5):
        queue.add(Key("ns", f"n{number}"))
    for number in range(3):
        queue.add(Key("ns", f"u{number}"), urgent=True)
    queue.add(Key("ns", "n4"), urgent=True)
    queue.add(Key("ns", "u0"))
    assert queue.depth == 8
    order = await run_in_order(queue, ran, 8)
    assert order == ["u0", "n0", "u1", "n1", "u2", "n2", "n4", "n3"]


async def test_a_key_that_was_worked_on_rests_and_a_change_wakes_it() -> None:
    loop = asyncio.get_running_loop()
    times: dict[str, list[float]] = {"a": [], "b": []}

    async def handler(key: Key) -> None:
        times[key.name].append(loop.time())
        if len(times["a"]) == 1:
            queue.add(A)

    queue = KeyedQueue(handler, rest=0.3)
    queue.start()
    queue.add(A)
    queue.add(B)
    async with asyncio.timeout(60):
        while not (times["a"] and times["b"]):  # noqa: ASYNC110 - the handler is the queue's
            await asyncio.sleep(0.001)
        for _ in range(5):
            queue.add(A)
            queue.add(B)
        assert queue.depth == 2, "they count as work that waits"
        queue.add(B, urgent=True)
        while len(times["a"]) < 2 or len(times["b"]) < 2:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)
    await settle(queue)
    await queue.stop()
    first, second = times["a"]
    assert second - first >= 0.3, "once for all five, after its rest"
    assert times["b"][1] < second


async def test_a_key_rests_longer_while_a_crowd_waits() -> None:
    loop = asyncio.get_running_loop()
    times: list[float] = []

    async def handler(key: Key) -> None:
        if key == A:
            times.append(loop.time())
            if len(times) == 1:
                queue.add(A)

    queue = KeyedQueue(handler, workers=1, rest=0.05)
    for key in (A, B, Key("ns", "c"), Key("ns", "d")):
        queue.add(key)
    queue.start()
    async with asyncio.timeout(60):
        while len(times) < 2:  # noqa: ASYNC110 - the handler is the queue's
            await asyncio.sleep(0.001)
    await queue.stop()
    assert times[1] - times[0] >= 0.2


async def test_a_key_that_rests_waits_once_whoever_asks_for_it() -> None:
    async def handler(_: Key) -> None:
        return

    queue = KeyedQueue(handler, workers=1)
    queue._resting[A] = False
    queue.add(A)
    assert queue.depth == 1, "after its rest"
    queue._rested(A)
    queue._resting[A] = False
    queue.add(A, urgent=True)
    queue.add(A)
    assert queue.depth == 1, "somebody waits for it, so its rest is over"


async def test_a_key_that_becomes_urgent_while_it_runs_is_urgent_afterwards() -> None:
    ran: list[str] = []
    queue: KeyedQueue

    async def handler(key: Key) -> None:
        if not ran:
            queue.add(A, urgent=True)
            queue.add(A)
            queue.add(B)
            queue.add(Key("ns", "c"))
        ran.append(key.name)

    queue = KeyedQueue(handler, workers=1)
    queue.add(A)
    assert (await run_in_order(queue, ran, 4))[:2] == ["a", "a"]


async def test_no_two_workers_on_a_key_under_churn() -> None:
    running: set[Key] = set()
    overlaps = 0
    keys = [Key("ns", f"k{i}") for i in range(5)]
    seen: Counter[Key] = Counter()

    async def handler(key: Key) -> None:
        nonlocal overlaps
        overlaps += key in running
        running.add(key)
        seen[key] += 1
        await asyncio.sleep(0.001)
        running.discard(key)

    queue = KeyedQueue(handler, workers=4)
    queue.start()
    for i in range(400):
        queue.add(keys[i % 5])
        if i % 7 == 0:
            queue.add_after(keys[(i * 3) % 5], 0.001)
            await asyncio.sleep(0)
    await settle(queue, 0.5)
    await queue.stop()
    assert overlaps == 0
    assert set(seen) == set(keys)


async def test_keys_run_beside_each_other() -> None:
    both = asyncio.Barrier(2)

    async def handler(_: Key) -> None:
        await asyncio.wait_for(both.wait(), 30)

    queue = KeyedQueue(handler, workers=2)
    queue.start()
    queue.add(A)
    queue.add(B)
    await settle(queue)
    await queue.stop()
    assert queue._failures.get(A, 0) == queue._failures.get(B, 0) == 0


async def test_a_failing_key_backs_off_alone_and_recovers() -> None:
    loop = asyncio.get_running_loop()
    times: list[float] = []
    others = 0

    async def handler(key: Key) -> None:
        nonlocal others
        if key == B:
            others += 1
            return
        times.append(loop.time())
        if len(times) < 4:
            raise RuntimeError("not yet")

    queue = KeyedQueue(handler, backoff=Backoff(first=0.02, jitter=0.0), uniform=fixed)
    queue.start()
    queue.add(A)
    queue.add(B)
    async with asyncio.timeout(60):
        while len(times) < 4 or others < 1:  # noqa: ASYNC110 - the handler is the queue's
            await asyncio.sleep(0.005)
    await settle(queue)
    assert queue._failures.get(A, 0) == 0
    assert others == 1
    await queue.stop()
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(times) == 4
    for gap, wanted in zip(gaps, (0.02, 0.04, 0.08), strict=True):
        assert wanted <= gap


def test_backoff_doubles_to_its_bound_and_is_jittered() -> None:
    backoff = Backoff()
    assert [backoff.delay(n, fixed) for n in (1, 2, 3, 9, 10, 5000)] == [1, 2, 4, 256, 300, 300]
    assert backoff.delay(1, lambda low, _: low) == pytest.approx(0.8)
    assert backoff.delay(1, lambda _, high: high) == pytest.approx(1.2)


async def test_requeue_after_and_the_earlier_wish_wins() -> None:
    loop = asyncio.get_running_loop()
    times: list[float] = []

    async def handler(_: Key) -> float | None:
        times.append(loop.time())
        return 0.05 if len(times) == 1 else None

    queue = KeyedQueue(handler)
    queue.start()
    start = loop.time()
    queue.add_after(A, 600)
    queue.add_after(A, 0.03)
    queue.add_after(A, 300)
    async with asyncio.timeout(120):  # before the later wishes
        while len(times) < 2:  # noqa: ASYNC110 - the handler is the queue's
            await asyncio.sleep(0.01)
    await settle(queue)
    await queue.stop()
    assert len(times) == 2
    assert times[0] - start >= 0.03
    assert times[1] - times[0] >= 0.05


async def test_a_run_ends_the_wish_of_the_run_before() -> None:
    runs = 0

    async def handler(_: Key) -> float | None:
        nonlocal runs
        runs += 1
        return 0.2 if runs == 1 else None

    queue = KeyedQueue(handler, rest=0.01)
    queue.start()
    queue.add(A)
    await settle(queue)
    queue.add(A)
    await settle(queue, 0.4)
    await queue.stop()
    assert runs == 2


async def test_stop_lets_a_running_handler_end_and_takes_no_more() -> None:
    ended: list[Key] = []

    async def handler(key: Key) -> None:
        await asyncio.sleep(0.05)
        ended.append(key)

    queue = KeyedQueue(handler, workers=1)
    queue.start()
    queue.add(A)
    queue.add(B)
    await asyncio.sleep(0.01)
    await queue.stop()
    queue.add(B)
    await asyncio.sleep(0.02)
    assert ended == [A]


async def test_stop_cancels_what_outlasts_the_grace() -> None:
    cancelled = asyncio.Event()

    async def handler(_: Key) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    queue = KeyedQueue(handler)
    queue.start()
    queue.add(A)
    await asyncio.sleep(0.01)
    await queue.stop(grace=0.02)
    assert cancelled.is_set()
