"""A spec that changed does not wait behind what else there is to do."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.plan.changed_specs import is_changed_spec
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
