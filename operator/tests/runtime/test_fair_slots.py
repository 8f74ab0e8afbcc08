"""No namespace takes all workers or connections, and namespaces take turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st

import virtual_time
from pdcluster_operator.runtime import queue
from pdcluster_operator.runtime.interfaces import Key
from pdcluster_operator.runtime.queue import (
    BELIEVED_SECONDS,
    WORKERS,
    FairSlots,
    KeyedQueue,
)

HANGS_SECONDS = 5.0


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    moment = Time()
    monkeypatch.setattr(queue, "_now", moment)
    return moment


def slots_of(total: int) -> FairSlots:
    return FairSlots(total, HANGS_SECONDS, lambda _: None)


def key_of(item: str) -> Key:
    return Key(*item.split("/"))


def add(slots: FairSlots, items: Iterable[str], *, urgent: bool = False) -> None:
    for item in items:
        slots.add(key_of(item), urgent=urgent)


def take(slots: FairSlots) -> str | None:
    taken = slots.take()
    return None if taken is None else str(taken)


def take_all(slots: FairSlots) -> list[str]:
    return [str(one) for one in iter(slots.take, None)]


def give_back(slots: FairSlots, items: Iterable[str]) -> None:
    for item in items:
        slots.done(key_of(item))


def hungry(*namespaces: str, count: int = 40, batch: str = "") -> list[str]:
    return [f"{name}/{batch}{number}" for number in range(count) for name in namespaces]


def taken_by(slots: FairSlots, *namespaces: str, batch: str = "") -> Counter[str]:
    """Let the namespaces take in turn until none may; forget what waits then."""
    add(slots, hungry(*namespaces, batch=batch))
    had = Counter(item.split("/")[0] for item in take_all(slots))
    slots.clear()
    return had


@pytest.mark.usefixtures("time")
@pytest.mark.parametrize(
    ("total", "namespaces", "most"),
    [(24, 1, 18), (32, 1, 24), (24, 2, 11), (32, 2, 14), (4, 1, 3), (2, 1, 2), (1, 1, 1)],
)
def test_what_hungry_namespaces_get(total: int, namespaces: int, most: int) -> None:
    had = taken_by(slots_of(total), *(str(number) for number in range(namespaces)))
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
    moment, held = Time(), dict[str, list[str]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "_now", moment)
        slots = slots_of(total)
        for number, (namespace, step) in enumerate(steps):
            own = held.setdefault(namespace, [])
            if step == "wait":
                moment.now += 1.0
            elif step == "give" and own:
                give_back(slots, [own.pop(0)])
            elif step == "take":
                is_free = has_one_for_another(slots)
                add(slots, [f"{namespace}/{number}"])
                if (taken := take(slots)) is not None:
                    own.append(taken)
                assert is_free or taken is None
                assert own or not is_free
                slots.clear()
            given = sum(map(len, held.values()))
            assert has_one_for_another(slots) or given >= total - total // 4
            assert given <= total + total // 4


def has_one_for_another(slots: FairSlots) -> bool:
    """Whether a namespace that has nothing would get a slot."""
    add(slots, ["another/one"])
    taken = take(slots)
    slots.clear()
    give_back(slots, [taken] if taken else [])
    return taken is not None


def test_namespaces_in_which_something_hangs_count_as_one(time: Time) -> None:
    slots = slots_of(24)
    names = [f"hangs-{number}" for number in range(8)]
    add(slots, hungry(*names))
    first = take_all(slots)
    slots.clear()
    assert len(first) == 24, "until it is known that they hang"
    time.now = HANGS_SECONDS + 0.1
    assert slots.hanging() == set(names)
    assert not taken_by(slots, *names, batch="more-"), "and not to them"
    give_back(slots, [item for item in first if item.split("/")[0] in names[:6]])
    assert taken_by(slots, *names, batch="new-").total() == 12, "18 of 24 together"
    assert taken_by(slots, "well").total() == 5, "of the 6 that are left: it has its own share"


def test_no_more_is_given_out_than_said_however_many_hang_one_after_another(time: Time) -> None:
    slots = slots_of(32)
    had = 0
    for number in range(20):
        had += taken_by(slots, *(f"hangs-{number}-{other}" for other in range(20))).total()
        time.now += HANGS_SECONDS + 1
    assert had == 40


def test_a_namespace_is_believed_to_be_well_again_after_a_while(time: Time) -> None:
    slots = slots_of(8)

    def hold(seconds: float) -> None:
        add(slots, ["ns/1"])
        assert take(slots) == "ns/1"
        time.now += seconds
        give_back(slots, ["ns/1"])

    hold(HANGS_SECONDS)
    assert not slots.hanging(), "that was slow, but not too slow"
    hold(HANGS_SECONDS + 1)
    hold(0.0)
    time.now += BELIEVED_SECONDS - 1
    assert slots.hanging() == {"ns"}, "although others ended at once"
    time.now += 1
    assert not slots.hanging()
    assert not slots._hung_until


@pytest.mark.usefixtures("time")
@pytest.mark.parametrize("urgent", [False, True])
def test_namespaces_take_turns_and_the_oldest_item_of_one_is_first(*, urgent: bool) -> None:
    slots = slots_of(40)
    add(slots, ["a/1", "a/2", "a/3", "b/1", "b/2", "c/1", "a/1"], urgent=urgent)
    assert (len(slots), slots.waits(Key("a", "3")), slots.waits(Key("a", "4"))) == (6, True, False)
    assert take_all(slots) == ["a/1", "b/1", "c/1", "a/2", "b/2", "a/3"]
    assert len(slots) == 0


@pytest.mark.usefixtures("time")
def test_urgent_items_and_others_take_turns_and_an_item_waits_once() -> None:
    slots = slots_of(40)
    add(slots, ["a/1", "a/2", "a/3"])
    add(slots, ["a/4", "a/3"], urgent=True)
    add(slots, ["a/4", "a/3"])
    assert len(slots) == 4
    assert take_all(slots) == ["a/4", "a/1", "a/3", "a/2"]
    add(slots, ["a/5"])
    slots.clear()
    assert len(slots) == 0
    assert slots.take() is None


@pytest.mark.usefixtures("time")
@pytest.mark.parametrize("urgent", [False, True])
def test_items_of_one_namespace_get_three_quarters_of_the_slots(*, urgent: bool) -> None:
    slots = slots_of(8)
    add(slots, hungry("a", count=9), urgent=urgent)
    add(slots, ["b/0"])
    got = take_all(slots)
    assert Counter(item[0] for item in got) == {"a": 6, "b": 1}
    assert slots.take() is None, "a namespace that may not have more keeps its turn"
    give_back(slots, ["a/0"])
    assert take(slots) == "a/6", "a slot that is free again is used"


@pytest.mark.usefixtures("time")
def test_thousands_of_namespaces_wait() -> None:
    """A restored backup brings them at once."""
    slots = slots_of(24)
    add(slots, (f"n{number}/x" for number in range(2000)))
    assert len(take_all(slots)) == 24
    give_back(slots, ["n3/x"])
    assert take_all(slots) == ["n24/x"]


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


def test_keys_that_hang_or_fail_count_as_nobody_who_waits() -> None:
    """The first status of others waits while many keys wait."""

    async def story() -> None:
        async def work(key: Key) -> None:
            await asyncio.sleep(30.0 if key.namespace == "hangs" else 0.0)
            raise TimeoutError

        queue = KeyedQueue(work)
        queue.start()
        for number in range(40):
            queue.add(Key("hangs", str(number)))
            queue.add(Key("fails", str(number)))
        assert queue.slots.waiting() > 40
        for moment in (16.0, 100.0, 900.0):
            await asyncio.sleep(moment - now())
            assert queue.slots.waiting() == 0
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


def test_a_key_that_was_begun_does_not_wait_behind_a_crowd_of_new_ones() -> None:
    """Each new key takes ten seconds; one whose pods have become ready is looked at soon."""
    begun = Key("a", "begun")
    started: dict[Key, float] = {}

    async def handler(key: Key) -> None:
        started[key] = asyncio.get_running_loop().time()
        await asyncio.sleep(0.1 if key == begun else 10.0)

    async def crowd() -> None:
        keys = KeyedQueue(handler, is_new=lambda key: key != begun, workers=8)
        keys.start()
        for number in range(100):
            keys.add(Key("a", f"new-{number}"))
        await asyncio.sleep(25.0)
        keys.add(begun)
        await asyncio.sleep(5.0)
        assert started[begun] == pytest.approx(25.0)
        assert len(started) == 16, "five of eight take new keys of one namespace, and never wait"
        await keys.stop()

    virtual_time.run(crowd())


@pytest.mark.parametrize(("namespaces", "each", "longest"), [(1, 40, 1.0), (4, 10, 10.0)])
def test_namespaces_that_hang_delay_no_new_key_of_another(
    namespaces: int, each: int, longest: float
) -> None:
    begun: dict[Key, float] = {}

    async def work(key: Key) -> None:
        begun[key] = now()
        await asyncio.sleep(30.0 if key.namespace.startswith("hangs") else 0.5)

    async def story() -> None:
        keys = KeyedQueue(work, is_new=lambda _: True)
        keys.start()
        for number in range(each):
            for namespace in range(namespaces):
                keys.add(Key(f"hangs-{namespace}", str(number)))
        waits = []
        for number in range(40):
            await asyncio.sleep(1.0)
            key, since = Key("good", str(number)), now()
            keys.add(key)
            while key not in begun:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.1)
            waits.append(begun[key] - since)
        assert max(waits) <= longest
        await keys.stop(grace=0.0)

    virtual_time.run(story())
