"""How long a pod may take to end: the arithmetic behind the grace periods."""

from __future__ import annotations

from pdcluster_operator.api.spec.types import Cluster

DRAIN_DEADLINE_SECONDS = 30
STOP_SECONDS = 20
STOP_MARGIN_SECONDS = 10
ROUTER_LINGER_SECONDS = 20
"""For so long a router that is told to end takes new connections.

A Service sends some for a moment longer. And while no other router is ready, it sends all of them:
a new router on the same node is ready after a few seconds.
"""


def drain_seconds(cluster: Cluster) -> int:
    """Return how long requests, and then leases and quarantined receives, may last after SIGTERM.

    A prompt that is being computed gets its lease only at its end.
    """
    leases = max(cluster.spec.transfer.lease_seconds, DRAIN_DEADLINE_SECONDS)
    return cluster.spec.request_timeout_seconds + leases


def grace_period(cluster: Cluster) -> int:
    """Seconds from SIGTERM to SIGKILL: the launcher drains, then stops the engine."""
    return drain_seconds(cluster) + STOP_SECONDS + STOP_MARGIN_SECONDS


def router_grace_period(cluster: Cluster) -> int:
    """Seconds from a router's deletion to SIGKILL: new connections, then requests under way."""
    return ROUTER_LINGER_SECONDS + cluster.spec.request_timeout_seconds + STOP_MARGIN_SECONDS
