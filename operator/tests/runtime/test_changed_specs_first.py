"""A spec that changed does not wait behind what else there is to do."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.plan.queueing.changed_specs import is_changed_spec
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.queue import Key


def cluster(name: str, generation: int, judged: int | None) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": name, "uid": name, "generation": generation}
    status = {} if judged is None else {"observedGeneration": judged}
    return {"kind": "PDCluster", "metadata": metadata, "status": status}


@pytest.mark.parametrize(
    ("manifest", "changed"),
    [
        (cluster("new", 1, None), False),
        (cluster("known", 1, 1), False),
        (cluster("changed", 2, 1), True),
        ({**cluster("changed", 2, 1), "kind": "StatefulSet"}, False),
        ({"kind": "PDCluster", "metadata": {"name": "bare"}, "status": None}, False),
    ],
)
def test_only_a_spec_that_the_status_does_not_know_is_a_change(
    manifest: dict[str, Any], changed: bool
) -> None:
    assert is_changed_spec(manifest) is changed


async def test_a_watch_puts_a_changed_spec_first() -> None:
    parts: dict[str, Any] = dict.fromkeys(("api", "launchers", "events", "connector", "clock"))
    loop = ControlLoop(**parts)
    for number in range(50):
        loop.see("ADDED", cluster(f"c-{number}", 1, None))
    loop.see("MODIFIED", cluster("changed", 2, 1))
    assert loop.queue.depth == 51
    assert await loop.queue._next() == Key("ns", "changed")


async def test_a_changed_spec_that_has_to_wait_is_first_again_when_it_comes_back() -> None:
    parts: dict[str, Any] = dict.fromkeys(("api", "launchers", "events", "connector", "clock"))
    loop = ControlLoop(**parts)
    loop.see("MODIFIED", cluster("changed", 2, 1))
    assert await loop.queue._next() == Key("ns", "changed")
    loop.queue._running.clear()
    for number in range(50):
        loop.see("ADDED", cluster(f"c-{number}", 1, None))
    loop.queue._due(Key("ns", "changed"))
    first = [await loop.queue._next() for _ in range(2)]  # the lines take turns
    assert Key("ns", "changed") in first


async def test_a_cluster_is_new_until_something_is_made_for_it() -> None:
    parts: dict[str, Any] = dict.fromkeys(("api", "launchers", "events", "connector", "clock"))
    loop = ControlLoop(**parts)
    loop.see("ADDED", cluster("known", 1, 1))
    for name in ("new", "made"):
        loop.see("ADDED", cluster(name, 1, None))
    assert loop.queue.new == 2
    owner = {"kind": "PDCluster", "name": "made", "uid": "made", "controller": True}
    child = {"namespace": "ns", "name": "made-x", "uid": "x", "ownerReferences": [owner]}
    for _ in range(3):
        await loop.queue._next()
    loop.queue._running.clear()
    loop.see("ADDED", {"kind": "Service", "metadata": child})
    loop.see("MODIFIED", cluster("new", 1, None))
    assert (loop.queue.new, loop.queue.depth) == (1, 2)


def child(kind: str, version: int, **status: Any) -> dict[str, Any]:
    labels = {"pdcluster.dev/cluster": "c"}
    metadata: dict[str, Any] = {"namespace": "ns", "name": "x", "uid": "x", "labels": labels}
    metadata["resourceVersion"] = str(version)
    return {"kind": kind, "metadata": metadata, "status": status}


@pytest.mark.parametrize("available", ["False", "True"])
async def test_what_becomes_of_the_pods_of_a_start_is_gathered(available: str) -> None:
    parts: dict[str, Any] = dict.fromkeys(("api", "launchers", "events", "connector", "clock"))
    loop = ControlLoop(**parts)
    known = cluster("c", 1, 1)
    known["status"]["conditions"] = [{"type": "Available", "status": available}]
    loop.see("ADDED", known)
    assert await loop.queue._next() == Key("ns", "c")
    loop.queue._running.clear()
    gathered = available == "False"
    for version, kind in enumerate(("Pod", "StatefulSet", "Deployment"), 5):
        loop.see("MODIFIED", child(kind, version, podIP="10.0.0.1"))
        assert loop.queue.depth == (not gathered)
    assert len(loop.queue._timers) == gathered, "one look for all of them"
    loop.see("MODIFIED", child("Deployment", 9, availableReplicas=1))
    assert loop.queue.depth == 1, "this may be the last thing that was missing"
    await loop.queue._next()
    assert not loop.queue._timers
    loop.queue._running.clear()
    loop.see("DELETED", child("Pod", 10))
    assert loop.queue.depth == 1
    await loop.queue.stop()


async def test_a_spec_that_the_answer_to_a_write_shows_first_is_looked_at() -> None:
    """A watch that has to list again tells nothing of it, because this version is known."""
    parts: dict[str, Any] = dict.fromkeys(("api", "launchers", "events", "connector", "clock"))
    loop = ControlLoop(**parts)

    def told(version: int, generation: int) -> dict[str, Any]:
        found = cluster("c", generation, 1)
        return {**found, "metadata": {**found["metadata"], "resourceVersion": str(version)}}

    loop.see("ADDED", told(5, 1))
    assert await loop.queue._next() == Key("ns", "c")
    loop.queue._running.clear()
    loop.remember({**told(6, 1), "status": {"observedGeneration": 1, "model": "m"}})
    assert not loop.queue.depth, "our own write"
    loop.remember(told(8, 2))
    loop.see("MODIFIED", told(8, 2))
    assert loop.queue._lines._urgent.holds("ns", Key("ns", "c"))
    await loop.queue._next()
    loop.queue._running.clear()
    loop.remember({**told(9, 2), "status": {"observedGeneration": 1, "model": "m"}})
    assert not loop.queue.depth, "nobody has changed the spec since"
    await loop.queue.stop()


async def test_whoever_comes_back_without_a_change_is_not_first() -> None:
    parts: dict[str, Any] = dict.fromkeys(("api", "launchers", "events", "connector", "clock"))
    loop = ControlLoop(**parts)
    loop.see("ADDED", cluster("known", 1, 1))
    loop.see("MODIFIED", cluster("changed", 2, 1))
    names = ("known", "changed", "gone")
    assert [loop._is_urgent(Key("ns", name)) for name in names] == [False, True, False]
