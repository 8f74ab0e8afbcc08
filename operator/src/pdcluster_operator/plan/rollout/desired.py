"""The objects that should exist for a spec, and which of them may be created now.

:func:`desire` works in four steps, and each has a room of its own: :mod:`.targets` chooses the
revisions, :mod:`.moves` places engines while others are still there, :mod:`.routing` says which
engines the routers know, and :mod:`.wanted_children` makes the objects.
"""

from collections.abc import Mapping, Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import chain

from pdcluster_operator.api.conditions import ConditionType, StatusReason, find_condition
from pdcluster_operator.api.object_names import QUEUE_LABEL, EngineName
from pdcluster_operator.api.spec.engine_types import Switch
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.api.spec.types import Cluster, Role, RolloutType
from pdcluster_operator.plan.builders import protection
from pdcluster_operator.plan.connectors import config_maps_seen
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.objects.ownership import engine_sets, engines_of
from pdcluster_operator.plan.observed.engines import Live, live_by_role
from pdcluster_operator.plan.observed.pods import lost_engines
from pdcluster_operator.plan.observed.routers import listed_engines, served_key
from pdcluster_operator.plan.rollout import moves as moving, revisions, routing as routers
from pdcluster_operator.plan.rollout.fleet import Existing, observe_fleet
from pdcluster_operator.plan.rollout.gangs import GangEngines, find_gangs, without
from pdcluster_operator.plan.rollout.revisions import Revision
from pdcluster_operator.plan.rollout.routing import Routing, route
from pdcluster_operator.plan.rollout.targets import Targets, find_targets, of_engines
from pdcluster_operator.plan.rollout.wanted_children import Build, try_out, wanted_children
from pdcluster_operator.plan.types import Apply, Manifest, Observed, TryOut

Names = Mapping[Role, tuple[EngineName, ...]]


@dataclass(frozen=True, slots=True)
class Desired:
    """What should exist.

    Attributes:
        names: the engines that serve the spec, by role; with ``paused`` the old ones.
        children: to be applied, in order.
        blocked: engines that wait until those of another revision are gone, or for a gang.
        held: those of ``blocked`` that wait until the first pair has its nodes.
        kept: engines of another revision that stay for now.
        stale: whether an engine or a pod of another revision exists.
        trials: what must succeed before a revision is stored, and before Recreate ends engines.
        forgotten: names of the ControllerRevisions that the history has no place for.
        changed: the fields of the spec that made engines be replaced, in words.
        keys: pairing key of each engine.
        stuck: why engines cannot be replaced; empty if they can.
        serves: whether clients reach a verified pair until Recreate ends it.
    """

    names: Names
    keys: Mapping[EngineName, str]
    children: tuple[Apply, ...] = ()
    blocked: frozenset[EngineName] = frozenset()
    held: frozenset[EngineName] = frozenset()
    kept: frozenset[EngineName] = frozenset()
    stale: bool = False
    trials: tuple[TryOut, ...] = ()
    forgotten: frozenset[str] = frozenset()
    changed: str = ""
    stuck: str = ""
    serves: bool = False


@dataclass(frozen=True, slots=True)
class _Choice:
    """The revisions of a spec, and which of them engines are made from now.

    Attributes:
        serving: what engines are made from, by role.
        untried: roles whose new revision was not tried out on the API server yet, and whether
            they have no engine and get none of a stored revision.
        hold: no engine is replaced, because of ``rollout.paused``, of ``untried``, or because the
            API server refuses what the spec asks for.
    """

    targets: Targets
    serving: Mapping[Role, Revision]
    untried: Mapping[Role, bool]
    hold: bool


def in_force(observed: Observed) -> tuple[Observed, Cluster]:
    """Return what is observed with the spec that engines and routers run with, as it is stored.

    It is for a cluster whose own spec is not accepted: changes wait as with ``rollout.paused``.
    """
    live = engine_sets(observed.children)
    running = {(name.role, name.revision) for name in live}
    stored = (
        one for one in revisions.stored_revisions(observed) if (one.role, one.name) in running
    )
    given = as_mapping(observed.cluster.get("spec"))
    spec: Manifest = {
        **{name: given[name] for name in given if name not in protection.NOT_STORED},
        **protection.accepted_fields(observed),
    }
    if (newest := next(stored, None)) is not None:
        spec = revisions.with_spec_of_engines(spec, newest.spec)
    held = routers.with_stored_router(observed, spec)
    held["rollout"] = {**as_mapping(spec.get("rollout")), "paused": True}
    for role in Role:
        count = sum(name.role is role for name in live)
        held[role.value] = {**as_mapping(spec.get(role.value)), "replicas": count}
    cluster = {**observed.cluster, "spec": held}
    return replace(observed, cluster=cluster), parse_cluster(cluster).cluster


def desire(
    observed: Observed,
    cluster: Cluster,
    lost_pods: AbstractSet[str] = frozenset(),
    memo: Memo | None = None,
    *,
    accepted: bool = True,
    downloads: bool = False,
) -> Desired:
    """Return what should exist.

    Args:
        lost_pods: names of the pods that are lost with their nodes.
        memo: of the last plans for this cluster.
        accepted: whether the spec is. If not, ``cluster`` is the one that is :func:`in_force`, and
            the engines that exist stay: none is added or removed.
        downloads: whether engines of the spec wait for their weights.
    """
    memo = memo or Memo()
    live, lost = live_by_role(observed), lost_engines(observed.pods, lost_pods)
    # The pods of a lost engine may stay for ever. Nothing waits for them.
    there = (engines_of(observed.pods) - lost).union(*live.values())
    existing = Existing(live, there, lost, lost_pods)
    if not accepted and not any(live.values()):
        return Desired(dict.fromkeys(Role, ()), {})
    # Step 1: choose the revision that the engines of each role are made from.
    choice = _choose(observed, cluster, live, memo, downloads=downloads)
    # Step 2: place engines. Those that exist keep their names; a rollout creates and removes a few
    # at a time; a gang holds back what could take the nodes of the first pair.
    fleet = observe_fleet(observed, cluster, existing, choice.serving)
    target = choice.targets.wanted[Role.PREFILL].pairing_key
    if target not in fleet.keys.values():  # no engine has it yet
        target = choice.serving[Role.PREFILL].pairing_key
    replacing = any(one.revision != choice.serving[one.role].name for one in existing.engines)
    frozen = not accepted or (choice.hold and replacing)
    moves = (moving.frozen if frozen else moving.next_moves)(fleet, cluster.spec.rollout.type)
    if not accepted:  # routers forget an engine whose node is gone
        everyone = frozenset(chain(*live.values()))
        moves = moving.Moves(everyone, lost, frozenset())
    kept = fleet.unwanted - moves.removed
    wanted = {
        role: [one for one in side.wanted if not frozen or one in moves.made]
        for role, side in fleet.roles.items()
    }
    names = {
        role: (*wanted[role], *sorted(name for name in kept if name.role is role)) for role in Role
    }
    blocked = frozenset(chain(*wanted.values())) - moves.made
    joint = cluster.spec.scheduling.gang is Switch.ENABLED and not observed.place.one_node
    gangs = find_gangs(
        GangEngines(
            cluster=cluster.name,
            names=without(names, blocked),
            live=live,
            keys=fleet.keys,
            revisions=choice.serving,
            pods=observed.pods,
        ),
        enabled=joint and observed.pod_groups,
    )
    blocked |= gangs.held
    # Step 3: route clients to the engines that serve now.
    trials, serves = dict(choice.untried), False
    if replacing and not choice.hold and cluster.spec.rollout.type is RolloutType.RECREATE:
        # Recreate ends the old engines at once. Their routers end with them, or the engines would
        # wait until no router knows them. What is stored may have been tried out long ago.
        trials |= {role: False for role, side in fleet.roles.items() if side.old}
        serving = set(chain(*live.values())) - fleet.ending
        serving &= fleet.listed if fleet.served_key else serving
        pairs = ((one, other) for one, other in fleet.verified if fleet.reached(one))
        serves = any(map(serving.issuperset, pairs))
        new = {role: tuple(wanted[role]) for role in Role}
        routing = Routing(target, {target: new}, stop=True)
    else:
        routing = route(observed, fleet, moves, target, hold=choice.hold)
    # Step 4: make the objects.
    current = [one for one in Role if choice.serving[one] is choice.targets.wanted[one]]
    old = existing.engines.difference(*names.values()) | kept
    stale = bool(old) or len(current) < len(Role)
    made = {role: set(names[role]) - blocked for role in Role}
    build = Build(
        cluster=cluster,
        connector=observed.connector,
        serving=choice.serving,
        numbers={one: choice.targets.newest(one).number for one in current if accepted},
        routing=routing.without(gangs.held),
        operator_namespace=observed.place.namespace,
        pods={role: _pods(cluster, role, made[role], live, choice) for role in Role},
        config_maps=config_maps_seen(observed),
        gangs=gangs if observed.pod_groups else replace(gangs, groups=()),
        queues={
            name: str((engine["metadata"].get("labels") or {}).get(QUEUE_LABEL, ""))
            for name, engine in chain.from_iterable(found.items() for found in live.values())
        },
        given=observed.cluster.get("spec") or {},
        stored_routers=routers.stored_templates(observed),
        every_address=observed.place.every_address,
    )
    spec = revisions.spec_of_engines(observed.cluster)
    causes = (choice.targets.causes(role, existing.engines, spec) for role in Role)
    # Engines of another revision are not applied: their StatefulSets stay as they are.
    skipped = kept | blocked
    children = memo.get(
        "children",
        (build, names, skipped),
        lambda *_: wanted_children(build, names, skipped, memo),
    )
    return Desired(
        names=names,
        keys=fleet.keys,
        children=children,
        blocked=blocked,
        held=gangs.held,
        kept=kept,
        stale=stale,
        trials=tuple(
            try_out(cluster, choice.targets.newest(role), first=first)
            for role, first in trials.items()
        ),
        forgotten=choice.targets.forgotten(cluster, existing.engines),
        changed=revisions.in_words(chain(*causes)) if stale else "",
        stuck=moves.stuck,
        serves=serves,
    )


def _choose(
    observed: Observed, cluster: Cluster, live: Live, memo: Memo, *, downloads: bool
) -> _Choice:
    targets = find_targets(observed, cluster, live, memo)
    paused = cluster.spec.rollout.paused
    untried = [
        role
        for role, wanted in targets.wanted.items()
        if wanted.number == 0 and {name.revision for name in live[role]} != {wanted.name}
        if not (paused and live[role])
    ]
    progress = find_condition(observed.cluster.get("status"), ConditionType.PROGRESSING)
    refused = progress.get("reason") == StatusReason.TEMPLATE_REFUSED and (
        progress.get("observedGeneration") == cluster.generation
    )
    # The weights of a revision that is stored may be gone, so what serves now stays for it, too.
    waits = downloads and any(live.values())
    hold = paused or waits or any(live[role] or refused for role in untried) or observed.unread
    serving = dict(targets.wanted)
    if hold:
        key = served_key(observed, cluster)
        served = listed_engines(observed, chain(*live.values()), key)
        for role, engines in live.items():
            reached = {name: one for name, one in engines.items() if name in served}
            if found := reached or engines:
                serving[role] = _serving(observed, targets, role, found)
                key = serving[role].pairing_key
        # A role that has no engine now gets those that pair with the other one's. Without engines
        # and routers, it is the newest key of which both roles are stored.
        ours, theirs = ([r.pairing_key for r in targets.stored if r.role is role] for role in Role)
        key = key or next((one for one in ours if one in theirs), "")
        paired = [one for one in targets.stored if one.pairing_key == key]
        empty = {one.role: one for one in reversed(paired) if not live[one.role]}
        serving |= empty
    first = {role: not live[role] and serving[role] is targets.wanted[role] for role in untried}
    return _Choice(targets, serving, first, hold)


def _pods(
    cluster: Cluster,
    role: Role,
    engines: AbstractSet[EngineName],
    live: Live,
    choice: _Choice,
) -> int:
    """Return how many pods engines should have now, and at least those that the spec asks for.

    A rollout may have more engines than the spec for a while, or fewer.
    """
    new, found = choice.serving[role].nodes, live[role]
    sizes = (
        int(found[name]["spec"].get("replicas", 1)) if name in found else new for name in engines
    )
    return max(sum(sizes), cluster.spec.role(role).replicas * new)


def _serving(
    observed: Observed, targets: Targets, role: Role, engines: Mapping[EngineName, Manifest]
) -> Revision:
    """Return the revision to make engines of while a change is held.

    It may be one that is stored no more. Then engines are all that is left of it.

    Args:
        engines: those that clients reach. What is held back may not work, so none is made of it.
    """
    known = (targets.wanted[role], *(one for one in targets.stored if one.role is role))
    running = {name.revision for name in engines}
    found = (one for one in known if one.name in running)
    return next(found, None) or of_engines(observed, engines, {})
