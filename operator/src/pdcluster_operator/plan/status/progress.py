"""Progressing: whether something is on its way to Ready, and since when; or which step fails.

``conditions.py`` computes Ready. The reason of a pod comes through Ready:
``plan/observed/pods.py`` judges a pod, and ``conditions.py`` a role.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.api import conditions
from pdcluster_operator.api.conditions import ConditionType, Status, StatusReason, Verdict
from pdcluster_operator.api.spec import pod_templates, types
from pdcluster_operator.plan.name_conflicts import NAME_CONFLICT
from pdcluster_operator.plan.observed.pods import IN_QUEUE
from pdcluster_operator.plan.rollout.desired import Desired
from pdcluster_operator.plan.rollout.moves import MAKE_ROOM
from pdcluster_operator.plan.types import Manifest

HELD_BY_OTHERS = (
    "Insufficient ",
    "Too many pods",
    "free ports",
    "anti-affinity rules",
    "ReadWriteOncePod",
)
"""The scheduler's messages contain one of these if other pods hold what the pod needs."""

FAILING_SECONDS = 30.0
"""An outage of the API server makes Ready False after this time; a restart is shorter."""


@dataclass(frozen=True, slots=True)
class ChangeView:
    """How far the live objects are from the wanted ones.

    Attributes:
        desired: what should exist.
        rollout: ``spec.rollout``.
        started: when the newest wanted engine was created, in seconds; None if none was.
        unreachable: why clients reach no router; empty if they do, or if none is wanted.
        router_behind: what the routers' Deployment still has to do; empty if nothing.
        scaled_to_zero: the role of which no engine is wanted; empty if there is none.
        accepted: whether the spec is.
        waits: why new engines wait for their weights; None if they do not.
    """

    desired: Desired
    rollout: types.Rollout
    started: float | None
    unreachable: str
    router_behind: str
    scaled_to_zero: str
    accepted: bool
    waits: Verdict | None = None


def progressing(ready: Verdict, change: ChangeView, since: float, now: float) -> Verdict:
    """Whether something is on its way to Ready.

    Args:
        since: when it began, in seconds since the epoch; see :func:`progressing_since`.
    """
    if not change.accepted:
        return conditions.no(StatusReason.NOT_ACCEPTED, "the spec is not accepted")
    if ready.status is Status.TRUE or ready.reason == StatusReason.SCALED_TO_ZERO:
        return conditions.no(StatusReason.COMPLETE, "nothing is left to do")
    desired, deadline = change.desired, change.rollout.progress_deadline_seconds
    failed = change.waits is not None and change.waits.reason == StatusReason.DOWNLOAD_FAILED
    stops = change.waits if failed else None
    if desired.stuck:
        stops = conditions.no(StatusReason.INSUFFICIENT_CAPACITY, desired.stuck)
    if change.rollout.paused and desired.stale:
        stops = conditions.no(StatusReason.PAUSED, "rollout.paused is set")
    if stops is not None:
        return stops
    # An engine that is newer than the beginning has the whole time.
    late = now - max(since, change.started or 0.0) > deadline
    surging = desired.stale and change.rollout.type is types.RolloutType.SURGE
    remedy = f"; {MAKE_ROOM}" if surging and _no_room(ready, late=late) else ""
    if late:
        return conditions.no(
            StatusReason.PROGRESS_DEADLINE_EXCEEDED,
            f"not Ready within {deadline} s: {ready.reason}: {ready.message}{remedy}",
        )
    if not desired.stale:
        return conditions.yes(ready.reason, ready.message)
    why = ready.message if ready.reason != StatusReason.REPLACING else ""
    words = "; ".join(filter(None, (desired.changed, why))) or ready.message
    return conditions.yes(StatusReason.REPLACING, f"{words}{remedy}")


NOTHING_RUNS = (StatusReason.PODS_MISSING, StatusReason.DOWNLOADING_WEIGHTS)
"""What a refused step explains: there are no pods, of engines or of the Job before them."""


def _no_room(ready: Verdict, *, late: bool) -> bool:
    """Whether engines wait for what other pods hold. Only then it helps to make room.

    Args:
        late: an engine that has no pods for so long gets none: most likely a quota is used up.
    """
    if ready.reason == StatusReason.PODS_MISSING:
        return late
    if ready.reason == StatusReason.SCHEDULING_GATED:
        return IN_QUEUE in ready.message
    held = any(words in ready.message for words in HELD_BY_OTHERS)
    return ready.reason == StatusReason.UNSCHEDULABLE and held


def progressing_since(before: Mapping[str, Any], generation: int, now: float) -> float:
    """Return when the change that is on its way began: now, if none was on its way.

    Args:
        before: the status as it is. It holds the moment, because a step that fails for a while
            turns Progressing False and True again, and the deadline must not begin anew.
        generation: of the spec. Another one begins another change.
    """
    known = conditions.seconds(before.get("progressingSince"))
    same = before.get("observedGeneration") == generation
    return known if known is not None and same and known <= now else now


def without_plan(cluster: Manifest, reason: str, why: str, now: float) -> dict[str, Any]:
    """Return the status if no plan could be made: nothing that it said before is known any more."""
    verdicts = dict.fromkeys(ConditionType, conditions.unknown(reason, why))
    verdicts[ConditionType.PROGRESSING] = conditions.no(reason, why)
    before, generation = cluster.get("status"), cluster["metadata"].get("generation", 0)
    written = conditions.set_conditions(before, verdicts.items(), generation, now)
    return {**pod_templates.as_mapping(before), "conditions": written}


def is_ready(status: object) -> bool:
    """Whether a status says that what the spec wants is there and verified."""
    return conditions.find_condition(status, ConditionType.READY).get("status") == Status.TRUE


def with_failure(
    status: Manifest,
    cluster: Manifest,
    reason: str,
    message: str,
    now: float,
    outage: float = math.inf,
) -> dict[str, Any]:
    """Return ``status`` with the failure in its Progressing condition.

    If the step is refused, or fails for long, what the spec wants is not there, so Ready is not
    True either. A refusal also explains why engines have no pods.

    Args:
        status: the planned status.
        cluster: the live PDCluster; its Progressing condition says when that last changed.
        now: seconds since the epoch.
        outage: seconds since steps began to fail by an outage; infinite if the server refused one.
    """
    planned = conditions.find_condition(status, ConditionType.PROGRESSING)
    if planned.get("reason") == NAME_CONFLICT != reason:  # it stays while others come and go
        reason, message = NAME_CONFLICT, f"{planned['message']}; {reason}: {message}"
    ready = conditions.find_condition(status, ConditionType.READY)
    lacks = ready.get("reason") in NOTHING_RUNS and math.isinf(outage)
    if is_ready(status):
        lacks = outage >= FAILING_SECONDS or not is_ready(cluster.get("status"))
    kinds = (ConditionType.PROGRESSING, *([ConditionType.READY] if lacks else []))
    verdicts = [(kind, conditions.no(reason, message)) for kind in kinds]
    generation = cluster["metadata"].get("generation", 0)
    found = conditions.set_conditions(cluster.get("status"), verdicts, generation, now)
    failed = {one["type"]: one for one in found}
    return {**status, "conditions": [failed.get(one["type"], one) for one in status["conditions"]]}
