"""No namespace takes all workers or connections, and namespaces take turns."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import virtual_time
from pdcluster_operator.runtime.lines import Lines
from pdcluster_operator.runtime.queue import WORKERS, Key, KeyedQueue
from pdcluster_operator.runtime.shares import TIMES_FREE, Shares, Turns


def taken_by(shares: Shares, namespaces: list[str]) -> Counter[str]:
    """Let the namespaces take in turn until none may."""
    had: Counter[str] = Counter()
    while any(free := [one for one in namespaces if shares.may_take(one)]):
        for one in free:
            if shares.may_take(one):
                shares.take(one)
                had[one] += 1
    return had


@pytest.mark.parametrize(
    ("total", "namespaces", "most"),
    [(24, 1, 18), (32, 1, 24), (24, 2, 11), (32, 2, 14), (4, 1, 3), (2, 1, 2), (1, 1, 1)],
)
def test_what_hungry_namespaces_get(total: int, namespaces: int, most: int) -> None:
    had = taken_by(Shares(total), [str(number) for number in range(namespaces)])
    assert max(had.values()) == most
    assert sum(had.values()) < total or total <= 2, "something is left"


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans()), max_size=200),
)
def test_a_namespace_that_has_nothing_gets_one_while_one_is_free(
    total: int, steps: list[tuple[str, bool]]
) -> None:
    shares, had = Shares(total), Counter[str]()
    for namespace, takes in steps:
        if not takes and had[namespace]:
            shares.give_back(namespace)
            had[namespace] -= 1
        elif takes and shares.may_take(namespace):
            assert had[namespace] < TIMES_FREE * (total - had.total())
            shares.take(namespace)
            had[namespace] += 1
        assert had.total() <= total
        assert shares.may_take("another") == (had.total() < total)


def test_namespaces_take_turns_and_the_oldest_item_of_one_is_first() -> None:
    turns: Turns[str] = Turns()
    for item in ("a1", "a2", "a3", "b1", "b2", "c1", "a1"):
        turns.add(item[0], item)
    turns.drop("a", "a2")
    turns.drop("d", "d1")
    assert (len(turns), turns.holds("a", "a3"), turns.holds("a", "a2")) == (5, True, False)
    order = [turns.take(lambda _: True) for _ in range(6)]
    assert order == [("a", "a1"), ("b", "b1"), ("c", "c1"), ("a", "a3"), ("b", "b2"), None]
    assert not turns


def test_a_namespace_that_may_not_keeps_its_turn() -> None:
    turns: Turns[str] = Turns()
    for item in ("a1", "b1", "b2"):
        turns.add(item[0], item)
    assert turns.take(lambda namespace: namespace != "a") == ("b", "b1")
    assert turns.take(lambda _: True) == ("a", "a1")
    turns.clear()
    assert turns.take(lambda _: True) is None


def lines_of(workers: int, new: str = "") -> Lines[str]:
    return Lines(workers, lambda key: key[0], lambda key: key[0] in new, lambda _: False, lambda: 0)


@pytest.mark.parametrize("urgent", [False, True])
def test_keys_of_one_namespace_get_three_quarters_of_the_workers(*, urgent: bool) -> None:
    lines = lines_of(8)
    for number in range(9):
        lines.add(f"a{number}", urgent=urgent)
    lines.add("b0", urgent=False)
    got = [lines.take() for _ in range(8)]
    assert Counter(key[0] if key else "-" for key in got) == {"a": 6, "b": 1, "-": 1}
    assert lines.done("a0", failed=True) is False
    assert lines.take() == "a6", "a place that is free again is used"


def test_new_keys_of_one_namespace_leave_places_for_new_ones_of_others() -> None:
    lines = lines_of(12, new="ab")
    for number in range(12):
        lines.add(f"a{number}", urgent=False)
    lines.add("b0", urgent=False)
    got = [lines.take() for _ in range(12)]
    assert Counter(key[0] if key else "-" for key in got) == {"a": 6, "b": 1, "-": 5}
    lines.add("c0", urgent=False)
    assert lines.take() == "c0", "and for what is not new"
    assert lines.done("b0", failed=False), "it may be held"
    lines.add("b1", urgent=False)
    assert lines.take() == "b1"


def test_a_namespace_whose_calls_hang_delays_no_other() -> None:
    """Sixty PDClusters of one namespace hang for ten seconds at each look; others take 50 ms."""

    async def story() -> None:
        seen: list[tuple[float, float]] = []
        asked: dict[Key, float] = {}

        async def work(key: Key) -> None:
            if key.namespace == "hangs":
                await asyncio.sleep(10.0)
                raise TimeoutError
            await asyncio.sleep(0.05)
            seen.append((now(), now() - asked[key]))

        queue = KeyedQueue(work)
        queue.start()
        for number in range(60):
            queue.add(Key("hangs", str(number)), urgent=True)
        for number in range(175):
            await asyncio.sleep(0.5)
            key = Key(f"ns{number % 7}", str(number))
            asked[key] = now()
            queue.add(key, urgent=True)
            queue.add(Key("hangs", str(number % 60)), urgent=True)
        await asyncio.sleep(0.1)
        assert len(seen) == 175
        assert max(waited for _, waited in seen) < 0.1
        await queue.stop()

    virtual_time.run(story())


def test_two_namespaces_whose_calls_hang_delay_no_other() -> None:
    async def story() -> None:
        done: list[Key] = []

        async def work(key: Key) -> None:
            if key.namespace.startswith("hangs"):
                await asyncio.sleep(30.0)
            done.append(key)

        queue = KeyedQueue(work)
        queue.start()
        for number in range(60):
            for namespace in ("hangs-1", "hangs-2"):
                queue.add(Key(namespace, str(number)))
        await asyncio.sleep(1.0)
        queue.add(Key("well", "one"))
        await asyncio.sleep(0.1)
        assert done == [Key("well", "one")]
        await asyncio.sleep(400.0)
        hung = Counter(key.namespace for key in done)
        assert hung["hangs-1"] == hung["hangs-2"] == 60, "they are worked on all the same"
        await queue.stop()

    virtual_time.run(story())


def test_one_namespace_alone_has_most_workers() -> None:
    async def story() -> None:
        at_work: set[Key] = set()

        async def work(key: Key) -> None:
            at_work.add(key)
            await asyncio.sleep(10.0)

        queue = KeyedQueue(work)
        queue.start()
        for number in range(60):
            queue.add(Key("ns", str(number)))
        await asyncio.sleep(1.0)
        assert len(at_work) == WORKERS * 3 // 4
        await queue.stop(grace=0.0)

    virtual_time.run(story())


def now() -> float:
    return asyncio.get_running_loop().time()
