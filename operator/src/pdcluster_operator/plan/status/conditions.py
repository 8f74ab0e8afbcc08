"""The conditions of a PDCluster that do not depend on the time: all but Progressing.

Accepted, PrefillReady and DecodeReady come from the spec and the engines. KVLinksEstablished,
KVPathVerified and TransportHealthy come from the pairs: a link that was never tried is Unknown, and
one that was established and is lost is False. A PDCluster is Available if some verified pair of
engines serves. It is Ready if all that the spec wants is there and verified; Ready is computed from
the other conditions.

TransportHealthy is also False while decode engines compute prompts that prefill should have
computed. Such a request is answered rightly and with HTTP 200, so nobody would notice. The launcher
of each decode engine reports the share of its last few minutes. The verdict turns False when one
engine is above the limit of the spec, and stays False until all engines are at half of the limit or
below, so that it does not change back and forth around the limit. The message holds no percents,
because they change all the time.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.launcher_documents import LinksReport, LinkState
from pdcluster_connector.protocol.prompt_outcomes import LocalReason
from pdcluster_operator.api.conditions import (
    ConditionType,
    Status,
    StatusReason,
    Verdict,
    no,
    unknown,
    yes,
)
from pdcluster_operator.api.findings import Findings, Rule
from pdcluster_operator.api.remedies import table
from pdcluster_operator.api.rules.engines import unchecked_message
from pdcluster_operator.api.spec.types import Transfer
from pdcluster_operator.plan.builders.protection import NOT_KNOWN
from pdcluster_operator.plan.observed.engines import EngineView
from pdcluster_operator.plan.observed.links import PairView
from pdcluster_operator.plan.observed.pods import joined
from pdcluster_operator.plan.status.progress import ChangeView

MAX_SHOWN_ERRORS = 5
NEED_HELP = (
    StatusReason.DOWNLOAD_FAILED,
    StatusReason.ENGINE_FAILED,
    StatusReason.ENGINE_FROZEN,
    StatusReason.CONTAINER_FROZEN,
    StatusReason.NODE_NOT_READY,
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
    StatusReason.DOWNLOADING_WEIGHTS,
    StatusReason.PODS_MISSING,
    StatusReason.CONTAINER_CREATING,
    StatusReason.STARTING,
    StatusReason.LOADING_WEIGHTS,
    StatusReason.WARMING_UP,
    StatusReason.DRAINING,
)


def accepted(findings: Findings, *, clients_known: bool = True) -> Verdict:
    """Whether the spec breaks no rule that can be checked before the engines run."""
    if not findings.ok:
        shown = [str(error) for error in findings.errors[:MAX_SHOWN_ERRORS]]
        more = len(findings.errors) - len(shown)
        if more:
            shown.append(f"and {more} more")
        if not clients_known:
            shown.append(NOT_KNOWN)
        return no(str(findings.errors[0].rule), "; ".join(shown))
    parts = [findings.model]
    parts += [str(one) for one in findings.warnings if one.rule == Rule.MODEL_NOT_CHECKED]
    parts.append(unchecked_message(findings.unchecked))
    # Users see them here if the webhook was down.
    others = [one for one in findings.warnings if one.rule != Rule.MODEL_NOT_CHECKED]
    named = ", ".join(f"{warning.path} [{warning.rule}]" for warning in others)
    parts += [f"Warnings: {named}."] if named else []
    reason = StatusReason.MODEL_CHECKED if findings.model else StatusReason.PARTIALLY_CHECKED
    return yes(reason, " ".join(filter(None, parts)))


def role_ready(engines: Sequence[EngineView], *, accepted: bool) -> Verdict:
    """Whether every wanted engine of a role is ready."""
    if not engines and not accepted:
        return no(StatusReason.NOT_ACCEPTED, "the spec is not accepted")
    if not engines:
        return yes(StatusReason.SCALED_TO_ZERO, "no engine is wanted")
    ready = sum(engine.ready is True for engine in engines)
    count = f"{ready} of {counted(len(engines), 'engine')} ready"
    failing = [engine for engine in engines if engine.ready is False]
    if failing:
        worst = min(failing, key=lambda engine: SEVERITY.index(engine.reason))
        what = joined(f"{worst.name.stateful_set} {worst.reason}", worst.message)
        return no(worst.reason, f"{count}; {what}")
    silent = next((engine for engine in engines if engine.ready is None), None)
    if silent is not None:
        return unknown(silent.reason, silent.message)
    return yes(StatusReason.ENGINES_READY, count)


CANARY_STANDS_SECONDS = 3600.0  # what a canary showed, after the next one was due
MEGABYTE = 1_000_000
# Slower than this over RDMA hardware means that another transport was taken.
RDMA_LEAST_MBPS = 1000
ALSO, MOST_NAMED = "; slow receives also over ", 32  # links


def links_established(pairs: Sequence[PairView], before: Mapping[str, Any]) -> Verdict:
    """Whether each decode engine shook hands with each prefill engine and read its memory."""
    failed = [pair for pair in pairs if pair.state is LinkState.FAILED]
    if failed:
        first = failed[0]
        count = f"{len(failed)} of {counted(len(pairs), 'link')} failed; " if len(pairs) > 1 else ""
        message = f"{count}{joined(first.label, first.message)}"
        return no(first.reason or Reason.BACKEND_ERROR, message)
    return _undecided(pairs, before) or yes(
        StatusReason.LINKS_ESTABLISHED,
        f"{len(pairs)} of {counted(len(pairs), 'link')} established",
    )


def path_verified(
    pairs: Sequence[PairView], before: Mapping[str, Any], interval: float = 0.0
) -> Verdict:
    """Whether a canary's KV was counted on every link.

    Args:
        interval: seconds between two canaries of a link.
    """
    failed = [pair for pair in pairs if pair.canary_failed]
    if failed:
        return no(Reason.CANARY_FAILED, joined(failed[0].label, failed[0].canary.message))
    broken = next((pair for pair in pairs if pair.state is LinkState.FAILED), None)
    if broken is not None:
        return _open(StatusReason.CANARY_PENDING, f"{broken.label}: the link failed", before)
    undecided = _undecided(pairs, before)
    if undecided is not None:
        return undecided
    waiting = next((pair for pair in pairs if not pair.verified), None)
    if waiting is not None:
        words = "no canary since the link was established"
        message = joined(waiting.label, words, waiting.canary.message)
        return _open(StatusReason.CANARY_PENDING, message, before)
    old = [
        f"{pair.label}: no canary had a result for more than an hour: {pair.canary.message}"
        for pair in pairs
        if (pair.canary.age_seconds or 0) > interval + CANARY_STANDS_SECONDS
    ]
    seen = f"KV was seen to move over {counted(len(pairs), 'link')}"
    return yes(StatusReason.CANARY_PASSED, joined(seen, old[0]) if old else seen)


def transport_healthy(
    pairs: Sequence[PairView], transfer: Transfer, before: Mapping[str, Any]
) -> Verdict:
    """Whether every link is as fast as was asked for, by its probe and by its receives.

    By receives only if somebody asked: many ranks may share a NIC, so each gets a part of it.
    Receives show that a link is slow once none of the latest was fast enough. The link is healthy
    again once half of them are, so one that was fast by chance changes nothing. So the message
    names each such link, and the first with the numbers that were true when it was found slow.

    Args:
        before: the condition as it is now.
    """
    least = transfer.min_bandwidth_mbps
    if least is None and transfer.rdma is not None:
        least = RDMA_LEAST_MBPS
    if least is None:
        # That a link is established is the evidence: its probe was read and checked.
        if not pairs or any(pair.state is not LinkState.ESTABLISHED for pair in pairs):
            return unknown(StatusReason.BANDWIDTH_UNMEASURED, "not every link is established")
        return yes(StatusReason.NO_THRESHOLD, "no bandwidth is asked for")
    measured = [
        pair for pair in pairs if pair.state is LinkState.ESTABLISHED and pair.bytes_per_second > 0
    ]
    reason = StatusReason.PROBABLE_TCP_FALLBACK
    was_slow = (before.get("status"), before.get("reason")) == (Status.FALSE, reason)
    told = str(before.get("message")) if was_slow else ""
    others = told.rpartition(ALSO)[2].split(", ")
    slow = [(pair.label, "") for pair in measured if pair.bytes_per_second < least * MEGABYTE]
    named = []
    for pair in pairs:
        rate = pair.receives if transfer.min_bandwidth_mbps else None
        words = f"{pair.label}: its receives reached"
        if rate is None or pair.state is not LinkState.ESTABLISHED or (pair.label, "") in slow:
            continue
        known = words in told or pair.label in others
        if (rate.median if known else rate.best) < least * MEGABYTE:
            numbers = (
                f" {rate.median / MEGABYTE:,.0f} MB/s, and at most {rate.best / MEGABYTE:,.0f}"
                f" MB/s, in {rate.count} measurements with {rate.bytes / MEGABYTE:,.0f} MB of KV"
            )
            slow.append((words, joined(numbers, pair.message)))
            named.append(pair.label)
    if slow:
        first, numbers = slow[0]
        head = f"{len(slow)} of {counted(len(pairs), 'link')} slower than {least} MB/s; {first}"
        more = named[1:] if numbers else named
        also = ALSO + ", ".join(more[:MOST_NAMED]) if more else ""
        same = numbers and told.startswith(head) and told.endswith(also)
        return no(reason, told if same else head + numbers + also)
    if not pairs or len(measured) < len(pairs):
        return unknown(StatusReason.BANDWIDTH_UNMEASURED, "not every link is measured")
    return yes(StatusReason.BANDWIDTH_SUFFICIENT, f"all links reach {least} MB/s")


def _undecided(pairs: Sequence[PairView], before: Mapping[str, Any]) -> Verdict | None:
    """Return why nothing is decided yet; None if each pair is established or has failed.

    A pair whose decode launcher does not answer comes before one that waits.
    """
    if not pairs:
        return unknown(StatusReason.NO_PAIRS, "there is no pair of engines")
    silent = next((pair for pair in pairs if pair.state is LinkState.UNKNOWN), None)
    if silent is not None:
        return unknown(silent.reason, silent.message)
    waiting = next((pair for pair in pairs if pair.state is LinkState.PENDING), None)
    if waiting is None:
        return None
    return _open(waiting.reason, joined(waiting.label, waiting.message), before)


def _open(reason: str, message: str, before: Mapping[str, Any]) -> Verdict:
    once_known = before.get("status") in (Status.TRUE, Status.FALSE)
    return no(reason, message) if once_known else unknown(reason, message)


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
    """Whether some verified pair of engines serves.

    Args:
        pairs: those that clients reach, without those that Recreate ends.
    """
    if role := change.scaled_to_zero:
        message = f"no {role} engine is wanted, so no request is served"
        return no(StatusReason.SCALED_TO_ZERO, message)
    if change.unreachable:
        return no(StatusReason.ROUTER_UNAVAILABLE, change.unreachable)
    if change.desired.serves or any(pair.verified for pair in pairs):
        return yes(StatusReason.SERVING, "a verified pair of engines serves")
    silent = next((pair for pair in pairs if pair.state is LinkState.UNKNOWN), None)
    if silent is not None:
        return unknown(silent.reason, silent.message)
    return no(StatusReason.NO_VERIFIED_PAIR, "no pair of engines is verified")


def summary(
    verdicts: Mapping[ConditionType, Verdict], change: ChangeView, findings: Findings
) -> Verdict:
    """Ready: what the spec wants is there and verified."""
    if (wrong := _first(verdicts, Status.FALSE)) is not None:
        return wrong
    if change.scaled_to_zero:
        roles = (verdicts[ConditionType.PREFILL_READY], verdicts[ConditionType.DECODE_READY])
        silent = next((one for one in roles if one.status is Status.UNKNOWN), None)
        # Without engines, only this says how the Job that downloads the weights fares.
        return silent or _replaced(change) or change.waits or verdicts[ConditionType.AVAILABLE]
    if (unclear := _first(verdicts, Status.UNKNOWN)) is not None:
        return unclear
    if (serves := verdicts[ConditionType.AVAILABLE]).status is not Status.TRUE:
        return serves
    fewer = any(warning.rule == Rule.TOO_MANY_LINKS for warning in findings.warnings)
    what = "as many engines as links allow are" if fewer else "what the spec wants is"
    return _replaced(change) or yes(StatusReason.READY, f"{what} there and verified")


def _first(verdicts: Mapping[ConditionType, Verdict], status: Status) -> Verdict | None:
    """Return the first verdict with this status.

    A role whose engines need help comes before one whose engines only wait.
    """
    found = [kind for kind in SUMMARIZED if verdicts[kind].status is status]
    if not found:
        return None
    urgent = [reason for reason in HINDERED if reason in (verdicts[one].reason for one in found)]
    if not urgent or ConditionType.ACCEPTED in found:
        return verdicts[found[0]]
    return next(verdicts[one] for one in found if verdicts[one].reason == urgent[0])


def _replaced(change: ChangeView) -> Verdict | None:
    if not change.desired.stale:
        behind = change.router_behind
        return no(StatusReason.ROUTER_REPLACING, behind) if behind else None
    if change.waits is not None:
        return no(change.waits.reason, change.waits.message)
    reason = StatusReason.PAUSED if change.rollout.paused else StatusReason.REPLACING
    words = "engines that the spec does not ask for still exist"
    return no(reason, joined(words, change.desired.changed))


OFF = 100
_NAME = re.compile(r"[A-Za-z]{1,64}")

_CAUSES = frozenset(map(str, (*LocalReason, *Reason)))


def local_prefill(
    decode: Sequence[EngineView],
    links: Mapping[str, LinksReport],
    most: int,
    before: Mapping[str, Any],
) -> Verdict | None:
    """Return a verdict if prompts are computed in the wrong place, and None if not.

    Args:
        decode: the decode engines.
        links: what their launchers say, by logical id.
        most: ``spec.verification.maxLocalShare``, in percent.
        before: the condition as it is now.
    """
    if most >= OFF:
        return None
    was = before.get("status"), before.get("reason")
    was_above = was == (Status.FALSE, StatusReason.LOCAL_PREFILL)
    was_unheard = was == (Status.UNKNOWN, StatusReason.LAUNCHER_UNREACHABLE)
    limit = most // 2 if was_above else most
    asked = [engine for engine in decode if engine.ready is not False]
    unclear = False
    for engine in asked:
        report = links.get(engine.name.logical)
        if report is None or report.prompts is UNSET:
            continue
        percent = report.prompts.percent if report.prompts else None
        unclear |= percent is None
        if report.prompts and percent is not None and percent > limit:
            return no(StatusReason.LOCAL_PREFILL, _message(engine, report.prompts.cause, most))
    silent = next((engine for engine in asked if engine.name.logical not in links), None)
    if silent is not None and (was_above or was_unheard):
        return unknown(
            StatusReason.LAUNCHER_UNREACHABLE,
            f"the launcher of {silent.name.stateful_set} does not answer the operator",
        )
    if unclear and was_above:
        return no(StatusReason.LOCAL_PREFILL, str(before.get("message")))
    return None


def local_share(reports: Iterable[LinksReport]) -> float | None:
    """Return which share (0 to 1) of a cluster's prompts decode computed; None without prompts."""
    counts = [report.prompts for report in reports if report.prompts]
    prompts = sum(one.prompts for one in counts)
    return sum(one.local for one in counts) / prompts if prompts else None


def _message(engine: EngineView, cause: str, most: int) -> str:
    named = cause if _NAME.fullmatch(cause) else "Unknown"
    known = table().get(cause) if cause in _CAUSES else None  # a newer launcher may know others
    why = f"{known.cause} {known.remedy}" if known else "The log of this engine says why."
    return (
        f"{engine.name.stateful_set} computes too many of its prompts by itself (maxLocalShare is "
        f"{most} %), mostly because of {named}: {why}"
    )
