"""The collector deletes a ConfigMap only after a look, and only the version that it saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

import virtual_time
from pdcluster_operator.adapters import operator_process
from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.api.object_names import UNUSED_ANNOTATION
from pdcluster_operator.plan.connectors import KEEP_SECONDS
from pdcluster_operator.plan.types import Apply, Delete
from pdcluster_operator.runtime.interfaces import ApiError, Conflict
from pdcluster_operator.runtime.store import Store

NAME = "pdcluster-connector-aaaaaaaaaaaaaaaa"
NOW = 1_800_000_000.0


class Server:
    """Says what is mounted, and writes down what it was told; it may refuse."""

    def __init__(self, *mounting: dict[str, Any]) -> None:
        self.mounting = mounting
        self.told: list[tuple[str, ...]] = []
        self.refuse: Callable[[str], None] = lambda _: None

    async def list_mounting(self, namespace: str) -> tuple[dict[str, Any], ...]:
        self.told.append(("look", namespace))
        return self.mounting

    async def mark_connector(self, step: Apply) -> None:
        metadata = step.manifest["metadata"]
        self.refuse(metadata["namespace"])
        since = metadata["annotations"][UNUSED_ANNOTATION]
        self.told.append(("mark", metadata["namespace"], since, metadata["resourceVersion"]))

    async def delete(self, step: Delete) -> None:
        self.refuse(step.namespace)
        assert (step.kind, step.name) == ("ConfigMap", NAME)
        self.told.append(("delete", step.namespace, step.uid, step.resource_version))


def connector(namespace: str, since: str = "") -> dict[str, Any]:
    metadata = {
        "name": NAME,
        "namespace": namespace,
        "uid": f"uid-{namespace}",
        "resourceVersion": "7",
        "labels": {"pdcluster.dev/connector": NAME.rpartition("-")[2]},
        "annotations": {UNUSED_ANNOTATION: since},
    }
    return {"kind": "ConfigMap", "metadata": metadata}


def pod(namespace: str) -> dict[str, Any]:
    metadata = {"name": "a", "namespace": namespace, "uid": "p", "resourceVersion": "1"}
    volumes = [{"configMap": {"name": NAME}}]
    return {"kind": "Pod", "metadata": metadata, "spec": {"volumes": volumes}}


def collect(server: Server, *known: dict[str, Any]) -> list[tuple[str, ...]]:
    store = Store()
    for manifest in known:
        store.put(manifest)
    asyncio.run(operator_process.collect(store, server, NOW, 60.0))
    return server.told


OLD = timestamp(NOW - 60)


def test_what_is_mounted_is_asked_of_nobody(caplog: pytest.LogCaptureFixture) -> None:
    assert collect(Server(), connector("ns"), pod("ns")) == []
    assert caplog.messages == []


def test_what_is_not_mounted_is_marked_then_looked_at_then_deleted() -> None:
    assert collect(Server(), connector("ns"), pod("other")) == [("mark", "ns", timestamp(NOW), "7")]
    assert collect(Server(), connector("ns", timestamp(NOW - 59))) == []
    assert collect(Server(), connector("ns", OLD)) == [
        ("look", "ns"),
        ("delete", "ns", "uid-ns", "7"),
    ]


def test_what_the_server_knows_to_be_mounted_stays() -> None:
    told = collect(Server(pod("ns")), connector("ns", OLD))
    assert told == [("look", "ns"), ("mark", "ns", "", "7")], "and is asked again much later"


def test_a_mark_of_what_is_mounted_is_taken_away() -> None:
    assert collect(Server(), connector("ns", OLD), pod("ns")) == [("mark", "ns", "", "7")]


def test_one_that_changed_meanwhile_keeps_no_other_from_its_turn() -> None:
    for error in (Conflict("changed"), ApiError("Forbidden", "no")):
        server = Server()

        def refuse(namespace: str, error: ApiError = error) -> None:
            if namespace == "a":
                raise error

        server.refuse = refuse
        told = collect(server, connector("a", OLD), connector("b", OLD), connector("c"))
        assert [one[:2] for one in told if one[0] != "look"] == [("delete", "b"), ("mark", "c")]


def test_a_failure_that_nobody_thought_of_keeps_no_other_from_its_turn() -> None:
    server = Server()

    def refuse(namespace: str) -> None:
        if namespace == "a":
            raise AttributeError("'str' object has no attribute 'get'")

    server.refuse = refuse
    told = collect(server, connector("a", OLD), connector("b", OLD))
    assert [one[:2] for one in told if one[0] != "look"] == [("delete", "b")]


def test_a_stored_revision_of_a_stranger_that_is_not_ours_does_not_end_a_round() -> None:
    metadata = {"name": "x", "namespace": "ns", "uid": "x", "resourceVersion": "1"}
    strange = {"kind": "ControllerRevision", "metadata": metadata, "data": {"template": "text"}}
    told = collect(Server(strange), connector("ns", OLD))
    assert told == [("look", "ns"), ("delete", "ns", "uid-ns", "7")]


async def test_each_period_it_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_process, "SHORTEST_SECONDS", 0.01)
    monkeypatch.setattr(operator_process, "LONGEST_SECONDS", 0.01)
    server, store = Server(pod("ns")), Store()
    store.put(connector("ns", timestamp(time.time() - 60)))
    task = asyncio.create_task(operator_process.keep_collecting(store, server, 60.0, time.time))
    async with asyncio.timeout(60):
        while server.told.count(("look", "ns")) < 3:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.005)
    task.cancel()


@pytest.mark.parametrize(("seconds", "deleted"), [(599, False), (600, True)])
def test_one_that_nothing_mounts_is_kept_for_ten_minutes(seconds: int, deleted: bool) -> None:
    server, store = Server(), Store()
    store.put(connector("ns", timestamp(NOW - seconds)))
    asyncio.run(operator_process.collect(store, server, NOW, KEEP_SECONDS))
    assert ("delete" in {one[0] for one in server.told}) is deleted


def test_all_are_looked_at_once_a_minute() -> None:
    async def story() -> None:
        server, store = Server(pod("ns")), Store()
        store.put(connector("ns", timestamp(time.time() - 600)))
        keep = operator_process.keep_collecting(store, server, KEEP_SECONDS, time.time)
        task = asyncio.create_task(keep)
        for minute in range(1, 4):
            await asyncio.sleep(59.5)
            assert server.told.count(("look", "ns")) == minute - 1
            await asyncio.sleep(0.5 + 0.01)
            assert server.told.count(("look", "ns")) == minute
        task.cancel()

    virtual_time.run(story())
