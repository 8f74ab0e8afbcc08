"""When a status is written: what users and alerts wait for at once, the rest once for a burst."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.api.conditions import ConditionType, Status
from pdcluster_operator.plan.name_conflicts import NAME_CONFLICT
from pdcluster_operator.plan.status.conditions import NEED_HELP

QUIET_SECONDS = 5.0
"""The shortest time from one write to another that says nothing of what somebody waits for.

An engine that starts changes its reason a few times within seconds.
"""
LONGEST_SECONDS = 60.0
"""That time, while many clusters start."""
WRITES_A_SECOND = 1.0
"""Such statuses of all clusters together. Each costs the API server as much as a child."""
CROWD = 10
"""How many clusters may wait before the first status of a new one waits, too."""
PARTS = (ConditionType.PREFILL_READY, ConditionType.DECODE_READY)
"""What is False while engines start. Trouble of theirs is known by its reason."""
AS_ALWAYS: Mapping[str, object] = {
    ConditionType.ACCEPTED: Status.TRUE,
    ConditionType.PROGRESSING: Status.TRUE,
    ConditionType.AVAILABLE: False,
    ConditionType.READY: False,
}
"""What is told of each new cluster that is as it should be; see :func:`_told`."""


def wait_before_writing(
    before: object, after: Mapping[str, Any], since_last: float, waiting: int = 0
) -> float:
    """Return how many seconds the status ``after`` may wait; 0 if it is written now.

    While engines start, each pod changes reasons, messages and counts several times, and the
    conditions become True one after another. A cluster that becomes Ready or Available or stops
    being so, a link that fails, a reason that needs somebody's help, and the status of another
    generation wait for nothing. The first status of a new cluster waits only if it says what that
    of every other says, and only in a crowd.

    Args:
        before: the status as it is now.
        since_last: seconds since this process wrote the status, or first saw that there is none.
        waiting: how many clusters have a status that waits, or are new and wait for their turn.
    """
    told = _told(after)
    if isinstance(before, Mapping) and before:
        if _told(before) != told:
            return 0.0
    elif waiting < CROWD or any(_is_news(*one) for one in told[1]):
        return 0.0
    quiet = min(LONGEST_SECONDS, max(QUIET_SECONDS, waiting / WRITES_A_SECOND))
    return max(0.0, quiet - since_last)


def _is_news(kind: object, outcome: object, needs_help: bool) -> bool:
    """Whether a new cluster says something else than every new cluster."""
    return needs_help or outcome != AS_ALWAYS.get(str(kind), False)


def _told(status: Mapping[str, Any]) -> tuple[object, list[tuple[object, object, bool]]]:
    """Return what of a status somebody waits for: the generation, and of each condition a part."""
    conditions = status.get("conditions") or ()
    flags = [
        (
            one.get("type"),
            _outcome(one.get("type"), one.get("status")),
            one.get("reason") in (*NEED_HELP, NAME_CONFLICT),
        )
        for one in conditions
    ]
    return status.get("observedGeneration"), flags


def _outcome(kind: object, status: object) -> object:
    """Return the status of Accepted and Progressing, and of others whether it is news."""
    if kind in PARTS:
        return False
    if kind in (ConditionType.AVAILABLE, ConditionType.READY):
        return status == Status.TRUE
    if kind in (ConditionType.ACCEPTED, ConditionType.PROGRESSING):
        return status
    return status == Status.FALSE
