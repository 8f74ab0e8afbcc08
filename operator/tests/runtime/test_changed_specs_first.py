"""A spec that changed does not wait behind what else there is to do."""

from __future__ import annotations

from typing import Any

from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.interfaces import Key


def cluster(name: str, generation: int, judged: int | None) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": name, "uid": name, "generation": generation}
    status = {} if judged is None else {"observedGeneration": judged}
    return {"kind": "PDCluster", "metadata": metadata, "status": status}


def take(loop: ControlLoop) -> Key | None:
    """Return the key that would be reconciled next, as if a worker had taken it."""
    return loop.queue.slots.take()


def done(loop: ControlLoop, key: Key) -> None:
    loop.queue.slots.done(key)


async def test_a_watch_puts_a_changed_spec_first() -> None:
    parts: dict[str, Any] = dict.fromkeys(
        ("api_server", "launchers", "events", "connector", "clock")
    )
    loop = ControlLoop(**parts)
    for number in range(50):
        loop.see("ADDED", cluster(f"c-{number}", 1, None))
    loop.see("MODIFIED", cluster("changed", 2, 1))
    assert loop.queue.depth == 51
    assert take(loop) == Key("ns", "changed")


async def test_a_changed_spec_that_has_to_wait_is_first_again_when_it_comes_back() -> None:
    parts: dict[str, Any] = dict.fromkeys(
        ("api_server", "launchers", "events", "connector", "clock")
    )
    loop = ControlLoop(**parts)
    loop.see("MODIFIED", cluster("changed", 2, 1))
    assert take(loop) == Key("ns", "changed")
    done(loop, Key("ns", "changed"))
    for number in range(50):
        loop.see("ADDED", cluster(f"c-{number}", 1, None))
    loop.queue._due(Key("ns", "changed"))
    first = [take(loop) for _ in range(2)]  # the lines take turns
    assert Key("ns", "changed") in first


async def test_a_spec_that_the_answer_to_a_write_shows_first_is_looked_at() -> None:
    """A watch that has to list again tells nothing of it, because this version is known."""
    parts: dict[str, Any] = dict.fromkeys(
        ("api_server", "launchers", "events", "connector", "clock")
    )
    loop = ControlLoop(**parts)

    def told(version: int, generation: int) -> dict[str, Any]:
        found = cluster("c", generation, 1)
        return {**found, "metadata": {**found["metadata"], "resourceVersion": str(version)}}

    loop.see("ADDED", told(5, 1))
    assert take(loop) == Key("ns", "c")
    done(loop, Key("ns", "c"))
    loop.remember({**told(6, 1), "status": {"observedGeneration": 1, "model": "m"}})
    assert not loop.queue.depth, "our own write"
    loop.remember(told(8, 2))
    loop.see("MODIFIED", told(8, 2))
    assert loop.queue.slots._urgent == {"ns": {Key("ns", "c"): None}}
    take(loop)
    done(loop, Key("ns", "c"))
    loop.remember({**told(9, 2), "status": {"observedGeneration": 1, "model": "m"}})
    assert not loop.queue.depth, "nobody has changed the spec since"
    await loop.queue.stop()


async def test_whoever_comes_back_without_a_change_is_not_first() -> None:
    parts: dict[str, Any] = dict.fromkeys(
        ("api_server", "launchers", "events", "connector", "clock")
    )
    loop = ControlLoop(**parts)
    loop.see("ADDED", cluster("known", 1, 1))
    loop.see("MODIFIED", cluster("changed", 2, 1))
    names = ("known", "changed", "gone")
    assert [loop._is_urgent(Key("ns", name)) for name in names] == [False, True, False]
