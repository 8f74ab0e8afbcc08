"""Whatever others do to its objects, the operator ends no pair that serves, and tells no lie.

In a course, others act between any two steps of the operator: they delete, change, disown, restore
and replace what it owns, refuse what it writes, kill it and start another version. After each step,
a model judges: no pair that serves ends by the hand of the operator, nothing of others is touched,
and no condition is True that the model calls false. Then the others stop. In the end, all is as in
a fresh cluster, or a condition names the object that somebody has to mend.

``PDCLUSTER_HANDS_SEED=N`` plays the course of one seed again, and prints it. In `make soak`,
``PDCLUSTER_HANDS_SECONDS`` says for how long courses are played.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from hypothesis import settings
from rough_course import QUIET_LOOKS, Course, until_at_rest
from rough_world import Manifest, World
from served_truth import Judge, served_pairs

from pdcluster_operator.api.object_names import (
    CLUSTER_LABEL,
    PAIRING_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
)
from pdcluster_operator.runtime import reconcile

SOAK_SECONDS = 3600.0

_settled: dict[str, World] = {}


async def brought_up(spec: Manifest) -> World:
    """Return a world in which an operator made a cluster of this spec, and nobody disturbed it."""
    text = json.dumps(spec, sort_keys=True)
    if text not in _settled:
        _settled[text] = await until_at_rest(World(spec))
    return _settled[text].twin()


# Fewer in `make fast`, more in `make soak`; see operator/tests/plan/simulated_cluster.py.
COUNT = max(2, 10 * min(settings().max_examples, 400) // 100)
SEEDS = [int(seed) for seed in os.environ.get("PDCLUSTER_HANDS_SEED", "").split()] or range(COUNT)


@pytest.mark.parametrize("seed", SEEDS)
def test_rough_hands_make_the_operator_do_no_harm(seed: int) -> None:
    course = Course(seed, brought_up)
    counts = asyncio.run(course.play())
    if "PDCLUSTER_HANDS_SEED" in os.environ:
        print("\n".join(course.story))
    assert counts["statuses"] > QUIET_LOOKS / 20


@pytest.mark.soak
@pytest.mark.timeout(2 * SOAK_SECONDS)
def test_an_hour_of_rough_hands() -> None:
    seconds = float(os.environ.get("PDCLUSTER_HANDS_SECONDS", SOAK_SECONDS))
    until, seed = time.monotonic() + seconds, random.SystemRandom().randrange(10**9)
    counts = Counter[str]()
    while time.monotonic() < until:
        counts += asyncio.run(Course(seed, brought_up).play())
        counts["courses"] += 1
        seed += 1
    print(f"from {seed - counts['courses']}: {dict(counts)}")
    assert counts["as fresh"] > counts["courses"] / 3
    assert counts["served"] > counts["courses"]


async def looks_half_way(world: World, old: list[tuple[str, str]]) -> AsyncIterator[None]:
    """Let the operator look twelve times, while no new engine becomes ready."""
    for _ in range(12):
        engines = {one for one in world.objects if one[0] == "StatefulSet"}
        world.sick |= {name for _, name in engines.difference(old)}
        await world.reconcile()
        yield
        await world.passes(5.0)


@pytest.mark.parametrize("label", [ROLE_LABEL, REVISION_LABEL, PAIRING_LABEL])
async def test_a_label_that_somebody_changes_on_a_pod_ends_no_engine(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-way through a change, an engine with such a pod counted as one that has no pods."""
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: World.monotonic))
    world = await brought_up({})
    judge, old = Judge(world), [name for name in world.objects if name[0] == "StatefulSet"]
    for name in old:
        del world.touch(("Pod", f"{name[1]}-0"))["metadata"]["labels"][label]
    world.edit(rollout={"renew": "1"})
    async for _ in looks_half_way(world, old):
        assert not judge.found
        assert served_pairs(world)
    world.sick.clear()
    await until_at_rest(world)
    assert not judge.found
    assert not [name for name in old if name in world.objects]


async def test_an_old_engine_that_loses_its_label_half_way_serves_until_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No watch reports it then. It counted as one that is ending, and clients were sent away."""
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: World.monotonic))
    world = await brought_up({})
    judge, old = Judge(world), [name for name in world.objects if name[0] == "StatefulSet"]
    world.edit(engine={"blockSize": 32})
    async for _ in looks_half_way(world, old):
        pass
    assert len(list(world.of_kind("StatefulSet"))) == 4
    for name in old:
        del world.touch(name)["metadata"]["labels"][CLUSTER_LABEL]
    for _ in range(12):
        await world.reconcile()
        assert not judge.found
        assert served_pairs(world)
        await world.passes(5.0)
    world.sick.clear()
    await until_at_rest(world)
    assert not judge.found
    judge.ends_well(await brought_up({"engine": {"blockSize": 32}}))
    assert not judge.found
    assert not [name for name in old if name in world.objects], "and then they go"
