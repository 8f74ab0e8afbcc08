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
from pdcluster_operator.runtime.shares import (
    BELIEVED_SECONDS,
    TIMES_FREE,
    Shares,
    Turns,
    most_given,
)

HANGS_SECONDS = 5.0


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def taken_by(shares: Shares, namespaces: list[str]) -> Counter[str]:
    """Let the namespaces take in turn until none may."""
    had: Counter[str] = Counter()
    while any(free := [one for one in namespaces if shares.limits()(one)]):
        for one in free:
            if shares.limits()(one):
                shares.take(one, object())
                had[one] += 1
    return had


@pytest.mark.parametrize(
    ("total", "namespaces", "most"),
    [(24, 1, 18), (32, 1, 24), (24, 2, 11), (32, 2, 14), (4, 1, 3), (2, 1, 2), (1, 1, 1)],
)
def test_what_hungry_namespaces_get(total: int, namespaces: int, most: int) -> None:
    had = taken_by(
        Shares(total, HANGS_SECONDS, Time()), [str(number) for number in range(namespaces)]
    )
    assert max(had.values()) == most
    assert sum(had.values()) < total or total <= 2, "something is left"


@given(
    st.integers(1, 40),
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(("take", "give", "wait"))),
        max_size=200,
    ),
)
def test_a_namespace_that_has_nothing_gets_one_while_one_is_free(
    total: int, steps: list[tuple[str, str]]
) -> None:
    time, held = Time(), dict[str, list[object]]()
    shares = Shares(total, HANGS_SECONDS, time)
    for namespace, step in steps:
        own = held.setdefault(namespace, [])
        if step == "wait":
            time.now += 1.0
        elif step == "give" and own:
            shares.give_back(namespace, own.pop(0))
        elif step == "take" and shares.limits()(namespace):
            assert len(own) < TIMES_FREE * shares.free()
            own.append(object())
            shares.take(namespace, own[-1])
        given = sum(map(len, held.values()))
        assert total - given <= shares.free() <= most_given(total) - given
        assert shares.limits()("another") == (shares.free() > 0)


def test_namespaces_in_which_something_hangs_count_as_one() -> None:
    time = Time()
    shares = Shares(24, HANGS_SECONDS, time)
    names = [f"hangs-{number}" for number in range(8)]
    assert taken_by(shares, names).total() == 24, "until it is known that they hang"
    time.now = HANGS_SECONDS + 0.1
    assert shares.hanging() == set(names)
    assert shares.free() == 6, "what they have beyond 18 is given out a second time"
    assert not taken_by(shares, names), "and not to them"
    for name in names[:6]:
        for holder in list(shares._since[name]):
            shares.give_back(name, holder)
    assert shares.free() == 18
    assert taken_by(shares, names).total() == 12, "18 of 24 together"
    assert shares.free() == 6
    assert shares.limits()("well")
    taken_by(shares, ["well"])
    assert shares.free() == 1, "one that is well has a share of its own"


def test_what_no_webhook_can_hold_never_counts_as_hanging() -> None:
    """One slow read would put all reads behind the calls that hang."""
    time = Time()
    shares = Shares(32, HANGS_SECONDS, time)
    shares.take("", "slow")
    time.now = 100.0
    shares.take("", "another")
    assert not shares.hanging()
    shares.give_back("", "slow")
    assert not shares.hanging()


def test_no_more_is_given_out_than_said_however_many_hang_one_after_another() -> None:
    time = Time()
    shares = Shares(32, HANGS_SECONDS, time)
    had = 0
    for number in range(20):
        had += taken_by(shares, [f"hangs-{number}-{other}" for other in range(20)]).total()
        time.now += HANGS_SECONDS + 1
    assert had == most_given(32) == 40


def test_a_namespace_is_believed_to_be_well_again_after_a_while() -> None:
    time = Time()
    shares = Shares(8, HANGS_SECONDS, time)
    shares.take("ns", 1)
    time.now = HANGS_SECONDS
    shares.give_back("ns", 1)
    assert not shares.hanging(), "that was slow, but not too slow"
    shares.take("ns", 2)
    time.now += HANGS_SECONDS + 1
    shares.give_back("ns", 2)
    shares.take("ns", 3)
    shares.give_back("ns", 3)
    time.now += BELIEVED_SECONDS - 1
    assert shares.hanging() == {"ns"}, "although others ended at once"
    time.now += 1
    assert not shares.hanging()
    assert not shares._hung_until


def test_namespaces_take_turns_and_the_oldest_item_of_one_is_first() -> None:
    turns: Turns[str] = Turns()
    for item in ("a1", "a2", "a3", "b1", "b2", "c1", "a1"):
        turns.add(item[0], item)
    turns.drop("a", "a2")
    turns.drop("d", "d1")
    assert (len(turns), turns.holds("a", "a3"), turns.holds("a", "a2")) == (5, True, False)
    order = [turns.take(lambda _: True) for _ in range(6)]
    assert order == [("a", "a1"), ("b", "b1"), ("c", "c1"), ("a", "a3"), ("b", "b2"), None]
    assert (len(turns), bool(turns)) == (0, False)


def test_items_are_counted_once_and_without_some_namespaces() -> None:
    turns: Turns[str] = Turns()
    for item in ("a1", "a2", "a1", "b1", "c1"):
        turns.add(item[0], item)
    assert (len(turns), turns.outside({"a", "x"}), turns.outside(set())) == (4, 2, 4)
    turns.drop("a", "a1")
    turns.drop("a", "a1")
    turns.take(lambda namespace: namespace == "b")
    assert (len(turns), turns.outside({"a"})) == (2, 1)


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


def test_no_scan_of_all_namespaces_while_no_place_for_new_keys_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restored backup brings thousands of namespaces at once."""
    lines: Lines[str] = Lines(24, str, lambda _: True, lambda _: False, lambda: 0.0)
    for number in range(2000):
        lines.add(f"n{number}", urgent=False)
    assert [lines.take() for _ in range(17)].count(None) == 1
    asked: list[str] = []
    limits = lines._workers.limits
    monkeypatch.setattr(
        lines._workers, "limits", lambda: lambda name: asked.append(name) or limits()(name)
    )
    assert lines.take() is None
    assert asked == []
    lines.done("n3", failed=False)
    assert lines.take() == "n16"
    assert len(asked) == 1


def test_nobody_waits_for_new_keys_that_hang_or_fail() -> None:
    """One that hangs never has children. Others should have their first status all the same."""

    async def story() -> None:
        made: set[Key] = set()
        looks: list[float] = []

        async def work(key: Key) -> None:
            if key.namespace == "hangs":
                await asyncio.sleep(30.0)
                raise TimeoutError
            if key in made:
                looks.append(now())
            made.add(key)

        queue = KeyedQueue(work, is_new=lambda key: key not in made, is_silent=lambda _: True)
        queue.start()
        for number in range(40):
            queue.add(Key("hangs", str(number)))
        for moment in (16.0, 100.0, 900.0):
            await asyncio.sleep(moment - now())
            assert queue.new == 0
            looks.clear()
            key = Key("well", str(moment))
            queue.add(key)
            await asyncio.sleep(0.1)
            queue.add(key)
            await asyncio.sleep(1.0)
            assert len(looks) == 1, f"it was held at {moment} s"
        await queue.stop(grace=0.0)

    virtual_time.run(story())


def test_a_key_that_failed_is_not_new() -> None:
    async def story() -> None:
        ran: list[str] = []

        async def work(key: Key) -> None:
            ran.append(key.name)
            raise TimeoutError

        queue = KeyedQueue(work, is_new=lambda _: True, workers=1)
        for name in ("a", "b"):
            queue.add(Key("ns", name))
        assert queue.new == 2
        queue.start()
        await asyncio.sleep(0.1)
        assert ran == ["a", "b"]
        queue._workers = 0
        for name in ("a", "b"):
            queue._lines.add(Key("ns", name), urgent=False)
        assert (queue.new, queue.depth) == (0, 2)
        await queue.stop(grace=0.0)

    virtual_time.run(story())


@pytest.mark.parametrize("namespaces", [8, 50])
def test_many_namespaces_whose_calls_hang_delay_no_other(namespaces: int) -> None:
    async def story() -> None:
        done: list[Key] = []

        async def work(key: Key) -> None:
            await asyncio.sleep(30.0 if key.namespace.startswith("hangs") else 0.05)
            done.append(key)

        queue = KeyedQueue(work)
        queue.start()
        for number in range(400):
            queue.add(Key(f"hangs-{number % namespaces}", str(number)), urgent=True)
        await asyncio.sleep(1.0)
        first = Key("well", "first")
        queue.add(first, urgent=True)
        await asyncio.sleep(15.5 if namespaces < 24 else 90.0)
        assert first in done, "as soon as it is known of each that it hangs"
        for number in range(20):
            key = Key("well", str(number))
            queue.add(key, urgent=True)
            await asyncio.sleep(0.1)
            assert key in done
            await asyncio.sleep(5.0)
        await queue.stop(grace=0.0)

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
