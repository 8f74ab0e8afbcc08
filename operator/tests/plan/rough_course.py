"""A random course in which others act between any two steps of the operator, and a model judges."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

from rough_hands import Hands, spec_of
from rough_world import Manifest, World
from served_truth import Judge, as_seen

from pdcluster_operator.runtime import reconcile

SECONDS = (1.0, 1.0, 5.0, 5.0, 31.0, 130.0, 700.0)  # between two looks of the operator
QUIET_LOOKS = 120
REST = 4  # so many looks without a write are rest


@dataclass(frozen=True)
class Length:
    """How long a course is.

    Attributes:
        engines: the most of each role, in the beginning.
        acts: the least and the most that others do.
        looks: the most of the operator after each act.
    """

    engines: int = 3
    acts: tuple[int, int] = (3, 12)
    looks: int = 6


class Course:
    """One course; everything follows from ``seed``.

    Args:
        brought_up: makes a world in which an operator made a cluster of this spec, and nobody
            disturbed it.
    """

    def __init__(
        self,
        seed: int,
        brought_up: Callable[[Manifest], Awaitable[World]],
        length: Length = Length(),
    ) -> None:
        self.seed, self.dice, self._length = seed, Random(seed), length
        self._brought_up = brought_up
        self.story: list[str] = []
        self.counts: Counter[str] = Counter()

    async def play(self) -> Counter[str]:
        """Play it; return how often each rule was asked. Raises AssertionError if one is broken."""
        with patch.object(reconcile, "time", SimpleNamespace(monotonic=lambda: World.monotonic)):
            found = await self._run()
        assert not found, "\n".join(
            [*self.story, f"PDCLUSTER_HANDS_SEED={self.seed} plays this course again:", *found]
        )
        return self.counts

    async def _run(self) -> list[str]:
        dice, length = self.dice, self._length
        spec = {
            "prefill": {"replicas": dice.randint(1, length.engines)},
            "decode": {"replicas": dice.randint(1, length.engines)},
            "rollout": {"type": dice.choice(("Surge", "Surge", "Replace", "Recreate"))},
        }
        self.world = world = await self._brought_up(spec)
        world.dice = Random(self.seed + 1)
        hands, judge = Hands(world, dice), Judge(world)
        self.counts = judge.counts
        for _ in range(dice.randint(*length.acts)):
            for _ in range(dice.choice((1, 1, 2))):
                self._note(hands.act())
                await world.flush()
            for _ in range(dice.randint(1, length.looks)):
                await self._look(judge)
                if judge.found:
                    return judge.found
        hands.stop(mend=dice.random() < 0.7)
        await world.flush()
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
                await world.passes(300.0)  # what is remembered of Secrets is read again
            if rest == 2 * REST:
                break
        else:
            return [f"it never comes to rest: {world.writes[-6:]}, {world.error}"]
        judge.ends_well(await self._brought_up(spec_of(world)))
        return judge.found

    async def _look(self, judge: Judge, most: float = 1e9) -> None:
        world = self.world
        seen = as_seen(world)
        wrote = len(world.writes)
        await world.reconcile()
        self._note(f"  {', '.join(world.writes[wrote:])} {world.error}")
        may_write = world.leases.holds(world.namespace) and world.error != "killed"
        if may_write and not world.is_ending() and "PDCluster" not in world.refusals:
            judge.says(seen)
        await world.passes(min(most, self.dice.choice(SECONDS)))

    def _note(self, what: str) -> None:
        if what.strip():
            self.story.append(what)


async def until_at_rest(world: World) -> World:
    """Let the operator work until it has nothing to do."""
    rest = 0
    while rest < REST:
        wrote = len(world.writes)
        await world.reconcile()
        await world.passes(31.0)
        rest = rest + 1 if len(world.writes) == wrote else 0
    return world
