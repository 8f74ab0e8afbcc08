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
        replacing: engines of another revision still exist.
        paused: ``rollout.paused`` keeps engines of another revision.
        router_available: None if no router is wanted.
        router_trouble: why a router pod does not run; empty if none has trouble.
        router_behind: what the routers' Deployment still has to do; empty if nothing.
        started: when the newest wanted engine was created, in seconds; None if none was.
        deadline: ``rollout.progressDeadlineSeconds``.
    """

    replacing: bool
    paused: bool
    router_available: bool | None
    started: float | None
    deadline: int
    router_trouble: str = ""
    router_behind: str = ""


def available(pairs: Sequence[PairView], change: ChangeView) -> Verdict:
    """Whether some verified pair of engines serves."""
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


def summary(verdicts: Mapping[ConditionType, Verdict], change: ChangeView) -> Verdict:
    """Ready: what the spec wants is there and verified."""
    for wanted in (Status.FALSE, Status.UNKNOWN):
        for kind in SUMMARIZED:
            if verdicts[kind].status is wanted:
                return Verdict(wanted, verdicts[kind].reason, verdicts[kind].message)
    if change.router_available is False:
        return _no_router(change)
    if change.replacing:
        reason = StatusReason.PAUSED if change.paused else StatusReason.REPLACING
        return no(reason, "engines of another revision exist")
    if change.router_behind:
        return no(StatusReason.ROUTER_REPLACING, change.router_behind)
    return yes(StatusReason.READY, "what the spec wants is there and verified")


def progressing(
    ready: Verdict, change: ChangeView, findings: Findings, before: Mapping[str, Any], now: float
) -> Verdict:
    """Whether something is on its way to Ready."""
    if not findings.ok:
        return no(StatusReason.NOT_ACCEPTED, "the spec is not accepted")
    if ready.status is Status.TRUE:
        return no(StatusReason.COMPLETE, "nothing is left to do")
    if change.paused:
        return no(StatusReason.PAUSED, "rollout.paused is set")
    turned = seconds(before.get("lastTransitionTime")) or now
    started = change.started or 0.0
    overdue = before.get("status") == Status.TRUE and now - max(turned, started) > change.deadline
    # Once exceeded it stays so, until an engine of a newer revision is tried.
    given_up = before.get("reason") == StatusReason.PROGRESS_DEADLINE_EXCEEDED and started <= turned
    if overdue or given_up:
        return no(
            StatusReason.PROGRESS_DEADLINE_EXCEEDED,
            f"not Ready within {change.deadline} s: {ready.reason}",
        )
    return yes(StatusReason.REPLACING if change.replacing else ready.reason, ready.message)
