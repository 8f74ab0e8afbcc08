"""Many new PDClusters at once: their children come first, and then what becomes of them."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from typing import Any

import pytest

import virtual_time
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.lines import HOLD_SECONDS, Lines
from pdcluster_operator.runtime.queue import LOOKS_A_SECOND, Key, KeyedQueue

NEW_OF_ONE = 12
"""New keys of one namespace that are worked on at once: three quarters of 16 workers."""


class Crowd:
    """Keys whose first look takes ``takes`` seconds. After it they report themselves for a while.

    Attributes:
        made: when the first look at each key ended.
        looks: when each key was looked at after that.
        said: keys that have a status.
        fails: keys whose first look fails.
    """

    def __init__(self, takes: float = 1.0, look_takes: float = 0.0) -> None:
        self.takes = takes
        self.look_takes = look_takes
        self.made: dict[Key, float] = {}
        self.looks: dict[Key, list[float]] = {}
        self.said: set[Key] = set()
        self.fails: set[Key] = set()
        self.at_work = self.most_at_work = 0
        self._ends: defaultdict[Key, asyncio.Event] = defaultdict(asyncio.Event)
        self.queue = KeyedQueue(
            self._work,
            is_new=lambda key: key not in self.made,
            is_silent=lambda key: key not in self.said,
        )
        self.queue.start()

    async def _work(self, key: Key) -> None:
        if key in self.made:
            self.looks.setdefault(key, []).append(now())
            await asyncio.sleep(self.look_takes)
            return
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        await asyncio.sleep(self.takes)
        self.at_work -= 1
        self.made[key] = now()
        self._ends[key].set()
        if key in self.fails:
            raise RuntimeError("one of its children was refused")

    async def reports(self, key: Key, seconds: float) -> None:
        """Have a key report itself twice a second, as one does whose pods start."""
        await self._ends[key].wait()
        ends = now() + seconds
        while now() < ends:
            self.queue.add(key)
            await asyncio.sleep(0.5)

    def add(self, count: int) -> list[Key]:
        keys = [Key("ns", str(number)) for number in range(count)]
        for key in keys:
            self.queue.add(key)
        return keys


def now() -> float:
    return asyncio.get_running_loop().time()


def test_while_others_are_new_no_look_follows_what_was_made() -> None:
    async def story() -> None:
        crowd = Crowd()
        keys = crowd.add(100)
        async with asyncio.TaskGroup() as tasks:
            for key in keys:
                tasks.create_task(crowd.reports(key, 12.0))
        last = max(crowd.made.values())
        assert not [one for key in keys for one in crowd.looks[key] if one < last]
        first = [crowd.looks[key][0] for key in keys]
        assert max(first) < last + 100 / LOOKS_A_SECOND + 0.1, "when the last ones have rested"
        await crowd.queue.stop()

    virtual_time.run(story())


def test_nobody_is_held_longer_than_the_hold() -> None:
    async def story() -> None:
        crowd = Crowd(takes=8.0)
        keys = crowd.add(150)
        async with asyncio.TaskGroup() as tasks:
            for key in keys:
                tasks.create_task(crowd.reports(key, 60.0))
        first = [crowd.looks[key][0] - crowd.made[key] for key in keys]
        assert max(crowd.made.values()) > 3 * HOLD_SECONDS, "the crowd lasts longer"
        assert 30.0 <= max(first) <= 30.0 + crowd.takes
        long = [
            later - sooner
            for key in keys
            for sooner, later in zip(crowd.looks[key], crowd.looks[key][1:], strict=False)
        ]
        assert max(long) < HOLD_SECONDS / 2, "it is held once, and not after each look"
        await crowd.queue.stop()

    virtual_time.run(story())


def test_some_workers_are_kept_for_keys_that_are_not_new() -> None:
    async def story() -> None:
        crowd = Crowd(takes=10.0)
        known = Key("ns", "known")
        crowd.made[known] = 0.0
        crowd.add(100)
        await asyncio.sleep(0.1)
        crowd.queue.add(known)
        await asyncio.sleep(0.1)
        assert crowd.looks[known], "it does not wait until a new one is done"
        assert crowd.most_at_work == NEW_OF_ONE
        await crowd.queue.stop()

    virtual_time.run(story())


def test_a_key_with_a_status_and_one_that_failed_are_not_held() -> None:
    async def story() -> None:
        crowd = Crowd(takes=5.0)
        said, failed, silent, *_ = crowd.add(100)
        crowd.said.add(said)
        crowd.fails.add(failed)
        async with asyncio.TaskGroup() as tasks:
            for key in (said, failed, silent):
                tasks.create_task(crowd.reports(key, 10.0))
        assert crowd.looks[said][0] - crowd.made[said] < 1.0
        assert crowd.looks[failed][0] - crowd.made[failed] < 2.0
        assert silent not in crowd.looks
        crowd.queue.add(silent, urgent=True)
        await asyncio.sleep(0.1)
        assert crowd.looks[silent], "somebody waits for it"
        await crowd.queue.stop()

    virtual_time.run(story())


def test_workers_that_found_nothing_are_woken_when_nobody_is_new_any_more() -> None:
    async def story() -> None:
        crowd = Crowd(takes=5.0, look_takes=1.0)
        keys = crowd.add(13)  # twelve are worked on, and one waits
        await asyncio.sleep(7.0)
        for key in keys[:12]:
            crowd.queue.add(key)
        await asyncio.sleep(2.9)
        assert not crowd.looks
        await asyncio.sleep(0.2)
        assert len(crowd.looks) == 12, "side by side"
        await crowd.queue.stop()

    virtual_time.run(story())


def test_a_key_is_not_held_longer_although_others_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdcluster_operator.runtime.lines.LOOK_HANGS_SECONDS", math.inf)

    async def story() -> None:
        crowd = Crowd(takes=300.0)
        crowd.add(NEW_OF_ONE - 1)
        await asyncio.sleep(0.1)
        quick, crowd.takes = Key("ns", "quick"), 1.0
        crowd.queue.add(quick)
        await asyncio.sleep(2.0)
        crowd.queue.add(quick)
        await asyncio.sleep(HOLD_SECONDS - 2.0)
        assert quick not in crowd.looks
        await asyncio.sleep(2.0)
        assert crowd.looks[quick], "workers are free"
        await crowd.queue.stop()

    virtual_time.run(story())


def test_a_key_is_not_held_longer_behind_one_that_was_made_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdcluster_operator.runtime.lines.LOOK_HANGS_SECONDS", math.inf)
    made: set[str] = set()
    now = [0.0]
    lines: Lines[str] = Lines(4, str, lambda key: key not in made, lambda _: True, lambda: now[0])
    for key in "abc":
        lines.add(key, urgent=False)
        assert lines.take() == key
    for key, moment in (("a", 0.0), ("b", 20.0)):
        now[0] = moment
        made.add(key)
        assert lines.done(key, failed=False)
    for key in "ba":
        lines.add(key, urgent=False)
    assert lines.take() is None
    now[0] = HOLD_SECONDS
    assert [lines.take(), lines.take()] == ["a", None]
    now[0] = 20.0 + HOLD_SECONDS
    assert lines.take() == "b"


def test_a_key_waits_in_one_line() -> None:
    made: set[str] = set()
    lines: Lines[str] = Lines(8, str, lambda key: key not in made, lambda _: True, lambda: 0.0)
    for key in "abcdefghij":
        lines.add(key, urgent=False)
    assert [lines.take() for _ in range(7)] == [*"abcdef", None], "some workers take no new ones"
    made.update("ab")
    for key in "ab":
        lines.done(key, failed=False)
        lines.add(key, urgent=False)
    lines.add("b", urgent=True)
    lines.add("g", urgent=True)
    lines.add("b", urgent=False)
    assert (len(lines), lines.new) == (6, 3)
    assert [lines.take() for _ in range(5)] == ["b", "h", "g", "i", None], "a is held"
    lines.clear()
    assert len(lines) == 0


def test_a_key_that_need_not_be_held_any_more_does_not_wait_behind_one_that_must() -> None:
    made: set[str] = set()
    silent = set("abcdefgh")
    lines: Lines[str] = Lines(2, str, lambda key: key not in made, silent.__contains__, lambda: 0.0)
    for key in "abc":
        lines.add(key, urgent=False)
    assert [lines.take(), lines.take()] == ["a", "b"]
    made.update("ab")
    for key in "ab":
        lines.done(key, failed=False)
        lines.add(key, urgent=False)
    assert [lines.take(), lines.take()] == ["c", None]
    silent.discard("b")
    lines.add("b", urgent=False)
    assert [lines.take(), lines.take()] == ["b", None]


def test_a_cluster_is_silent_until_it_has_a_status_or_changes() -> None:
    parts: dict[str, Any] = dict.fromkeys(("api", "launchers", "events", "connector", "clock"))

    async def story() -> None:
        loop = ControlLoop(**parts)
        is_silent = loop.queue._lines._is_silent
        metadata = {"namespace": "ns", "name": "c", "uid": "c"}
        key = Key("ns", "c")
        assert not is_silent(key), "it is gone"
        loop.see("ADDED", {"kind": "PDCluster", "metadata": metadata})
        assert is_silent(key)
        loop.see("MODIFIED", {"kind": "PDCluster", "metadata": {**metadata, "generation": 1}})
        assert is_silent(key)
        loop.see("MODIFIED", {"kind": "PDCluster", "metadata": {**metadata, "generation": 2}})
        assert not is_silent(key), "somebody waits for what comes of the change"
        status = {"observedGeneration": 1}
        loop.see("MODIFIED", {"kind": "PDCluster", "metadata": metadata, "status": status})
        assert not is_silent(key)

    virtual_time.run(story())
