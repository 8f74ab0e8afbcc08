"""Available, Progressing and the summary Ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.api.conditions import (
    ConditionType,
    Status,
    StatusReason,
    Verdict,
    no,
    seconds,
    unknown,
    yes,
)
from pdcluster_operator.api.findings import Findings
from pdcluster_operator.plan.links import PairState, PairView

# In this order the first that is False, or else Unknown, explains why Ready is not True.
SUMMARIZED = (
    ConditionType.ACCEPTED,
    ConditionType.PREFILL_READY,
    ConditionType.DECODE_READY,
    ConditionType.KV_LINKS_ESTABLISHED,
    ConditionType.KV_PATH_VERIFIED,
    ConditionType.TRANSPORT_HEALTHY,
)


@dataclass(frozen=True, slots=True)
class ChangeView:
    """How far the live objects are from the wanted ones.

    Attributes:
        replacing: engines that the spec does not ask for still exist.
        paused: ``rollout.paused`` keeps engines of another revision.
        router_available: None if no router is wanted.
        router_trouble: why a router pod does not run; empty if none has trouble.
        stuck: why engines cannot be replaced; empty if they can.
        changed: which fields of the spec made engines be replaced; empty if that is not known.
        router_behind: what the routers' Deployment still has to do; empty if nothing.
        scaled_to_zero: the role of which no engine is wanted; empty if there is none.
        started: when the newest wanted engine was created, in seconds; None if none was.
        deadline: ``rollout.progressDeadlineSeconds``.
    """

    replacing: bool
    paused: bool
    router_available: bool | None
    started: float | None
    deadline: int
    router_trouble: str = ""
    changed: str = ""
    stuck: str = ""
    router_behind: str = ""
    scaled_to_zero: str = ""


def available(pairs: Sequence[PairView], change: ChangeView) -> Verdict:
    """Whether some verified pair of engines serves."""
    if change.scaled_to_zero:
        return _nothing_serves(change)
    if change.router_available is False:
        return _no_router(change)
    if any(pair.verified for pair in pairs):
        return yes(StatusReason.SERVING, "a verified pair of engines serves")
    silent = next((pair for pair in pairs if pair.state is PairState.UNKNOWN), None)
    if silent is not None:
        return unknown(silent.reason, silent.message)
    return no(StatusReason.NO_VERIFIED_PAIR, "no pair of engines is verified")


def _no_router(change: ChangeView) -> Verdict:
    detail = f": {change.router_trouble}" if change.router_trouble else ""
    return no(StatusReason.ROUTER_UNAVAILABLE, f"no router pod is ready{detail}")


def _nothing_serves(change: ChangeView) -> Verdict:
    role = change.scaled_to_zero
    return no(StatusReason.SCALED_TO_ZERO, f"no {role} engine is wanted, so no request is served")


def summary(verdicts: Mapping[ConditionType, Verdict], change: ChangeView) -> Verdict:
    """Ready: what the spec wants is there and verified."""
    if (wrong := _first(verdicts, Status.FALSE)) is not None:
        return wrong
    if change.scaled_to_zero:
        return _replaced(change) or _nothing_serves(change)
    if (unclear := _first(verdicts, Status.UNKNOWN)) is not None:
        return unclear
    if change.router_available is False:
        return _no_router(change)
    return _replaced(change) or yes(StatusReason.READY, "what the spec wants is there and verified")


def _first(verdicts: Mapping[ConditionType, Verdict], status: Status) -> Verdict | None:
    found = (verdicts[kind] for kind in SUMMARIZED if verdicts[kind].status is status)
    return next(found, None)


def _replaced(change: ChangeView) -> Verdict | None:
    if not change.replacing:
        behind = change.router_behind
        return no(StatusReason.ROUTER_REPLACING, behind) if behind else None
    reason = StatusReason.PAUSED if change.paused else StatusReason.REPLACING
    cause = f": {change.changed}" if change.changed else ""
    return no(reason, f"engines that the spec does not ask for still exist{cause}")


def _held(change: ChangeView) -> Verdict | None:
    if change.paused:
        return no(StatusReason.PAUSED, "rollout.paused is set")
    return no(StatusReason.INSUFFICIENT_CAPACITY, change.stuck) if change.stuck else None


def progressing(
    ready: Verdict, change: ChangeView, findings: Findings, since: float, now: float
) -> Verdict:
    """Whether something is on its way to Ready.

    Args:
        since: when it began, in seconds since the epoch; see :func:`progressing_since`.
    """
    if not findings.ok:
        return no(StatusReason.NOT_ACCEPTED, "the spec is not accepted")
    if ready.status is Status.TRUE or ready.reason == StatusReason.SCALED_TO_ZERO:
        return no(StatusReason.COMPLETE, "nothing is left to do")
    if (held := _held(change)) is not None:
        return held
    # An engine that is newer than the beginning has the whole time.
    if now - max(since, change.started or 0.0) > change.deadline:
        return no(
            StatusReason.PROGRESS_DEADLINE_EXCEEDED,
            f"not Ready within {change.deadline} s: {ready.reason}",
        )
    if not change.replacing:
        return yes(ready.reason, ready.message)
    parts = (change.changed, ready.message if ready.reason != StatusReason.REPLACING else "")
    return yes(StatusReason.REPLACING, "; ".join(filter(None, parts)) or ready.message)


def progressing_since(before: Mapping[str, Any], generation: int, now: float) -> float:
    """Return when the change that is on its way began: now, if none was on its way.

    Args:
        before: the status as it is. It holds the moment, because a step that fails for a while
            turns Progressing False and True again, and the deadline must not begin anew.
        generation: of the spec. Another one begins another change.
    """
    known = seconds(before.get("progressingSince"))
    same = before.get("observedGeneration") == generation
    return known if known is not None and same else now
