"""The events for changes of conditions: which changes have one, and which of them are warnings."""

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.api.conditions import ConditionType, Status, StatusReason, find_condition
from pdcluster_operator.api.findings import Rule
from pdcluster_operator.plan.name_conflicts import NAME_CONFLICT, STILL_BEING_DELETED
from pdcluster_operator.plan.status import build, conditions, progress
from pdcluster_operator.plan.types import Event

GAVE_UP = (
    StatusReason.PROGRESS_DEADLINE_EXCEEDED,
    StatusReason.INSUFFICIENT_CAPACITY,
    StatusReason.TEMPLATE_REFUSED,
)
AT_REST = (StatusReason.COMPLETE, StatusReason.PAUSED, StatusReason.NOT_ACCEPTED)
"""With these, Progressing is False although no step failed."""
INSECURE = (
    "the engines speak without TLS (spec.transfer.tls is Disabled): whoever reaches their ports "
    "can read where their KV lies. Set it to Enabled, unless you trust the pod network"
)


def transitions(
    before: object, after: Mapping[str, Any], *, secured: bool, refused: bool = False
) -> tuple[Event, ...]:
    """Return one event for each condition whose status flipped, if users should see it.

    Engines that should have TLS and do not, or may not, are one more event. So is a step that is
    refused, and a name that belongs to something else: these flip no condition at rest, where
    Progressing is False already.

    Args:
        secured: whether the engines of the spec speak TLS. If not, a new cluster gets a warning.
        refused: whether Progressing says that the API server refuses a step.
    """
    # Somebody changed the spec: a cluster is expected not to be Ready then.
    known = before.get("observedGeneration") if isinstance(before, Mapping) else None
    of_another_spec = known not in (None, after.get("observedGeneration"))
    events = []
    for condition in _reporting(before, after):
        kind, status = condition["type"], condition["status"]
        old = find_condition(before, kind).get("status")
        gave_up = kind == ConditionType.PROGRESSING and condition["reason"] in GAVE_UP
        if old == status or not (gave_up or _is_reported(kind, old, status)):
            continue
        asked = kind == ConditionType.READY and of_another_spec
        bad = _is_bad(status, condition["reason"]) if kind != ConditionType.PROGRESSING else gave_up
        bad = bad and (not asked or condition["reason"] in conditions.NEED_HELP)
        text = f"{kind} is {status}: {condition['message']}"
        events.append(Event("Warning" if bad else "Normal", condition["reason"], text))
    progress = find_condition(after, ConditionType.PROGRESSING)
    reason, was = progress.get("reason", ""), find_condition(before, ConditionType.PROGRESSING)
    at_rest = was.get("status") == Status.FALSE and was.get("reason") in AT_REST
    gave_up = reason in GAVE_UP or (refused and reason != STILL_BEING_DELETED)
    if NAME_CONFLICT == reason != was.get("reason") or (at_rest and gave_up):
        events = [one for one in events if one.reason != reason]
        events.append(Event("Warning", reason, f"Progressing is False: {progress['message']}"))
    was, accepted = (find_condition(one, ConditionType.ACCEPTED) for one in (before, after))
    if not (secured or was) and accepted.get("status") == Status.TRUE:
        events.append(Event("Warning", Rule.INSECURE_SIDE_CHANNEL.value, INSECURE))
    if (message := build.tls_warning(after)) and not build.tls_warning(before):
        events.append(Event("Warning", Rule.INSECURE_SIDE_CHANNEL.value, message))
    return tuple(events)


def _is_bad(status: str, reason: str) -> bool:
    unreachable = reason == StatusReason.LAUNCHER_UNREACHABLE
    return (status == Status.FALSE and reason != StatusReason.SCALED_TO_ZERO) or unreachable


def _is_reported(kind: str, old: str | None, new: str) -> bool:
    """Whether a condition that went from ``old`` (None: it was not there) to ``new`` is an event.

    Every start of an engine takes its conditions through Unknown and False to True. That is in the
    status. An event for each of these flips would hide those that need help, and a thousand
    clusters would write ten thousand of them.
    """
    if old is None:  # a new cluster is not ready yet
        return kind == ConditionType.ACCEPTED and new != Status.TRUE
    if kind in (ConditionType.ACCEPTED, ConditionType.PROGRESSING):
        return True
    if kind in (ConditionType.AVAILABLE, ConditionType.READY):
        return Status.TRUE in (old, new)  # other changes have an event of another condition
    return new == Status.FALSE  # Ready explains Unknown


def _reporting(before: object, after: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the conditions whose flips may become events.

    Ready needs what the other conditions say, and repeats the worst of them when it stops being
    True. So its own event replaces theirs when it becomes True, and when it stops being True.
    """
    ready = find_condition(after, ConditionType.READY)
    is_ready, was_ready = progress.is_ready(after), progress.is_ready(before)
    if is_ready == was_ready:
        return list(after["conditions"])
    if is_ready:
        return [ready]
    kept = {ConditionType.ACCEPTED, ConditionType.AVAILABLE, ConditionType.READY}
    if find_condition(after, ConditionType.PROGRESSING).get("reason") != ready.get("reason"):
        kept.add(ConditionType.PROGRESSING)
    return [condition for condition in after["conditions"] if condition["type"] in kept]
