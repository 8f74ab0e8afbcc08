"""What a spec wants to exist, and which of it may be created now.

While engines of another revision exist, :mod:`.moves` says what comes next and :mod:`.routing`
which engines the routers know. :mod:`.wanted_children` makes the objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from pdcluster_operator.api.labels import PAIRING_LABEL, engine_of
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.enums import Role, RolloutType, Switch
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.connectors import config_maps_seen
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.observed.pods import lost_engines
from pdcluster_operator.plan.rollout.changes import in_words, spec_of_engines, why_replaced
from pdcluster_operator.plan.rollout.fleet import engine_keys, observe_fleet
from pdcluster_operator.plan.rollout.gangs import GangEngines, find_gangs, without
from pdcluster_operator.plan.rollout.moves import frozen, next_moves
from pdcluster_operator.plan.rollout.revisions import Revision
from pdcluster_operator.plan.rollout.routing import Routing, route
from pdcluster_operator.plan.rollout.stored_router import stored_templates
from pdcluster_operator.plan.rollout.targets import (
    Targets,
    find_targets,
    keep_history,
    live_by_role,
    queues_of,
    what_targets_depend_on,
)
from pdcluster_operator.plan.rollout.wanted_children import Build, Wanted, try_out, wanted_children
from pdcluster_operator.plan.types import Manifest, Observed, TryOut


@dataclass(frozen=True, slots=True)
class Desired:
    """What should exist.

    Attributes:
        names: the engines that serve the spec, by role; with ``paused`` the old ones.
        children: to be applied, in order.
        blocked: engines that wait until those of another revision are gone, or for a gang.
        held: those of ``blocked`` that wait until the first pair has its nodes.
        kept: engines of another revision that ``rollout.paused`` keeps.
        stale: whether an engine or a pod of another revision exists.
        trials: what must succeed before a new revision is stored and replaces anything.
        forgotten: names of the ControllerRevisions that the history has no place for.
        mounted: names of the ConfigMaps whose connectors the other revisions mount.
        changed: the fields of the spec that made engines be replaced, in words.
        keys: pairing key of each engine.
        stuck: why engines cannot be replaced; empty if they can.
    """

    names: Mapping[Role, tuple[EngineName, ...]]
    children: tuple[Wanted, ...]
    blocked: frozenset[EngineName]
    kept: frozenset[EngineName]
    stale: bool
    forgotten: frozenset[str] = frozenset()
    mounted: frozenset[str] = frozenset()
    changed: str = ""
    trials: tuple[TryOut, ...] = ()
    keys: Mapping[EngineName, str] = field(default_factory=dict)
    stuck: str = ""
    held: frozenset[EngineName] = frozenset()


def live_engines(observed: Observed) -> tuple[EngineName, ...]:
    """Return the engines that exist, sorted."""
    return tuple(sorted(name for names in live_by_role(observed).values() for name in names))


def desire(
    observed: Observed,
    cluster: Cluster,
    lost_pods: AbstractSet[str] = frozenset(),
    memo: Memo | None = None,
) -> Desired:
    """Return what should exist for an accepted spec.

    Args:
        lost_pods: names of the pods that are lost with their nodes.
    """
    memo = memo or Memo()
    live = live_by_role(observed)
    lost = lost_engines(observed.pods, lost_pods)
    # The pods of a lost engine may stay for ever. Nothing waits for them.
    pods = {name for name in map(engine_of, observed.pods) if name is not None} - lost
    seen = {*pods, *(name for names in live.values() for name in names)}
    targets = memo.get(
        "targets",
        what_targets_depend_on(observed, cluster, live),
        lambda *_: find_targets(observed, cluster, live),
    )
    paused = cluster.spec.rollout.paused
    untried = [] if paused else _untried(targets, live)
    hold = paused or bool(untried)
    serving = {role: _serving(targets, role, live, hold=hold) for role in Role}
    names = {
        role: engine_names(cluster, role, revision.name, live[role], lost) if revision else ()
        for role, revision in serving.items()
    }
    others = seen.difference(*names.values())
    keys = engine_keys(observed, names, serving)
    blocked: AbstractSet[EngineName] = frozenset()
    kept = {name for name in others if name in live[name.role]}
    stuck = ""
    key = _pairing_key(serving, live)
    routing = Routing(key, {key: {role: (*names[role], *_of(kept, role)) for role in Role}})
    target = {role: one for role, one in serving.items() if one is not None}
    if seen and len(target) == len(Role):
        fleet = observe_fleet(
            observed, cluster, live, names, target, seen, lost, keys, lost_pods, memo
        )
        replacing = any(not _is_of(name, serving) for name in seen)
        held = hold and replacing
        moves = frozen(fleet) if held else next_moves(fleet, cluster.spec.rollout.type)
        blocked = {name for found in names.values() for name in found} - moves.made
        kept -= moves.removed
        stuck = moves.stuck
        if cluster.spec.rollout.type is not RolloutType.RECREATE or not replacing:
            routing = route(observed, fleet, moves, key, hold=hold)
        elif not hold:
            routing = Routing(key, {key: names}, stop=True)
    names = {role: (*names[role], *_of(kept, role)) for role in Role}
    joint = cluster.spec.scheduling.gang is Switch.ENABLED
    known = GangEngines(cluster.name, without(names, blocked), live, keys, serving, observed.pods)
    gangs = find_gangs(known, enabled=joint and observed.pod_groups and not observed.one_node)
    blocked |= gangs.held
    routing = routing.without(gangs.held)
    waiting = any(serving[role] is not targets.wanted[role] for role in Role)
    stale = bool(seen.difference(*names.values())) or bool(kept) or waiting
    history = keep_history(cluster, targets, seen)
    build = Build(
        cluster,
        observed.connector,
        serving,
        {role: targets.number(role) for role in Role if serving[role] is targets.wanted[role]},
        routing,
        observed.operator_namespace,
        {role: _pods(cluster, role, set(names[role]) - blocked, live, serving) for role in Role},
        config_maps_seen(observed),
        gangs if observed.pod_groups else replace(gangs, groups=()),
        queues_of(live),
        observed.cluster.get("spec") or {},
        stored_templates(observed),
    )
    return Desired(
        names,
        memo.get(
            "children",
            (build, names, kept | blocked),
            lambda *_: wanted_children(build, names, kept | blocked, memo),
        ),
        frozenset(blocked),
        frozenset(kept),
        stale,
        history.forgotten,
        history.mounted,
        in_words(_changed(targets, seen, observed)) if stale else "",
        tuple(_trial(cluster, targets, role) for role in untried),
        keys,
        stuck,
        gangs.held,
    )


def _is_of(name: EngineName, serving: Mapping[Role, Revision | None]) -> bool:
    revision = serving[name.role]
    return revision is not None and name.revision == revision.name


def _of(names: AbstractSet[EngineName], role: Role) -> list[EngineName]:
    return sorted(name for name in names if name.role is role)


def _pods(
    cluster: Cluster,
    role: Role,
    engines: AbstractSet[EngineName],
    live: Mapping[Role, Mapping[EngineName, Manifest]],
    serving: Mapping[Role, Revision | None],
) -> int:
    """Return how many pods engines should have now, and at least those that the spec asks for.

    A rollout may have more engines than the spec for a while, or fewer.
    """
    revision, found = serving[role], live[role]
    new = 1 if revision is None else revision.nodes
    sizes = (
        int(found[name]["spec"].get("replicas", 1)) if name in found else new for name in engines
    )
    return max(sum(sizes), cluster.spec.role(role).replicas * new)


def _serving(
    targets: Targets,
    role: Role,
    live: Mapping[Role, Mapping[EngineName, Manifest]],
    *,
    hold: bool,
) -> Revision | None:
    """Return the revision to make engines of; None if those that are held back are unknown."""
    wanted = targets.wanted[role]
    running = {name.revision for name in live[role]}
    if not hold or not running or wanted.name in running:
        return wanted
    return next((one for one in targets.stored if one.role is role and one.name in running), None)


def _untried(targets: Targets, live: Mapping[Role, Mapping[EngineName, Manifest]]) -> list[Role]:
    """Return the roles whose engines would be replaced by a revision that is not stored yet."""
    return [
        role
        for role in Role
        if targets.wanted[role].number == 0
        and any(name.revision != targets.wanted[role].name for name in live[role])
    ]


def _trial(cluster: Cluster, targets: Targets, role: Role) -> TryOut:
    revision = replace(targets.wanted[role], number=targets.number(role))
    return try_out(cluster, revision, beside=cluster.spec.rollout.type is RolloutType.SURGE)


def _changed(targets: Targets, seen: AbstractSet[EngineName], observed: Observed) -> set[str]:
    """Return the fields of the spec that made engines of older revisions be replaced."""
    spec = spec_of_engines(observed.cluster)
    changed: set[str] = set()
    for role in Role:
        older = [targets.named(role, name.revision) for name in seen if name.role is role]
        changed |= why_replaced(older, targets.wanted[role], spec)
    return changed


def _pairing_key(
    serving: Mapping[Role, Revision | None], live: Mapping[Role, Mapping[EngineName, Manifest]]
) -> str:
    """Return the key of the engines that serve."""
    known = [one.pairing_key for one in serving.values() if one is not None]
    if known:
        return known[0]
    engines = (engine for found in live.values() for engine in found.values())
    labels = (engine["metadata"].get("labels") or {} for engine in engines)
    return next((str(found.get(PAIRING_LABEL, "")) for found in labels), "")


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
