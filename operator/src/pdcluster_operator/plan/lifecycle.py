"""Whether a PDCluster is new or changed, and what to wait for before acting on it."""

from pdcluster_operator.plan.observed.engines import known_ids
from pdcluster_operator.plan.types import Manifest

JUST_REPORTED_SECONDS = 5.0
FIRST_CHILDREN_SECONDS = 300.0
"""See :func:`needs_live_check`. With 5 for both, each new PDCluster in a crowd is read; with 300,
a deleted one gets children twice (``operator/tests/runtime/test_reconcile_loop.py``)."""
LONGEST_WAIT_SECONDS = 5.0
"""The longest wait of :func:`wait_before_judging`. Then an engine without an answer is silent. With
no wait, a new process says so of each (``operator/tests/runtime/test_reconcile_loop.py``)."""


def is_new(cluster: Manifest, *, has_children: bool) -> bool:
    """Whether nothing was done for a live PDCluster yet: it has neither children nor a status.

    Args:
        has_children: whether it owns any object that the operator creates.
    """
    return not cluster.get("status") and not has_children


def is_changed(cluster: Manifest) -> bool:
    """Whether the spec of a live PDCluster was changed, and its status is about the one before."""
    observed = (cluster.get("status") or {}).get("observedGeneration")
    return observed is not None and observed != cluster["metadata"].get("generation")


def needs_live_check(reported_seconds: float, *, first: bool) -> bool:
    """Whether to read a PDCluster from the API server before children are created for it.

    The cache may still hold one that was deleted, and children that are created for it afterwards
    stay until Kubernetes' garbage collector finds them. The first children are created after an
    older report: if it was wrong, the next reconcile finds children, and reads.

    Args:
        reported_seconds: how long ago the API server reported the PDCluster.
        first: whether it is new, and this process has created no children for it yet.
    """
    return reported_seconds >= (FIRST_CHILDREN_SECONDS if first else JUST_REPORTED_SECONDS)


def wait_before_judging(cluster: Manifest, *, followed_seconds: float, all_heard: bool) -> float:
    """Return how many seconds a new operator process waits before its first plan; 0 for no wait.

    The process before it had asked the engines how they are. A plan without their answers would
    write that no engine answers, and a moment later that all do.

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
