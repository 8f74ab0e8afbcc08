"""How long a revision and its connector are kept.

A connector's bytes exist only in its ConfigMap, and in the operator that brought it. So a
ConfigMap of the cluster's own stays for as long as a revision that names it. What stays of those
that a namespace shares, :mod:`..shared_connectors.unused_connectors` decides.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from pdcluster_operator.api.object_names import EngineName, own_connector_name, revision_name
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.rollout.targets import Targets
from pdcluster_operator.plan.shared_connectors.connector_mounts import mounted_connector


@dataclass(frozen=True, slots=True)
class History:
    """What of the past goes, and what has to stay.

    Attributes:
        forgotten: names of ControllerRevisions to delete.
        mounted: names of the ConfigMaps that the remaining revisions mount.
    """

    forgotten: frozenset[str]
    mounted: frozenset[str]


def keep_history(cluster: Cluster, targets: Targets, seen: AbstractSet[EngineName]) -> History:
    """Return which revisions go: those over the limit that are not wanted and have no engine."""
    in_use = {(name.role, name.revision) for name in seen}
    in_use |= {(role, one.name) for role, one in targets.wanted.items()}
    forgotten: set[tuple[Role, str]] = set()
    for role in Role:
        of_role = [(role, one.name) for one in targets.stored if one.role is role]
        idle = [one for one in of_role if one not in in_use]
        forgotten.update(idle[cluster.spec.rollout.revision_history_limit :])
    remaining = [one for one in targets.stored if (one.role, one.name) not in forgotten]
    return History(
        frozenset(revision_name(cluster.name, role, name) for role, name in forgotten),
        frozenset(
            mounted_connector(cluster.name, one.template)
            or own_connector_name(cluster.name, one.connector)
            for one in remaining
        ),
    )
