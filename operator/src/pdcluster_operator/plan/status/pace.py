"""When a changed status is written: at once, or some seconds later with what changes meanwhile.

While engines start, each pod changes reasons, messages and counts of the status several times, and
one condition after another becomes True. Most of these changes wait a few seconds, so one write
carries several of them.
"""

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.api.conditions import ConditionType, Status
from pdcluster_operator.plan.name_conflicts import NAME_CONFLICT
from pdcluster_operator.plan.status.conditions import NEED_HELP

QUIET_SECONDS = 5.0
"""The least time between two status writes of a PDCluster if the second has only details. Without
it, each of a burst is written (``operator/tests/runtime/test_reconcile_loop.py``)."""
LONGEST_SECONDS = 60.0
"""That time at most, while the statuses of many PDClusters wait."""
WRITES_A_SECOND = 1.0
"""Such writes of all PDClusters together. Each costs the API server as much as a child: 30 statuses
wait for 30 seconds, not for 5 (``operator/tests/plan/test_stages_and_pace.py``)."""
CROWD = 10
"""How many PDClusters must wait before the first status of a new one waits, too.

With 100 PDClusters that are created at once, each has 16.1 writes with this rule, and 17.8 without
it, because the first status and its event soon have a successor
(``operator/tests/runtime/test_crowd.py``). The gate of the benchmark allows 17.
"""
ENGINE_CONDITIONS = (ConditionType.PREFILL_READY, ConditionType.DECODE_READY)
"""Conditions that are False while engines start. Only their reason says whether help is needed."""


def wait_before_writing(
    before: object, after: Mapping[str, Any], since_last: float, waiting: int = 0
) -> float:
    """Return how many seconds the status ``after`` waits; 0 if it is written now.

    These changes are written at once: the status of another generation, Ready or Available that
    changes to or from True, Accepted or Progressing that changes, another condition that changes
    to or from False, and a reason that needs somebody's help. Other changes are details. They wait
    until ``QUIET_SECONDS`` after the last write, or longer while many statuses wait.

    The first status of a PDCluster is written at once, too. Only in a crowd it waits, if it says
    only what the first status of each PDCluster says.

    Args:
        before: the status as it is now.
        since_last: seconds since this process wrote the status, or first saw that there is none.
        waiting: how many PDClusters have a status that waits, or wait to be reconciled.
    """
    if not isinstance(before, Mapping) or not before:
        if waiting < CROWD or not _is_ordinary(after):
            return 0.0
    elif _important(before) != _important(after):
        return 0.0
    quiet = min(LONGEST_SECONDS, max(QUIET_SECONDS, waiting / WRITES_A_SECOND))
    return max(0.0, quiet - since_last)


def _important(status: Mapping[str, Any]) -> tuple[object, list[tuple[Any, object, bool]]]:
    """Return the part of a status whose changes are written at once.

    That is the observed generation, and for each condition its type, the part of its status that
    matters, and whether its reason needs help.
    """
    conditions = [
        (
            one.get("type"),
            _important_status(one.get("type"), one.get("status")),
            one.get("reason") in (*NEED_HELP, NAME_CONFLICT),
        )
        for one in status.get("conditions") or ()
    ]
    return status.get("observedGeneration"), conditions


def _is_ordinary(status: Mapping[str, Any]) -> bool:
    """Whether a first status says only what that of each PDCluster says: that it starts."""
    _, conditions = _important(status)
    started = {ConditionType.ACCEPTED: Status.TRUE, ConditionType.PROGRESSING: Status.TRUE}
    return not any(
        needs_help or (part != started[kind] if kind in started else part)
        for kind, part, needs_help in conditions
    )


def _important_status(condition: object, status: object) -> object:
    if condition in ENGINE_CONDITIONS:
        return None
    if condition in (ConditionType.AVAILABLE, ConditionType.READY):
        return status == Status.TRUE
    if condition in (ConditionType.ACCEPTED, ConditionType.PROGRESSING):
        return status
    return status == Status.FALSE
