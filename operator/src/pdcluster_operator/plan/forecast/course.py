"""Predicts the course of a change: the operator's own plans, one after another.

``make_plan`` is called as the operator calls it. Between two plans, :mod:`.world` lets the others
do one thing. So the steps are those that the operator would take if everything goes well.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from pdcluster_operator.api import conditions, object_names
from pdcluster_operator.api.conditions import ConditionType, Status, StatusReason
from pdcluster_operator.api.spec import parse, types
from pdcluster_operator.plan import planner, prefill_scaler
from pdcluster_operator.plan.forecast.world import World
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.objects import drift, ownership
from pdcluster_operator.plan.observed.engines import live_by_role
from pdcluster_operator.plan.rollout.revisions import spec_of_engines
from pdcluster_operator.plan.rollout.targets import find_targets
from pdcluster_operator.plan.types import Apply, Observed, Rewrite, Step, stages

MOST_ROUNDS = 500
"""A course that is longer has no end. Each round is a plan, or something that others do."""


@dataclass(frozen=True, slots=True)
class Round:
    """Steps that follow each other without a wait.

    Attributes:
        after: what the operator waited for; empty for the first round.
    """

    after: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Replaced:
    """Engines of one role that a change replaces.

    Attributes:
        fields: paths of the fields of the spec that make it necessary.
    """

    role: types.Role
    engines: tuple[object_names.EngineName, ...]
    fields: tuple[str, ...]


class Held(NamedTuple):
    """An amount before a change, at its peak and in the end."""

    now: int
    peak: int
    after: int


@dataclass(frozen=True, slots=True)
class Course:
    """How a change goes, if everything goes well.

    Attributes:
        rounds: what the operator does, in order.
        engines: how many engines hold GPUs.
        gpus: how many GPUs they hold.
        served: whether the cluster serves before the change.
        interrupted: whether it serves nothing for a while, although it does before.
        complete: whether nothing is left to do in the end.
        end: what Ready says in the end, or Progressing if it says why nothing goes on.
    """

    rounds: tuple[Round, ...]
    replaced: tuple[Replaced, ...]
    engines: Held
    gpus: Held
    served: bool
    interrupted: bool
    complete: bool
    end: str


def forecast(observed: Observed, now: float) -> Course:
    """Return the course from what is observed to the spec of the observed cluster.

    Args:
        now: seconds since the epoch.
    """
    world, memo = World(observed), Memo()
    rounds: list[Round] = []
    after = ""
    steps: list[Step] = []
    held = [world.engines()]
    available: list[bool] = []
    for _ in range(MOST_ROUNDS):
        plan = planner.make_plan(world.observed(), now, memo)
        world.write_status(plan.status)
        available.append(_is_true(plan.status, ConditionType.AVAILABLE))
        now += 1.0
        todo = [step for stage in stages(plan.steps) for step in stage]
        for step in todo:
            world.perform(step, now)
        steps += todo
        held.append(world.engines())
        if todo:
            continue
        if steps:
            rounds.append(Round(after, tuple(steps)))
            after, steps = "", []
        if not (after := world.others_act()):
            break
    said = conditions.find_condition(plan.status, ConditionType.READY)
    progress = conditions.find_condition(plan.status, ConditionType.PROGRESSING)
    if progress.get("status") == Status.FALSE and progress.get("reason") != StatusReason.COMPLETE:
        said = progress
    served = _is_true(observed.cluster.get("status"), ConditionType.AVAILABLE)
    engines, gpus = zip(*held, strict=True)
    return Course(
        rounds=tuple(rounds),
        replaced=tuple(_replaced(observed)),
        engines=Held(engines[0], max(engines), engines[-1]),
        gpus=Held(gpus[0], max(gpus), gpus[-1]),
        served=served,
        interrupted=served and not all(available),
        complete=progress.get("reason") == StatusReason.COMPLETE,
        end=f"{said.get('reason')}: {said.get('message')}",
    )


def with_rewrites(observed: Observed, now: float) -> tuple[Observed, tuple[Step, ...]]:
    """Return what is observed with the rewrites that the operator has noted.

    What a mutating webhook made of a child, the operator leaves as it is. It remembers that; we
    know such a child by the hash of what was applied last.

    Returns also the steps that the operator still has to take for the spec as it is.
    """
    live = {ownership.identity(child): child for child in observed.children}
    noted: dict[tuple[str, str], Rewrite] = {}
    for step in planner.make_plan(observed, now).steps:
        child = live.get(ownership.identity(step.manifest)) if isinstance(step, Apply) else None
        if child is None or not isinstance(step, Apply):
            continue
        found = drift.rewrite_of(child, step.manifest)
        if found is not None and drift.applied_hash(child) == drift.applied_hash(step.manifest):
            noted[ownership.identity(step.manifest)] = found
    noticed = replace(observed, rewrites=noted)
    return noticed, planner.make_plan(noticed, now).steps


def _replaced(observed: Observed) -> Iterator[Replaced]:
    cluster = prefill_scaler.as_scaled(observed.cluster, observed.scaler)
    parsed = parse.parse_cluster(cluster)
    if parsed.errors:
        return
    live = live_by_role(observed)
    targets = find_targets(observed, parsed.cluster, live)
    spec = spec_of_engines(cluster)
    for role in types.Role:
        wanted = targets.wanted[role]
        old = sorted(name for name in live[role] if name.revision != wanted.name)
        if old:
            fields = targets.causes(role, old, spec)
            yield Replaced(role, tuple(old), tuple(sorted(fields)))


def _is_true(status: object, kind: ConditionType) -> bool:
    return conditions.find_condition(status, kind).get("status") == Status.TRUE
