"""Reflectors over hours, in virtual time: when they list what, and what a failure costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from itertools import pairwise
from random import Random
from typing import Any

import pytest

import virtual_time
from pdcluster_operator.adapters.api_server.client import KubeClient, NotFound
from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER, PREFILL_SCALER, WATCHED, Kind
from pdcluster_operator.adapters.api_server.reflector import LONGEST, SOON, Reflectors
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.interfaces import ApiError, Key

AGE = 300.0


def now() -> float:
    return asyncio.get_running_loop().time()


class Server:
    """Lists one PDCluster, and has watches that report nothing but bookmarks."""

    def __init__(self) -> None:
        self.asked: dict[tuple[str, str | None], list[float]] = {}
        self.fail: set[str] = set()  # kinds
        self.absent: set[str] = set()
        self.refused: set[str | None] = set()  # namespaces without rights
        self.clusters = {"ns/a"}
        self.watched: set[str] = set()
        self.version = 5
        self.meanwhile: Callable[[], None] = lambda: None

    async def call(self, method: str, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        assert method == "GET"
        kind = next(one for one in WATCHED if path.endswith("/" + one.plural))
        namespace = path.partition("/namespaces/")[2].partition("/")[0] or None
        self.asked.setdefault((kind.name, namespace), []).append(now())
        if namespace in self.refused:
            raise ApiError("Forbidden", f"cannot list {kind.name}")
        if kind.name in self.absent:
            raise NotFound("no such kind")
        if kind.name in self.fail:
            raise ApiError("InternalError", "its conversion webhook answers nobody")
        found = (one.split("/") for one in sorted(self.clusters if kind is PDCLUSTER else ()))
        items = [cluster(*one, self.version) for one in found if namespace in (None, one[0])]
        self.meanwhile()
        return {"metadata": {"resourceVersion": str(self.version)}, "items": items}

    pages = KubeClient.pages

    async def lines(self, path: str, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        self.watched.add(path.rpartition("/")[2])
        ends = now() + float(query["timeoutSeconds"])
        while (left := ends - now()) > 0:
            await asyncio.sleep(min(60.0, left))
            yield b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "5"}}}'


def cluster(namespace: str, name: str, version: int = 5) -> dict[str, Any]:
    metadata = {"namespace": namespace, "name": name, "uid": name, "resourceVersion": str(version)}
    return {"kind": "PDCluster", "metadata": metadata}


class Running:
    def __init__(self, *namespaces: str, elsewhere: Collection[Kind] = ()) -> None:
        self.server = Server()
        unused: Any = self.server
        self.loop = ControlLoop(
            api_server=unused, launchers=unused, events=unused, connector=unused, clock=unused
        )
        self.reflectors = Reflectors(unused, self.loop, namespaces, AGE, elsewhere)
        self.task: asyncio.Task[None] | None = None

    def start(self) -> Running:
        self.task = asyncio.create_task(self.reflectors.run())
        return self

    def lists(self, kind: str = "PDCluster", namespace: str | None = None) -> list[float]:
        return self.server.asked.get((kind, namespace), [])

    def stop(self) -> None:
        assert self.task is not None
        if self.task.done():
            self.task.result()
        self.task.cancel()


def test_all_kinds_are_listed_about_every_five_minutes_whatever_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("random.uniform", Random(7).uniform)

    async def story() -> None:
        run = Running().start()
        await asyncio.sleep(3600.0)
        for kind in WATCHED:
            pauses = [later - sooner for sooner, later in pairwise(run.lists(kind.name))]
            assert 0.9 * AGE <= min(pauses) < AGE < max(pauses) <= 1.1 * AGE + 1.0
        run.server.fail = {"Pod"}
        await asyncio.sleep(3600.0)
        run.server.fail = set()
        await asyncio.sleep(3600.0)
        pauses = [later - sooner for sooner, later in pairwise(run.lists("Service"))]
        assert max(pauses) <= 1.1 * AGE + 1.0, "one that cannot be listed keeps no other from it"
        assert run.loop.store.keys() == [Key("ns", "a")]
        run.stop()

    virtual_time.run(story())


def test_the_operator_starts_although_pod_groups_cannot_be_listed() -> None:
    async def story() -> None:
        run = Running()
        run.server.fail = {"PodGroup"}
        run.start()
        await run.reflectors.ready.wait()
        assert now() == 0.0, "at once"
        assert run.loop.store.keys() == [Key("ns", "a")]
        run.stop()

    virtual_time.run(story())


@pytest.mark.parametrize("kind", ["PrefillScaler", "PDCluster", "Pod"])
def test_the_operator_does_not_start_without_objects_that_are_there(kind: str) -> None:
    """Without its scaler a PDCluster takes the replicas of its spec: engines would be deleted."""

    async def story() -> None:
        run = Running()
        run.server.fail = {kind}
        run.start()
        await asyncio.sleep(60.0)
        assert not run.reflectors.ready.is_set()
        tries = [later - sooner for sooner, later in pairwise(run.lists(kind))]
        assert max(tries) <= LONGEST
        run.server.fail = set()
        await asyncio.sleep(LONGEST)
        assert run.reflectors.ready.is_set()
        run.stop()

    virtual_time.run(story())


def test_the_operator_waits_for_the_crd(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        run = Running()
        run.server.absent = {"PDCluster"}
        run.start()
        await asyncio.sleep(600.0)
        assert not run.reflectors.ready.is_set()
        [line] = caplog.messages
        assert "the CRD of PDCluster is not installed" in line
        run.server.absent = set()
        await asyncio.sleep(LONGEST)
        assert run.reflectors.ready.is_set()
        run.stop()

    virtual_time.run(story())


@pytest.mark.parametrize(("namespaces", "asked"), [((), (None,)), (("ns", "b"), ("ns", "b"))])
def test_what_is_listed_is_known_and_queued(
    namespaces: tuple[str, ...], asked: tuple[str | None, ...]
) -> None:
    async def story() -> None:
        run = Running(*namespaces)
        run.server.absent = {"PrefillScaler"}
        run.start()
        await run.reflectors.ready.wait()
        assert set(run.server.asked) == {(kind.name, one) for one in asked for kind in WATCHED}
        assert all(len(times) == 1 for times in run.server.asked.values())
        assert run.loop.store.keys() == [Key("ns", "a")]
        assert run.loop.queue.depth == 1
        assert not run.loop.store.serves("PrefillScaler")
        assert run.loop.store.serves("Pod")
        await asyncio.sleep(0.8 * AGE)
        assert len(run.lists("PrefillScaler", asked[0])) == 1, "it may come, but not soon"
        run.stop()

    virtual_time.run(story())


def test_a_namespace_without_rights_keeps_no_other_from_being_served() -> None:
    """Somebody has deleted it, and the operator's RoleBinding with it."""

    async def story() -> None:
        run = Running("a", "b")
        run.server.clusters = {"a/x", "a/y", "b/z"}
        run.start()
        await run.reflectors.ready.wait()
        run.server.refused, run.server.clusters, run.server.version = {"b"}, {"a/x"}, 6
        await asyncio.sleep(1.2 * AGE)
        assert run.loop.store.keys() == [Key("a", "x"), Key("b", "z")]
        assert run.loop.works_in("b"), "it was not listed, and what was known stays"
        run.stop()

    virtual_time.run(story())


def test_nothing_is_done_in_a_namespace_that_was_never_listed_whole() -> None:
    async def story() -> None:
        run = Running("a", "b")
        assert run.loop.unlisted == {"a", "b"}
        run.server.clusters, run.server.refused = {"a/x"}, {"b"}
        run.start()
        await run.reflectors.ready.wait()
        assert now() == 0.0
        run.loop.see("ADDED", cluster("b", "z"))  # the operator may have regained this right
        assert run.loop.works_in("a")
        assert not run.loop.works_in("b"), "its PrefillScalers may be unknown"
        assert run.loop.unlisted == {"b"}
        await asyncio.sleep(100.0)
        assert not run.loop.works_in("b")
        run.server.clusters, run.server.refused = {"a/x", "b/z"}, set()
        woken: list[Key] = []
        run.loop.queue.add = lambda key, **_: woken.append(key)  # type: ignore[method-assign]
        await asyncio.sleep(2 * LONGEST)
        assert run.loop.works_in("b")
        assert not run.loop.unlisted
        assert Key("b", "z") in woken
        assert Key("a", "x") not in woken, "its age is not reached"
        run.stop()

    virtual_time.run(story())


def test_the_operator_waits_if_no_namespace_can_be_listed(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        run = Running("a", "b")
        run.server.refused = {"a", "b"}
        run.start()
        await asyncio.sleep(600.0)
        assert not run.reflectors.ready.is_set()
        assert len(caplog.messages) == 2, "each namespace is logged once"
        assert all("cannot list" in line for line in caplog.messages)
        for namespace, line in zip("ab", caplog.messages, strict=True):
            assert f"PDClusters in namespace {namespace} until" in line
        run.server.refused = {"b"}
        await asyncio.sleep(2 * LONGEST)
        assert run.reflectors.ready.is_set()
        run.stop()

    virtual_time.run(story())


def test_what_a_watch_reports_while_a_list_is_on_its_way_stays() -> None:
    metadata = {"namespace": "ns", "name": "new", "uid": "n", "resourceVersion": "9"}

    async def story() -> None:
        run = Running()
        new = {"kind": "PDCluster", "metadata": metadata}
        run.server.meanwhile = lambda: run.loop.see("ADDED", new)
        run.start()
        await run.reflectors.ready.wait()
        assert set(run.loop.store.keys()) == {Key("ns", "a"), Key("ns", "new")}
        run.stop()

    virtual_time.run(story())


def test_what_kopf_watches_is_listed_after_each_list_of_kopf_and_not_watched() -> None:
    async def story() -> None:
        run = Running(elsewhere=(PDCLUSTER, PREFILL_SCALER)).start()
        await run.reflectors.ready.wait()
        run.reflectors.see("MODIFIED", cluster("ns", "a"))
        await asyncio.sleep(61.0)  # a bookmark ends the watch
        run.server.clusters = {"ns/b"}  # in a gap of kopf's watch
        run.server.version = 6
        run.server.watched.clear()
        for name in ("b", "b"):
            run.reflectors.see(None, cluster("ns", name, 6))
        assert set(run.loop.store.keys()) == {Key("ns", "a"), Key("ns", "b")}
        await asyncio.sleep(SOON + 0.1)
        assert run.loop.store.keys() == [Key("ns", "b")]
        assert run.lists() == [0.0, 61.0 + SOON]
        run.reflectors.see("MODIFIED", cluster("ns", "b", 7))
        run.reflectors.see("DELETED", cluster("ns", "b", 8))
        assert run.loop.store.keys() == []
        await asyncio.sleep(3600.0)
        assert len(run.lists()) > 10, "its age counts, too"
        assert "pdclusters" not in run.server.watched
        assert "prefillscalers" in run.server.watched, "kopf has reported none"
        assert "pods" in run.server.watched
        run.stop()

    virtual_time.run(story())


def test_a_kind_that_kopf_did_not_find_at_its_start_is_watched_when_it_comes() -> None:
    async def story() -> None:
        run = Running(elsewhere=(PDCLUSTER, PREFILL_SCALER))
        run.server.absent = {"PrefillScaler"}
        run.start()
        await run.reflectors.ready.wait()
        run.server.absent = set()
        run.reflectors.see("ADDED", cluster("ns", "b"))
        await asyncio.sleep(1.0)
        run.server.watched.clear()
        await asyncio.sleep(1.2 * AGE)
        assert "prefillscalers" in run.server.watched
        assert "pdclusters" not in run.server.watched
        run.stop()

    virtual_time.run(story())
