"""Condition types, their reasons, and how a condition changes.

``lastTransitionTime`` changes only when ``status`` does. A message holds nothing that changes by
itself, because then every write of the status would cause the next one.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any

LONGEST_MESSAGE = 2048
LONGEST_REASON = 256
"""As the CRD and Kubernetes' own conditions have it."""
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")


class ConditionType(StrEnum):
    """Types of a PDCluster's conditions, in the order of ``status.conditions``.

    ScalingTargetsMet is there only with ``spec.autoscaling``. Ready does not depend on it.
    """

    ACCEPTED = "Accepted"
    PREFILL_READY = "PrefillReady"
    DECODE_READY = "DecodeReady"
    KV_LINKS_ESTABLISHED = "KVLinksEstablished"
    KV_PATH_VERIFIED = "KVPathVerified"
    TRANSPORT_HEALTHY = "TransportHealthy"
    SCALING_TARGETS_MET = "ScalingTargetsMet"
    AVAILABLE = "Available"
    PROGRESSING = "Progressing"
    READY = "Ready"


class Status(StrEnum):
    """A condition's three values. Unknown is never False."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class StatusReason(StrEnum):
    """Reasons of conditions beside the rules and ``compat.reasons.Reason``."""

    # All of them, before the operator has written the first status
    NOT_SEEN_YET = "NotSeenYet"

    # Accepted
    PARTIALLY_CHECKED = "PartiallyChecked"
    MODEL_CHECKED = "ModelChecked"
    NOT_ACCEPTED = "NotAccepted"

    # Engines
    ENGINES_READY = "EnginesReady"
    SCALED_TO_ZERO = "ScaledToZero"
    DOWNLOADING_WEIGHTS = "DownloadingWeights"
    DOWNLOAD_FAILED = "DownloadFailed"
    PODS_MISSING = "PodsMissing"
    UNSCHEDULABLE = "Unschedulable"
    SCHEDULING_GATED = "SchedulingGated"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    POD_CONFIG_ERROR = "PodConfigError"
    CONTAINER_CREATING = "ContainerCreating"
    STARTING = "Starting"
    LOADING_WEIGHTS = "LoadingWeights"
    WARMING_UP = "WarmingUp"
    DRAINING = "Draining"
    ENGINE_FAILED = "EngineFailed"
    ENGINE_FROZEN = "EngineFrozen"
    CONTAINER_FROZEN = "ContainerFrozen"
    NODE_NOT_READY = "NodeNotReady"
    LAUNCHER_UNREACHABLE = "LauncherUnreachable"

    # Links and canaries
    LINKS_ESTABLISHED = "LinksEstablished"
    LINKS_PENDING = "LinksPending"
    WAITING_FOR_ENGINES = "WaitingForEngines"
    NO_PAIRS = "NoPairs"
    CANARY_PASSED = "CanaryPassed"
    CANARY_PENDING = "CanaryPending"
    BANDWIDTH_SUFFICIENT = "BandwidthSufficient"
    BANDWIDTH_UNMEASURED = "BandwidthUnmeasured"
    NO_THRESHOLD = "NoThreshold"
    PROBABLE_TCP_FALLBACK = "ProbableTCPFallback"
    LOCAL_PREFILL = "LocalPrefill"

    # Number of engines
    TARGETS_MET = "TargetsMet"
    MORE_ENGINES_NEEDED = "MoreEnginesNeeded"
    SCALING_BOUNDED = "ScalingBounded"
    ENGINES_DID_NOT_COME = "EnginesDidNotCome"
    TARGETS_UNREACHABLE = "TargetsUnreachable"
    NOT_MEASURED = "NotMeasured"
    ADVICE_FAILED = "AdviceFailed"

    # Service and change
    SERVING = "Serving"
    NO_VERIFIED_PAIR = "NoVerifiedPair"
    ROUTER_UNAVAILABLE = "RouterUnavailable"
    ROUTER_REPLACING = "RouterReplacing"
    REPLACING = "Replacing"
    COMPLETE = "Complete"
    PAUSED = "Paused"
    TEMPLATE_REFUSED = "TemplateRefused"
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    READY = "Ready"
    REASON_UNREADABLE = "ReasonUnreadable"
    REWRITTEN = "Rewritten"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The status, reason and message of one condition, before it is written."""

    status: Status
    reason: str
    message: str = ""


def yes(reason: str, message: str = "") -> Verdict:
    """Return a condition that holds."""
    return Verdict(Status.TRUE, reason, message)


def no(reason: str, message: str = "") -> Verdict:
    """Return a condition that does not hold."""
    return Verdict(Status.FALSE, reason, message)


def unknown(reason: str, message: str = "") -> Verdict:
    """Return a condition that cannot be judged yet."""
    return Verdict(Status.UNKNOWN, reason, message)


def find_condition(status: object, kind: str) -> Mapping[str, Any]:
    """Return a condition of a status; empty if the status has none of this type."""
    # A plan reads thirty conditions. The check for dict avoids the slower one for Mapping.
    conditions = status.get("conditions") if isinstance(status, (dict, Mapping)) else None
    for condition in conditions if isinstance(conditions, (list, Sequence)) else ():
        if isinstance(condition, (dict, Mapping)) and condition.get("type") == kind:
            return condition
    return {}


def own_status(status: Any) -> Any:
    """Return a status without conditions of other field managers.

    A status without conditions is returned as it is.
    """
    if not isinstance(status, Mapping) or "conditions" not in status:
        return status
    found = (find_condition(status, kind) for kind in ConditionType)
    return {**status, "conditions": [condition for condition in found if condition]}


def set_conditions(
    before: object, verdicts: Iterable[tuple[ConditionType, Verdict]], generation: int, now: float
) -> list[dict[str, Any]]:
    """Return the conditions to write. A transition time is kept if the status did not change."""
    written = []
    for kind, verdict in verdicts:
        old = find_condition(before, kind)
        kept = old.get("lastTransitionTime") if old.get("status") == verdict.status else None
        written.append(
            {
                "type": kind.value,
                "status": verdict.status.value,
                "reason": readable_reason(verdict.reason),
                "message": verdict.message[:LONGEST_MESSAGE],
                "observedGeneration": generation,
                "lastTransitionTime": kept or timestamp(now),
            }
        )
    return written


def readable_reason(reason: str) -> str:
    """Return the reason, or ReasonUnreadable if the CRD does not accept it.

    Launchers, webhooks and API servers choose reasons, too. With one that is too long, the API
    server would refuse every later write of the status.
    """
    text = str(reason)
    if len(text) <= LONGEST_REASON and _REASON.fullmatch(text):
        return text
    return StatusReason.REASON_UNREADABLE.value


@lru_cache(maxsize=16)
def timestamp(now: float) -> str:
    """Write seconds since the epoch as Kubernetes does: UTC, whole seconds.

    It is cached, because a plan writes the time of its own start many times.
    """
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: object) -> float | None:
    """Parse a time as Kubernetes writes it, into seconds since the epoch; None if it is invalid."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
