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
from collections.abc import Mapping
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from rough_hands import Hands, spec_of
from rough_world import World
from served_truth import Judge, as_seen

from pdcluster_operator.runtime import reconcile

SECONDS = (1.0, 1.0, 5.0, 5.0, 31.0, 130.0, 700.0)  # between two looks of the operator
QUIET_LOOKS = 120
REST = 4  # so many looks without a write are rest
SOAK_SECONDS = 3600.0


class Course:
    """One course; everything follows from ``seed``."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seed, self.dice = seed, Random(seed)
        self.story: list[str] = []
        self.counts: Counter[str] = Counter()
        self.monkeypatch = monkeypatch

    async def run(self) -> list[str]:
        """Play it; return what was wrong."""
        dice = self.dice
        spec = {
            "prefill": {"replicas": dice.randint(1, 3)},
            "decode": {"replicas": dice.randint(1, 3)},
            "rollout": {"type": dice.choice(("Surge", "Surge", "Replace", "Recreate"))},
        }
        clock = SimpleNamespace(monotonic=lambda: World.monotonic)
        self.monkeypatch.setattr(reconcile, "time", clock)
        self.world = world = await brought_up(spec)
        world.dice = Random(self.seed + 1)
        hands, judge = Hands(world, dice), Judge(world)
        self.counts = judge.counts
        for _ in range(dice.randint(3, 12)):
            for _ in range(dice.choice((1, 1, 2))):
                self._note(hands.act())
            for _ in range(dice.randint(1, 6)):
                await self._look(judge)
                if judge.found:
                    return judge.found
        hands.stop(mend=dice.random() < 0.7)
        world.dice = None  # what is to be done is done at once, so rest is rest
        self._note(f"others stop: {json.dumps(spec_of(world))}")
        rest = 0
        for _ in range(QUIET_LOOKS):
            wrote = len(world.writes)
            await self._look(judge, most=31.0)
            if judge.found:
                return judge.found
            rest = rest + 1 if len(world.writes) == wrote else 0
            if rest == REST:
                world.turn(300.0)  # what is remembered of Secrets is read again
            if rest == 2 * REST:
                break
        else:
            return [f"it never comes to rest: {world.writes[-6:]}, {world.error}"]
        judge.ends_well(await brought_up(spec_of(world)))
        return judge.found

    async def _look(self, judge: Judge, most: float = 1e9) -> None:
        world = self.world
        seen = as_seen(world)
        wrote = len(world.writes)
        await world.reconcile()
        self._note(f"  {', '.join(world.writes[wrote:])} {world.error}")
        if "PDCluster" not in world.refusals and world.error != "killed":
            judge.says(seen)
        world.turn(min(most, self.dice.choice(SECONDS)))

    def _note(self, what: str) -> None:
        if what.strip():
            self.story.append(what)


_settled: dict[str, World] = {}


async def brought_up(spec: Mapping[str, Any]) -> World:
    """Return a world in which an operator made a cluster of this spec, and nobody disturbed it."""
    text = json.dumps(spec, sort_keys=True)
    if text not in _settled:
        world, rest = World(spec), 0
        while rest < REST:
            wrote = len(world.writes)
            await world.reconcile()
            world.turn(31.0)
            rest = rest + 1 if len(world.writes) == wrote else 0
        _settled[text] = world
    return _settled[text].twin()


def play(seed: int, monkeypatch: pytest.MonkeyPatch) -> Course:
    with monkeypatch.context() as patch:
        course = Course(seed, patch)
        found = asyncio.run(course.run())
    assert not found, "\n".join(
        [*course.story, f"PDCLUSTER_HANDS_SEED={seed} plays this course again:", *found]
    )
    return course


# Fewer in `make fast`, more in `make soak`; see operator/tests/plan/simulated_cluster.py.
COUNT = max(2, 10 * min(settings().max_examples, 400) // 100)
SEEDS = [int(seed) for seed in os.environ.get("PDCLUSTER_HANDS_SEED", "").split()] or range(COUNT)


@pytest.mark.parametrize("seed", SEEDS)
def test_rough_hands_make_the_operator_do_no_harm(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = play(seed, monkeypatch)
    if "PDCLUSTER_HANDS_SEED" in os.environ:
        print("\n".join(course.story))
    assert course.counts["statuses"] > QUIET_LOOKS / 20


@pytest.mark.soak
@pytest.mark.timeout(2 * SOAK_SECONDS)
def test_an_hour_of_rough_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = float(os.environ.get("PDCLUSTER_HANDS_SECONDS", SOAK_SECONDS))
    until, seed = time.monotonic() + seconds, random.SystemRandom().randrange(10**9)
    counts = Counter[str]()
    while time.monotonic() < until:
        counts += play(seed, monkeypatch).counts
        counts["courses"] += 1
        seed += 1
    print(f"from {seed - counts['courses']}: {dict(counts)}")
    assert counts["as fresh"] > counts["courses"] / 3
    assert counts["served"] > counts["courses"]
