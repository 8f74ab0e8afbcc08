"""The queue as the operator uses it, over minutes, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import virtual_time
from pdcluster_operator.runtime.interfaces import Key
from pdcluster_operator.runtime.queue import KeyedQueue

A, B = Key("ns", "a"), Key("ns", "b")


class Worked:
    """A queue at work. ``moments`` says when each key was worked on."""

    def __init__(self, **options: Any) -> None:
        self.moments: dict[Key, list[float]] = {}
        self.fails: set[Key] = set()
        self.again: dict[Key, float | None] = {}
        self.takes = 0.0
        self.queue = KeyedQueue(self._work, uniform=random.Random(7).uniform, **options)

    async def _work(self, key: Key) -> float | None:
        self.moments.setdefault(key, []).append(now())
        await asyncio.sleep(self.takes)
        if key in self.fails:
            raise RuntimeError("no answer")
        return self.again.get(key)

    def pauses(self, key: Key) -> list[float]:
        return [later - sooner for sooner, later in pairwise(self.moments[key])]


def now() -> float:
    return asyncio.get_running_loop().time()


def play(story: Callable[[Worked], Awaitable[None]], **options: Any) -> Worked:
    async def played() -> Worked:
        worked = Worked(**options)
        worked.queue.start()
        await story(worked)
        await worked.queue.stop()
        return worked

    return virtual_time.run(played())


def test_a_key_that_reports_itself_all_the_time_is_worked_on_twice_a_second() -> None:
    async def story(worked: Worked) -> None:
        for _ in range(200):
            worked.queue.add(A)
            await asyncio.sleep(0.05)
        done = len(worked.moments[A])
        assert 20 <= done <= 21
        assert 0.49 < min(worked.pauses(A)) <= max(worked.pauses(A)) < 0.51
        await asyncio.sleep(10.0)
        assert len(worked.moments[A]) <= done + 1, "once more for what came in its rest"

    play(story)


def test_a_key_that_fails_is_tried_again_more_and_more_rarely_until_it_succeeds() -> None:
    async def story(worked: Worked) -> None:
        worked.fails.add(A)
        worked.queue.add(A)
        await asyncio.sleep(3600.0)
        found = worked.pauses(A)
        wanted = [min(2.0**number, 300.0) for number in range(len(found))]
        shares = [pause / due for pause, due in zip(found, wanted, strict=True)]
        assert 0.8 <= min(shares) < 0.95
        assert 1.05 < max(shares) <= 1.2
        assert worked.queue._failures.get(A, 0) == len(worked.moments[A])
        worked.fails.clear()
        await asyncio.sleep(400.0)
        assert worked.queue._failures.get(A, 0) == 0
        done = len(worked.moments[A])
        await asyncio.sleep(4000.0)
        assert len(worked.moments[A]) == done, "nothing is left to do"
        worked.fails.add(A)
        worked.queue.add(A)
        await asyncio.sleep(1.3)
        assert len(worked.moments[A]) == done + 2, "it begins with a second again"

    play(story)


def test_news_of_a_key_that_fails_do_not_wait_for_its_next_try() -> None:
    async def story(worked: Worked) -> None:
        worked.fails.add(A)
        worked.queue.add(A)
        await asyncio.sleep(100.0)
        before = len(worked.moments[A])
        worked.fails.clear()
        worked.queue.add(A)
        await asyncio.sleep(0.1)
        assert len(worked.moments[A]) == before + 1

    play(story)


def test_a_key_comes_back_when_it_asked_for_it_and_earlier_wishes_win() -> None:
    async def story(worked: Worked) -> None:
        worked.again[A] = 30.0
        worked.queue.add(A)
        await asyncio.sleep(95.0)
        assert worked.moments[A] == [0.0, 30.0, 60.0, 90.0]
        worked.queue.add_after(A, 60.0)
        await asyncio.sleep(1.0)
        worked.queue.add_after(A, 4.0)
        await asyncio.sleep(5.0)
        assert worked.moments[A][-1] == 100.0

    play(story)


def test_a_wish_does_not_come_true_twice() -> None:
    async def story(worked: Worked) -> None:
        worked.queue.add_after(A, 10.0)
        await asyncio.sleep(11.0)
        worked.queue.add_after(A, 10.0)
        await asyncio.sleep(100.0)
        assert worked.moments[A] == [10.0, 21.0]
        worked.queue.add_after(A, -1.0)
        await asyncio.sleep(0.1)
        assert len(worked.moments[A]) == 3, "what is overdue is due now"

    play(story)


def test_eighteen_keys_are_worked_on_at_once_and_a_change_goes_first() -> None:
    async def story(worked: Worked) -> None:
        worked.takes = 10.0
        for number in range(40):
            worked.queue.add(Key("ns", str(number)))
        await asyncio.sleep(1.0)
        assert len(worked.moments) == 18
        assert worked.queue.depth == 22
        worked.queue.add(B, urgent=True)
        await asyncio.sleep(10.0)
        assert B in worked.moments
        assert len(worked.moments) == 36

    play(story)


def test_whoever_is_waited_for_goes_first_also_when_it_comes_back() -> None:
    async def story(worked: Worked) -> None:
        worked.takes = 5.0
        for number in range(4):
            worked.queue.add(Key("ns", str(number)))
        worked.queue.add_after(A, 1.0)
        worked.queue.add_after(B, 1.0)
        await asyncio.sleep(40.0)
        assert worked.moments[A] == [5.0]
        assert worked.moments[B] == [25.0]

    play(story, workers=1, is_urgent=lambda key: key == A)


def test_a_stop_waits_five_seconds_for_what_is_under_way() -> None:
    async def story(worked: Worked) -> None:
        worked.takes = 60.0
        worked.queue.add(A)
        worked.queue.add_after(B, 1.0)
        await asyncio.sleep(0.5)
        began = now()
        await worked.queue.stop()
        assert 4.9 < now() - began < 5.1
        worked.queue.add(B)
        worked.queue.add_after(B, 0.0)
        await asyncio.sleep(10.0)
        assert B not in worked.moments, "it takes no more keys"

    play(story)
