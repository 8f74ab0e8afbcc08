"""Sweeps over hours, in virtual time: when they list what, and what a failure costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import pytest

import virtual_time
from pdcluster_operator.adapters.api_server.client import NotFound
from pdcluster_operator.adapters.api_server.kinds import WATCHED, Kind
from pdcluster_operator.adapters.api_server.sweep import Sweeper
from pdcluster_operator.adapters.api_server.watch_health import WatchHealth
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.errors import ApiError
from pdcluster_operator.runtime.queue import Key


def now() -> float:
    return asyncio.get_running_loop().time()


class Server:
    """Lists one PDCluster. ``fail`` holds the errors of the next lists."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.asked: list[tuple[str, tuple[str | None, ...]]] = []
        self.fail: list[ApiError] = []
        self.absent: set[str] = set()
        self.refused: set[str | None] = set()  # namespaces without rights
        self.clusters = {"ns/a"}
        self.broken: set[str] = set()
        self.meanwhile: Callable[[], None] = lambda: None

    async def list(self, kind: Kind, namespaces: Collection[str | None]) -> list[dict[str, Any]]:
        if kind is WATCHED[0]:
            self.began.append(now())
            self.meanwhile()
        self.asked.append((kind.name, tuple(namespaces)))
        [namespace] = namespaces
        if namespace in self.refused:
            raise ApiError("Forbidden", f"cannot list {kind.name}")
        if self.fail:
            raise self.fail.pop(0)
        if kind.name in self.broken:
            raise ApiError("InternalError", "its conversion webhook answers nobody")
        if kind.name in self.absent:
            raise NotFound("no such kind")
        if kind.name != "PDCluster":
            return []
        found = (one.split("/") for one in sorted(self.clusters))
        return [cluster(*one) for one in found if namespace in (None, one[0])]


def cluster(namespace: str, name: str) -> dict[str, Any]:
    metadata = {"namespace": namespace, "name": name, "uid": name, "resourceVersion": "5"}
    return {"kind": "PDCluster", "metadata": metadata}


class Sweeps:
    def __init__(self, *namespaces: str) -> None:
        self.server, self.health, self.swept = Server(), WatchHealth(now), []
        unused: Any = self.server
        self.loop = ControlLoop(
            api=unused, launchers=unused, events=unused, connector=unused, clock=unused
        )
        self.sweeper = Sweeper(
            unused, self.loop, self.health, namespaces, 300.0, lambda: self.swept.append(now())
        )


def test_all_kinds_are_listed_about_every_five_minutes_whatever_fails() -> None:
    async def story() -> None:
        sweeps = Sweeps()
        await sweeps.sweeper.first()
        task = asyncio.create_task(sweeps.sweeper.run())
        await asyncio.sleep(3600.0)
        sweeps.server.fail = [ApiError("Timeout", "slow")]
        await asyncio.sleep(3600.0)
        began = sweeps.server.began
        pauses = [later - sooner for sooner, later in pairwise(began)]
        assert 270.0 <= min(pauses) < 300.0 < max(pauses) <= 330.0
        assert len(sweeps.swept) == len(sweeps.server.began)
        task.cancel()

    virtual_time.run(story())


def test_a_kind_that_cannot_be_listed_keeps_no_other_from_it() -> None:
    async def story() -> None:
        sweeps = Sweeps()
        await sweeps.sweeper.first()
        sweeps.server.asked.clear()
        sweeps.server.fail = [ApiError("Unreachable", "no answer")] * 3
        task = asyncio.create_task(sweeps.sweeper.run())
        await asyncio.sleep(331.0)
        task.cancel()
        assert [name for name, _ in sweeps.server.asked] == [kind.name for kind in WATCHED]
        assert sweeps.loop.store.keys() == [Key("ns", "a")], "it was not listed, and is not gone"
        assert len(sweeps.swept) == 2

    virtual_time.run(story())


def test_the_operator_starts_although_pod_groups_cannot_be_listed() -> None:
    async def story() -> None:
        sweeps = Sweeps()
        sweeps.server.broken = {"PodGroup"}
        await sweeps.sweeper.first()
        assert sweeps.sweeper.done
        assert sweeps.server.began == [0.0], "at once"
        assert sweeps.loop.store.keys() == [Key("ns", "a")]

    virtual_time.run(story())


def test_the_operator_does_not_start_without_the_scalers_that_are_there() -> None:
    """It would take the replicas of the spec, and delete what a scaler has added."""

    async def story() -> None:
        sweeps = Sweeps()
        sweeps.server.broken = {"PrefillScaler"}
        task = asyncio.create_task(sweeps.sweeper.first())
        await asyncio.sleep(60.0)
        assert not sweeps.sweeper.done
        sweeps.server.broken.clear()
        await task
        assert sweeps.sweeper.done

    virtual_time.run(story())


@pytest.mark.parametrize("error", [NotFound("no CRD"), ApiError("Unreachable", "no answer")])
def test_the_first_sweep_is_tried_every_two_seconds_until_it_is_done(error: ApiError) -> None:
    async def story() -> None:
        sweeps = Sweeps()
        sweeps.server.fail = [error, error]
        task = asyncio.create_task(sweeps.sweeper.first())
        await asyncio.sleep(3.9)
        assert not sweeps.sweeper.done
        await task
        assert sweeps.sweeper.done
        assert sweeps.server.began == [0.0, 2.0, 4.0]
        assert sweeps.swept == [4.0]
        await sweeps.sweeper.first()
        assert len(sweeps.server.began) == 3, "it is done"

    virtual_time.run(story())


@pytest.mark.parametrize(("namespaces", "asked"), [((), (None,)), (("ns", "b"), ("ns", "b"))])
def test_what_is_listed_is_known_queued_and_owed_by_the_watch(
    namespaces: tuple[str, ...], asked: tuple[str | None, ...]
) -> None:
    async def story() -> None:
        sweeps = Sweeps(*namespaces)
        sweeps.server.absent = {"PrefillScaler"}
        await sweeps.sweeper.first()
        assert sweeps.server.asked == [(kind.name, (one,)) for one in asked for kind in WATCHED]
        assert sweeps.loop.store.keys() == [Key("ns", "a")]
        assert sweeps.loop.queue.depth == 1
        assert not sweeps.loop.store.serves("PrefillScaler")
        assert sweeps.loop.store.serves("Pod")
        task = asyncio.create_task(sweeps.sweeper.run())
        await asyncio.sleep(330.0 + 61.0)
        task.cancel()
        assert "the watch of PDCluster is dead" in str(sweeps.health.trouble())

    virtual_time.run(story())


def test_a_namespace_without_rights_keeps_no_other_from_being_served() -> None:
    """Somebody has deleted it, and the operator's RoleBinding with it."""

    async def story() -> None:
        sweeps = Sweeps("a", "b")
        sweeps.server.clusters = {"a/x", "a/y", "b/z"}
        await sweeps.sweeper.first()
        task = asyncio.create_task(sweeps.sweeper.run())
        sweeps.server.refused, sweeps.server.clusters = {"b"}, {"a/x"}
        await asyncio.sleep(331.0)
        assert sweeps.loop.store.keys() == [Key("a", "x"), Key("b", "z")]
        assert sweeps.loop.works_in("b"), "it was not listed, and what was known stays"
        task.cancel()

    virtual_time.run(story())


def test_nothing_is_done_in_a_namespace_that_was_never_listed_whole() -> None:
    async def story() -> None:
        sweeps = Sweeps("a", "b")
        sweeps.server.clusters, sweeps.server.refused = {"a/x"}, {"b"}
        await sweeps.sweeper.first()
        assert sweeps.sweeper.done
        assert now() == 0.0
        sweeps.loop.see("ADDED", cluster("b", "z"))  # the operator may have regained this right
        assert sweeps.loop.works_in("a")
        assert not sweeps.loop.works_in("b"), "its PrefillScalers may be unknown"
        assert sweeps.loop.unlisted == {"b"}
        task = asyncio.create_task(sweeps.sweeper.run())
        await asyncio.sleep(100.0)
        assert not sweeps.loop.works_in("b")
        assert len(sweeps.swept) == 1
        sweeps.server.clusters, sweeps.server.refused = {"a/x", "b/z"}, set()
        woken: list[Key] = []
        sweeps.loop.queue.add = lambda key, **_: woken.append(key)  # type: ignore[method-assign]
        await asyncio.sleep(31.0)
        assert sweeps.loop.works_in("b")
        assert not sweeps.loop.unlisted
        assert Key("b", "z") in woken
        assert Key("a", "x") not in woken, "the period of all is not over"
        task.cancel()

    virtual_time.run(story())


def test_the_operator_waits_if_no_namespace_can_be_listed(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        sweeps = Sweeps("a", "b")
        sweeps.server.refused = {"a", "b"}
        task = asyncio.create_task(sweeps.sweeper.first())
        await asyncio.sleep(600.0)
        assert not sweeps.sweeper.done
        assert len(caplog.messages) == 2, "each namespace is told of once"
        assert all("cannot list" in line for line in caplog.messages)
        for namespace, line in zip("ab", caplog.messages, strict=True):
            assert f"PDClusters in namespace {namespace} until" in line
        sweeps.server.refused = {"b"}
        await task
        assert sweeps.sweeper.done

    virtual_time.run(story())


def test_a_watch_owes_nothing_before_it_was_started() -> None:
    """The kubelet would kill the operator while it waits for a slow API server, again and again."""

    async def story() -> None:
        sweeps = Sweeps()
        sweeps.server.broken = {"PrefillScaler"}
        task = asyncio.create_task(sweeps.sweeper.first())
        for _ in range(600):
            await asyncio.sleep(1.0)
            assert sweeps.health.trouble() is None
        sweeps.server.broken.clear()
        await task
        task = asyncio.create_task(sweeps.sweeper.run())
        await asyncio.sleep(269.0)
        assert sweeps.health.trouble() is None, "a LIST of a watch may be as slow as the sweep's"
        await asyncio.sleep(61.0 + 61.0)
        task.cancel()
        assert "the watch of PDCluster is dead" in str(sweeps.health.trouble())

    virtual_time.run(story())


def test_what_a_watch_reports_while_a_list_is_on_its_way_stays() -> None:
    metadata = {"namespace": "ns", "name": "new", "uid": "n", "resourceVersion": "9"}

    async def story() -> None:
        sweeps = Sweeps()
        new = {"kind": "PDCluster", "metadata": metadata}
        sweeps.server.meanwhile = lambda: sweeps.loop.see("ADDED", new)
        await sweeps.sweeper.first()
        assert set(sweeps.loop.store.keys()) == {Key("ns", "a"), Key("ns", "new")}

    virtual_time.run(story())
