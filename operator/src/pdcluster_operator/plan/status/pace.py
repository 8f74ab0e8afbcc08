"""When a status is written: what users and alerts wait for at once, the rest once for a burst."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.plan.name_conflicts import NAME_CONFLICT
from pdcluster_operator.plan.status.engine_conditions import NEED_HELP

QUIET_SECONDS = 5.0
"""The shortest time from one write to another that flips no condition.

An engine that starts changes its reason a few times within seconds.
"""


def wait_before_writing(before: object, after: Mapping[str, Any], since_last: float) -> float:
    """Return how many seconds the status ``after`` may wait; 0 if it is written now.

    While engines start, each pod changes reasons, messages and counts several times. A condition
    that flips, a reason that needs somebody's help, or the status of another generation waits for
    nothing.

    Args:
        before: the status as it is now.
        since_last: seconds since this process wrote the status.
    """
    if not isinstance(before, Mapping) or _flips(before) != _flips(after):
        return 0.0
    return max(0.0, QUIET_SECONDS - since_last)


def _flips(status: Mapping[str, Any]) -> tuple[object, list[tuple[object, object, bool]]]:
    conditions = status.get("conditions") or ()
    flags = [
        (one.get("type"), one.get("status"), one.get("reason") in (*NEED_HELP, NAME_CONFLICT))
        for one in conditions
    ]
    return status.get("observedGeneration"), flags
