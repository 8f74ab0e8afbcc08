"""Which names the engines of a role have: those that exist keep theirs, and new ones fill gaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.types import Cluster


def engine_names(
    cluster: Cluster,
    role: Role,
    revision: str,
    live: Iterable[EngineName] = (),
    lost: Iterable[EngineName] = (),
) -> tuple[EngineName, ...]:
    """Return the names of all engines that the spec wants of a role.

    Args:
        live: engines that exist.
        lost: engines whose names cannot be used, because their node is gone.
    """

    def indexes(names: Iterable[EngineName]) -> set[int]:
        return {name.index for name in names if (name.role, name.revision) == (role, revision)}

    replicas = cluster.spec.role(role).replicas
    return tuple(
        EngineName(cluster.namespace, cluster.name, role, revision, index)
        for index in choose_indexes(replicas, indexes(live), indexes(lost))
    )


def choose_indexes(
    replicas: int, live: Iterable[int], lost: AbstractSet[int] = frozenset()
) -> Sequence[int]:
    """Return the indexes of the engines to have, in order.

    Engines that exist stay: an index that was free for a while is not asked for again while
    another one has its place. Of too many, those with the highest indexes go.
    """
    kept = sorted(index for index in set(live) if index not in lost)[:replicas]
    free = (index for index in range(replicas + len(lost) + len(kept)))
    while len(kept) < replicas:
        index = next(free)
        if index not in kept and index not in lost:
            kept.append(index)
    return sorted(kept)
