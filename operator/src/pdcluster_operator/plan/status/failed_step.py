"""The status while a step, or the plan itself, fails."""

from __future__ import annotations

from typing import Any

from pdcluster_operator.api.conditions import ConditionType, no, own_status, set_conditions
from pdcluster_operator.plan.model import Manifest


def with_failure(
    status: Manifest, cluster: Manifest, reason: str, message: str, now: float
) -> dict[str, Any]:
    """Return ``status`` with the failure in its Progressing condition.

    Args:
        status: the planned status, or the one that the cluster has if there is no plan. Of that,
            only what the operator itself writes is returned.
        cluster: the live PDCluster; its Progressing condition says when that last changed.
        now: seconds since the epoch.
    """
    verdict = (ConditionType.PROGRESSING, no(reason, message))
    generation = cluster["metadata"].get("generation", 0)
    failed = set_conditions(cluster.get("status"), [verdict], generation, now)
    given = status.get("conditions")
    others = given if isinstance(given, list) else []
    written: dict[str, Any] = own_status({**status, "conditions": [*failed, *others]})
    return written
