"""How long an engine's pod may take to end: the arithmetic behind its grace period."""

from __future__ import annotations

from pdcluster_operator.api.spec.types import Cluster

DRAIN_DEADLINE_SECONDS = 30
STOP_SECONDS = 20
STOP_MARGIN_SECONDS = 10


def drain_seconds(cluster: Cluster) -> int:
    """Return how long leases and quarantined receives may last after SIGTERM."""
    return max(cluster.spec.transfer.lease_seconds, DRAIN_DEADLINE_SECONDS)


def grace_period(cluster: Cluster) -> int:
    """Seconds from SIGTERM to SIGKILL: the launcher drains, then stops the engine."""
    return drain_seconds(cluster) + STOP_SECONDS + STOP_MARGIN_SECONDS
