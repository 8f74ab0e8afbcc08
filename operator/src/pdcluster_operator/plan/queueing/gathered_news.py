"""Which changes of a cluster that starts may wait a moment, so that one look serves several.

Until a cluster is Available, its pods get nodes, addresses and containers, and controllers count
them. Each of these changes is an event of its own, within a second or two. A change that makes the
cluster Available waits for nothing. Neither does any change of a cluster that is Available.
"""

from __future__ import annotations

from pdcluster_operator.api.conditions import ConditionType, Status, find_condition
from pdcluster_operator.plan.observed.pods import status_of
from pdcluster_operator.plan.types import Manifest

GATHER_SECONDS = 1.0


def starts(cluster: Manifest | None) -> bool:
    """Whether a cluster is not Available, as far as its status says."""
    if cluster is None:
        return False
    available = find_condition(cluster.get("status"), ConditionType.AVAILABLE)
    return available.get("status") != Status.TRUE


def may_be_gathered(manifest: Manifest) -> bool:
    """Whether a change of an object of a cluster that starts may wait."""
    if manifest["kind"] == "Deployment":
        return not status_of(manifest).get("availableReplicas")
    return manifest["kind"] in ("Pod", "StatefulSet")
