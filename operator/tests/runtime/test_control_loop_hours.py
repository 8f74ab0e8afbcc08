"""The control loop over an hour, in virtual time: which clusters are looked at, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import virtual_time
from pdcluster_operator.plan.types import Place
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.interfaces import Key
from pdcluster_operator.runtime.queue import Backoff


class Looks:
    """A control loop whose reconciles do nothing but take notes."""

    def __init__(self, **options: Any) -> None:
        unused: Any = object()
        self.moments: dict[Key, list[float]] = {}
        self.fails = False
        self.again_after: float | None = None
        self.worked: list[tuple[float, bool]] = []
        self.loop = ControlLoop(
            api_server=unused, launchers=unused, events=unused, connector=unused, clock=unused,
            worked=lambda seconds, failed: self.worked.append((seconds, failed)), **options,
        )  # fmt: skip
        self.loop._reconciler.reconcile = self._look  # type: ignore[method-assign]
        self.forgotten: list[Key] = []
        self.loop.monitor.forget = self.forgotten.append  # type: ignore[method-assign]

    async def _look(self, key: Key) -> float | None:
        self.moments.setdefault(key, []).append(asyncio.get_running_loop().time())
        if self.fails:
            raise RuntimeError("no answer")
        return self.again_after

    def see(self, name: str, namespace: str = "ns", operator_class: str = "") -> Key:
        metadata = {"namespace": namespace, "name": name, "uid": name}
        spec = {"operatorClass": operator_class} if operator_class else {}
        manifest = {"kind": "PDCluster", "metadata": metadata, "spec": spec}
        self.loop.see("ADDED", manifest)
        return Key(namespace, name)


def play(story: Callable[[Looks], Awaitable[None]], **options: Any) -> Looks:
    async def played() -> Looks:
        looks = Looks(**options)
        looks.loop.start()
        await story(looks)
        await looks.loop.stop()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, "a stopped loop leaves no task behind"
        return looks

    return virtual_time.run(played())


def test_each_cluster_is_looked_at_every_five_minutes_and_not_all_at_once() -> None:
    async def story(looks: Looks) -> None:
        keys = [looks.see(f"c{number}") for number in range(300)]
        looks.again_after = 1000.0
        await asyncio.sleep(3600.0)
        for key in keys:
            assert looks.moments[key][0] == 0.0
            gaps = [after - before for before, after in pairwise(looks.moments[key])]
            assert all(300.0 <= gap <= 330.0 for gap in gaps)
            assert len(gaps) in (10, 11, 12)
        second = sorted(looks.moments[key][1] - 300.0 for key in keys)
        for begin in range(0, 30, 5):
            assert 20 < sum(begin <= moment < begin + 5 for moment in second) < 90

    play(story)


def test_a_cluster_whose_events_come_often_is_not_looked_at_once_more() -> None:
    async def story(looks: Looks) -> None:
        key = looks.see("one")
        for _ in range(10):
            await asyncio.sleep(200.0)
            looks.loop.queue.add(key)
        await asyncio.sleep(1.0)
        assert looks.moments[key] == [200.0 * number for number in range(11)]

    play(story)


def test_a_cluster_that_is_gone_is_not_looked_at_again() -> None:
    async def story(looks: Looks) -> None:
        key = looks.see("one")
        await asyncio.sleep(1.0)
        looks.loop.see(
            "DELETED", {"kind": "PDCluster", "metadata": {**key._asdict(), "uid": "one"}}
        )
        await asyncio.sleep(1000.0)
        assert len(looks.moments[key]) == 2
        assert looks.loop.queue._timers == {}

    play(story)


def test_the_metric_counts_each_look_and_which_of_them_failed() -> None:
    async def story(looks: Looks) -> None:
        looks.see("one")
        await asyncio.sleep(1.0)
        looks.fails = True
        looks.see("two")
        await asyncio.sleep(0.1)

    looks = play(story)
    assert [failed for _, failed in looks.worked] == [False, True]
    assert all(0.0 <= seconds < 60.0 for seconds, _ in looks.worked)


def test_a_loop_tries_again_when_it_was_told_to() -> None:
    async def story(looks: Looks) -> None:
        looks.fails = True
        key = looks.see("one")
        await asyncio.sleep(160.0)
        assert looks.moments[key] == [0.0, 50.0, 150.0]

    play(story, backoff=Backoff(first=50.0, jitter=0.0))


def test_only_clusters_of_its_class_in_namespaces_that_it_holds_are_looked_at() -> None:
    held = {"ns"}

    async def story(looks: Looks) -> None:
        ours = looks.see("ours", operator_class="blue")
        theirs = looks.see("theirs", operator_class="green")
        classless = looks.see("classless")
        elsewhere = looks.see("elsewhere", namespace="other", operator_class="blue")
        await asyncio.sleep(1.0)
        assert set(looks.moments) == {ours}
        assert set(looks.forgotten) == {theirs, classless, elsewhere}, "others follow them"
        assert looks.loop.works_in("ns")
        assert not looks.loop.works_in("empty")
        held.add("other")
        looks.loop.wake("other")
        await asyncio.sleep(1.0)
        assert len(looks.moments[elsewhere]) == 1
        assert len(looks.moments[ours]) == 1, "only one namespace was woken"

    play(story, holds=held.__contains__, place=Place(operator_class="blue"))


def test_a_cluster_that_is_gone_is_looked_at_whoever_worked_on_it() -> None:
    async def story(looks: Looks) -> None:
        gone = Key("other", "gone")
        looks.loop.queue.add(gone)
        await asyncio.sleep(0.1)
        assert list(looks.moments) == [gone], "what it left in memory is forgotten"

    play(story, holds={"ns"}.__contains__)


def test_a_loop_that_stops_asks_no_launcher_any_more() -> None:
    stopped: list[float] = []

    async def story(looks: Looks) -> None:
        async def stop() -> None:
            stopped.append(asyncio.get_running_loop().time())

        looks.loop.monitor.stop = stop  # type: ignore[method-assign]

    play(story)
    assert len(stopped) == 1
