"""How long an operator that has just started waits before it judges a cluster.

The operator before it knew how the engines are. If this one judged at once, it would write
that no engine answers, and a moment later that all do.
"""

from __future__ import annotations

from pdcluster_operator.plan.observed.engines import known_ids
from pdcluster_operator.plan.types import Manifest

LONGEST_WAIT_SECONDS = 5.0
"""The longest wait. An engine that has not answered by then counts as silent."""


def wait_before_judging(cluster: Manifest, *, followed_seconds: float, all_heard: bool) -> float:
    """Return how many seconds to wait before the cluster is judged; 0 to judge it now.

    Args:
        cluster: the live PDCluster. Nothing is waited for unless its status holds an engine
            that some operator has heard before.
        followed_seconds: how long this process has polled the cluster's engines.
        all_heard: whether each engine that was there at the beginning has answered since, or
            has missed its polls.
    """
    if all_heard or not any(known_ids(cluster).values()):
        return 0.0
    return max(0.0, LONGEST_WAIT_SECONDS - followed_seconds)
