"""Which changes of the conditions become events, and which of these are warnings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.api.conditions import ConditionType, Status, StatusReason, find_condition
from pdcluster_operator.api.findings import Rule
from pdcluster_operator.plan.model import Event
from pdcluster_operator.plan.status.certificates import without_tls

LONGEST_EVENT = 1024
GAVE_UP = (
    StatusReason.PROGRESS_DEADLINE_EXCEEDED,
    StatusReason.INSUFFICIENT_CAPACITY,
    StatusReason.TEMPLATE_REFUSED,
)
INSECURE = (
    "the engines speak without TLS (spec.transfer.tls is Disabled): whoever reaches their ports "
    "can read where their KV lies. Keep the pod network trusted, or set it to Enabled"
)


def transitions(before: object, after: Mapping[str, Any], *, secured: bool) -> tuple[Event, ...]:
    """Return one event for each condition whose status flipped, if the flip is news.

    Ready needs what the other conditions say. When it becomes True, its event is the only one.
    Engines without TLS that should have it are one more event.

    Args:
        secured: whether the engines of the spec speak TLS. If not, a new cluster is told so.
    """
    events = []
    for condition in _flipped_to_ready(before, after) or after["conditions"]:
        kind, status = condition["type"], condition["status"]
        old = find_condition(before, kind).get("status")
        if old == status or not _is_news(kind, old, status):
            continue
        bad = _is_bad(kind, status, condition["reason"])
        text = f"{kind} is {status}: {condition['message']}"[:LONGEST_EVENT]
        events.append(Event("Warning" if bad else "Normal", condition["reason"], text))
        if old is None and not bad and not secured:
            events.append(Event("Warning", Rule.INSECURE_SIDE_CHANNEL.value, INSECURE))
    if (message := without_tls(after)) and not without_tls(before):
        events.append(Event("Warning", Rule.INSECURE_SIDE_CHANNEL.value, message))
    return tuple(events)


def _is_bad(kind: str, status: str, reason: str) -> bool:
    if kind == ConditionType.PROGRESSING:
        return reason in GAVE_UP
    unreachable = reason == StatusReason.LAUNCHER_UNREACHABLE
    return (status == Status.FALSE and reason != StatusReason.SCALED_TO_ZERO) or unreachable


def _is_news(kind: str, old: str | None, new: str) -> bool:
    """Whether a condition that went from ``old`` (None: it was not there) to ``new`` is an event.

    Every start of an engine takes its conditions through Unknown and False to True. That is in the
    status. An event for each of these flips would hide those that tell of trouble, and a thousand
    clusters would write ten thousand of them.
    """
    if old is None:  # a new cluster is not ready yet
        return kind == ConditionType.ACCEPTED
    if kind in (ConditionType.ACCEPTED, ConditionType.PROGRESSING):
        return True
    if kind in (ConditionType.AVAILABLE, ConditionType.READY):
        return Status.TRUE in (old, new)  # in between, another condition says what is wrong
    return new == Status.FALSE  # of what is Unknown, Ready says why


def _flipped_to_ready(before: object, after: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    ready = find_condition(after, ConditionType.READY)
    flipped = find_condition(before, ConditionType.READY).get("status") != Status.TRUE
    return (ready,) if flipped and ready.get("status") == Status.TRUE else ()
