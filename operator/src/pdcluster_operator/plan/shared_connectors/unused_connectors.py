"""When the ConfigMap with a connector that a namespace shares is deleted: when nothing mounts it.

It is judged by what mounts it, not by who made it, so that operators of several classes may share
it. Two steps make sure that it is never missing for a pod:

1. It is marked. Whoever plans to mount a marked one takes the mark away first.
2. It is deleted when the mark is old, if the API server still has nothing that mounts it, and only
   in the version with the mark.

What somebody planned before the mark has long been written by then. The mark is in the object, so
another operator goes on where the first one stopped.

``connector_mounts.py`` says what mounts one. ``runtime/connector_collector.py`` looks at the API
server and carries it out. A copy that an older operator made for one PDCluster is deleted by
``children/deletions.py``, when ``rollout/history.py`` keeps no revision that mounts it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster_operator.api.conditions import seconds, timestamp
from pdcluster_operator.plan.model import Delete, Manifest
from pdcluster_operator.plan.objects.ownership import is_being_deleted
from pdcluster_operator.plan.shared_connectors.connector_mounts import marked_unused

KEEP_SECONDS = 600.0
"""How old a mark must be before the deletion.

This is longer than any plan takes, and longer than a watch that works lags behind.
"""


@dataclass(frozen=True, slots=True)
class MarkConnector:
    """Say on one ConfigMap since when nothing mounts it, only if it is still the version seen.

    Attributes:
        since: the time as Kubernetes writes it; empty if something mounts it again.
    """

    namespace: str
    name: str
    uid: str
    resource_version: str
    since: str
    why: str


def step_for_connector(
    live: Manifest, *, mounted: bool, now: float, keep: float = KEEP_SECONDS
) -> MarkConnector | Delete | None:
    """Return what to do about the ConfigMap of a connector; None if nothing.

    Args:
        mounted: whether a StatefulSet, Deployment, stored revision or pod of its namespace mounts
            it.
        now: seconds since the epoch.
        keep: how old a mark has to be, in seconds.
    """
    if is_being_deleted(live):
        return None
    metadata = live["metadata"]
    marked = marked_unused(live)
    seen = (
        str(metadata["namespace"]),
        str(metadata["name"]),
        str(metadata["uid"]),
        str(metadata["resourceVersion"]),
    )
    if mounted:
        return MarkConnector(*seen, "", "something mounts it again") if marked else None
    since = seconds(marked)
    if since is None or since > now + keep:
        return MarkConnector(*seen, timestamp(now), "nothing mounts it")
    if now - since < keep:
        return None
    return Delete("v1", "ConfigMap", *seen, "nothing has mounted it for a while")
