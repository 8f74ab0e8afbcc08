"""Available and Ready.

A PDCluster is Available if some verified pair of engines serves. It is Ready if all that the spec
wants is there and verified. Ready is computed from the other conditions. ``progress.py`` computes
Progressing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdcluster_connector.protocol.launcher_documents import LinkState
from pdcluster_operator.api.conditions import (
    ConditionType,
    Status,
    StatusReason,
    Verdict,
    no,
    unknown,
    yes,
)
from pdcluster_operator.plan.observed.links import PairView
from pdcluster_operator.plan.status.engine_conditions import urgency
from pdcluster_operator.plan.status.progress import ChangeView

# In this order the first that is False, or else Unknown, explains why Ready is not True.
SUMMARIZED = (
    ConditionType.ACCEPTED,
    ConditionType.PREFILL_READY,
    ConditionType.DECODE_READY,
    ConditionType.KV_LINKS_ESTABLISHED,
    ConditionType.KV_PATH_VERIFIED,
    ConditionType.TRANSPORT_HEALTHY,
)


def available(pairs: Sequence[PairView], change: ChangeView) -> Verdict:
    """Whether some verified pair of engines serves."""
    if change.scaled_to_zero:
        return _nothing_serves(change)
    if change.router_available is False:
        return _no_router(change)
    if any(pair.verified for pair in pairs):
        return yes(StatusReason.SERVING, "a verified pair of engines serves")
    silent = next((pair for pair in pairs if pair.state is LinkState.UNKNOWN), None)
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
    """Return the first verdict with this status.

    A role whose engines need help comes before one whose engines only wait.
    """
    found = [kind for kind in SUMMARIZED if verdicts[kind].status is status]
    if not found:
        return None
    accepted = ConditionType.ACCEPTED
    return verdicts[min(found, key=lambda one: (one != accepted, urgency(verdicts[one].reason)))]


def _replaced(change: ChangeView) -> Verdict | None:
    if not change.replacing:
        behind = change.router_behind
        return no(StatusReason.ROUTER_REPLACING, behind) if behind else None
    reason = StatusReason.PAUSED if change.paused else StatusReason.REPLACING
    cause = f": {change.changed}" if change.changed else ""
    return no(reason, f"engines that the spec does not ask for still exist{cause}")
