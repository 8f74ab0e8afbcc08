"""Accepted, PrefillReady and DecodeReady."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdcluster_connector.compat.counted import counted
from pdcluster_operator.api.conditions import StatusReason, Verdict, no, unknown, yes
from pdcluster_operator.api.findings import Findings
from pdcluster_operator.api.rules.engines import unchecked_message
from pdcluster_operator.plan.observed.engines import EngineView

MAX_SHOWN_ERRORS = 5
NEED_HELP = (
    StatusReason.ENGINE_FAILED,
    StatusReason.IMAGE_UNAVAILABLE,
    StatusReason.POD_CONFIG_ERROR,
    StatusReason.UNSCHEDULABLE,
)
"""Reasons that waiting does not cure, the worst first."""
HINDERED = (*NEED_HELP, StatusReason.SCHEDULING_GATED)
"""With a wait in a queue: it may last for hours, but it is also part of each start."""
# Which engine's reason is shown if several are not ready.
SEVERITY = (
    *HINDERED,
    StatusReason.PODS_MISSING,
    StatusReason.CONTAINER_CREATING,
    StatusReason.STARTING,
    StatusReason.LOADING_WEIGHTS,
    StatusReason.WARMING_UP,
    StatusReason.DRAINING,
)


def accepted(findings: Findings) -> Verdict:
    """Whether the spec breaks no rule that can be checked before the engines run."""
    if not findings.ok:
        shown = [str(error) for error in findings.errors[:MAX_SHOWN_ERRORS]]
        more = len(findings.errors) - len(shown)
        if more:
            shown.append(f"and {more} more")
        return no(str(findings.errors[0].rule), "; ".join(shown))
    return yes(StatusReason.PARTIALLY_CHECKED, unchecked_message(findings.unchecked))


def role_ready(engines: Sequence[EngineView], findings: Findings) -> Verdict:
    """Whether every wanted engine of a role is ready."""
    if not engines and not findings.ok:
        return no(StatusReason.NOT_ACCEPTED, "the spec is not accepted")
    if not engines:
        return yes(StatusReason.SCALED_TO_ZERO, "no engine is wanted")
    ready = sum(engine.ready is True for engine in engines)
    count = f"{ready} of {counted(len(engines), 'engine')} ready"
    failing = [engine for engine in engines if engine.ready is False]
    if failing:
        worst = min(failing, key=lambda engine: SEVERITY.index(engine.reason))
        detail = f": {worst.message}" if worst.message else ""
        return no(worst.reason, f"{count}; {worst.name.stateful_set} {worst.reason}{detail}")
    silent = next((engine for engine in engines if engine.ready is None), None)
    if silent is not None:
        return unknown(silent.reason, silent.message)
    return yes(StatusReason.ENGINES_READY, count)


def urgency(reason: str) -> int:
    """Return the place of a reason in ``HINDERED``; the number after the last for all others."""
    return HINDERED.index(reason) if reason in HINDERED else len(HINDERED)


def with_scaler(ready: Verdict, decides: str) -> Verdict:
    """Return PrefillReady with who decides how many engines there are, if it is not the spec."""
    return replace(ready, message="; ".join(filter(None, (ready.message, decides))))


def with_warnings(accepted: Verdict, findings: Findings) -> Verdict:
    """Return Accepted with the warnings: users see them here if the webhook was down."""
    if not findings.ok or not findings.warnings:
        return accepted
    named = ", ".join(f"{warning.path} [{warning.rule}]" for warning in findings.warnings)
    parts = filter(None, (accepted.message, f"Warnings: {named}."))
    return replace(accepted, message=" ".join(parts))
