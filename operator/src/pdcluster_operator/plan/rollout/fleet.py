"""The engines of a cluster as they were observed, for :mod:`.moves` to decide from."""

from collections.abc import Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from itertools import count, islice

from pdcluster_connector.protocol.launcher_documents import LinkState
from pdcluster_operator.api.object_names import EngineName, engine_of, pairing_key_of
from pdcluster_operator.api.schema.status_schema import MAX_ENGINES
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan.objects.ownership import engine_sets, engines_of, is_being_deleted
from pdcluster_operator.plan.observed import links, pods
from pdcluster_operator.plan.observed.engines import EngineView, Live, known_ids, observe_engines
from pdcluster_operator.plan.observed.links import PairView
from pdcluster_operator.plan.observed.routers import listed_engines, routed_engines, served_key
from pdcluster_operator.plan.rollout.revisions import Revision
from pdcluster_operator.plan.types import Manifest, Observed

Pair = tuple[EngineName, EngineName]
"""A prefill engine and a decode engine."""


@dataclass(frozen=True, slots=True)
class RoleFleet:
    """The engines of one role.

    Attributes:
        wanted: names that the spec asks for, of the target revision.
        cost: GPUs of one wanted engine.
        live: GPUs of each engine that has a StatefulSet or a pod.
        going: those of ``live`` that have pods only: they are being removed.
    """

    wanted: tuple[EngineName, ...]
    cost: int
    live: Mapping[EngineName, int]
    going: AbstractSet[EngineName] = frozenset()

    @property
    def old(self) -> list[EngineName]:
        """Engines of other revisions that are not being removed."""
        revisions = {name.revision for name in self.wanted}
        return [name for name in self.unwanted if name.revision not in revisions]

    @property
    def surplus(self) -> list[EngineName]:
        """Engines of the wanted revision that the spec does not ask for any more."""
        return sorted(set(self.unwanted).difference(self.old))

    @property
    def unwanted(self) -> list[EngineName]:
        """Engines of both kinds."""
        return sorted(self.live.keys() - self.going - set(self.wanted))

    @property
    def made(self) -> list[EngineName]:
        """Wanted engines that exist."""
        return [name for name in self.wanted if name in self.live and name not in self.going]


@dataclass(frozen=True, slots=True)
class Fleet:
    """All engines of a cluster, and what clients reach.

    Attributes:
        roles: the engines of each role.
        keys: pairing key of each engine, live or wanted.
        verified: pairs of live engines that were seen to move KV.
        idle: live engines that are known to serve nothing.
        routed: engines that some router may still send requests to.
        listed: engines that the newest routers know.
        ending: engines with a pod that is being deleted. They answer until no router knows them.
        served_key: pairing key of the routers behind the Service; empty if there are none, and
            clients then reach every engine.
        surge: engines of each role that may exist beside its replicas.
        unheard: engines that are not known to have run at any time.
        unclear: pairs that may move KV: the launcher of the decode engine does not answer.
    """

    roles: Mapping[Role, RoleFleet]
    keys: Mapping[EngineName, str]
    verified: AbstractSet[Pair]
    idle: AbstractSet[EngineName]
    routed: AbstractSet[EngineName]
    listed: AbstractSet[EngineName]
    ending: AbstractSet[EngineName]
    served_key: str
    surge: int
    unheard: AbstractSet[EngineName] = frozenset()
    unclear: AbstractSet[Pair] = frozenset()

    @property
    def proven(self) -> AbstractSet[EngineName]:
        """Engines of a verified pair."""
        return {name for pair in self.verified for name in pair}

    @property
    def unwanted(self) -> frozenset[EngineName]:
        """Engines that the spec does not ask for and that are not being removed."""
        return frozenset(name for side in self.roles.values() for name in side.unwanted)

    @property
    def scaled_to_zero(self) -> bool:
        """Whether a role is wanted without engines. Then no request is served, and none pairs."""
        return any(not side.wanted for side in self.roles.values())

    def fresh(self, side: RoleFleet) -> AbstractSet[EngineName]:
        """Return the wanted engines of a role that can do the work of old ones."""
        made = set(side.made)
        return made - self.idle if self.scaled_to_zero else made & self.proven

    def reached(self, name: EngineName) -> bool:
        """Whether clients reach an engine."""
        return self.served_key in ("", self.keys[name])


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
    kept = sorted(set(live) - lost)[:replicas]
    free = (index for index in count() if index not in kept and index not in lost)
    return sorted([*kept, *islice(free, replicas - len(kept))])


@dataclass(frozen=True, slots=True)
class Existing:
    """The engines that exist.

    Attributes:
        live: the StatefulSets of engines, by role.
        engines: those that have a StatefulSet or pods, without those that are lost.
        lost: engines whose node is gone.
        lost_pods: names of their pods.
    """

    live: Live
    engines: frozenset[EngineName]
    lost: frozenset[EngineName]
    lost_pods: AbstractSet[str]


def observe_fleet(
    observed: Observed, cluster: Cluster, existing: Existing, revisions: Mapping[Role, Revision]
) -> Fleet:
    """Return all engines of a cluster, and what clients reach of them.

    Args:
        revisions: what wanted engines are made from.
    """
    wanted = {
        role: engine_names(cluster, role, one.name, existing.live[role], existing.lost)
        for role, one in revisions.items()
    }
    keys = {name: one.pairing_key for role, one in revisions.items() for name in wanted[role]}
    for one in (*observed.pods, *engine_sets(observed.children).values()):
        if (name := engine_of(one)) is not None:
            keys[name] = pairing_key_of(one)
    roles = {
        role: _side(observed, existing.live[role], wanted[role], revisions[role], existing.engines)
        for role in Role
    }
    views = observe_engines(observed, cluster, {role: roles[role].live for role in Role})
    names = [name for side in roles.values() for name in side.live]
    pairs = [
        pair
        for group in links.by_pairing_key(views[Role.PREFILL], views[Role.DECODE], keys)
        for pair in links.observe_pairs(*group, observed.links)
    ]
    listed = listed_engines(observed, names)
    served = served_key(observed, cluster)
    return Fleet(
        roles=roles,
        keys=keys,
        verified=frozenset(_names(one) for one in pairs if one.verified),
        idle=frozenset(
            view.name for found in views.values() for view in found if view.ready is False
        ),
        routed=routed_engines(observed, names, existing.lost_pods),
        listed=listed,
        ending=engines_of(filter(is_being_deleted, observed.pods)) - existing.lost,
        served_key=served if served in keys.values() else "",
        surge=cluster.spec.rollout.max_surge,
        unheard=_unheard(observed, views, listed) | existing.lost,
        unclear=frozenset(_names(one) for one in pairs if one.state is LinkState.UNKNOWN),
    )


def _unheard(
    observed: Observed,
    views: Mapping[Role, tuple[EngineView, ...]],
    listed: AbstractSet[EngineName],
) -> frozenset[EngineName]:
    """Return the engines that do not run and are not known to have run before.

    The status names the engines that have answered. If its list is full, an engine that routers
    know counts as one that has run.
    """
    answered = known_ids(observed.cluster)
    return frozenset(
        view.name
        for found in views.values()
        for view in found
        if view.ready is False
        and not view.engine_id
        and (
            view.name.stateful_set in answered
            or len(answered) < MAX_ENGINES
            or view.name not in listed
        )
    )


def _side(
    observed: Observed,
    live: Mapping[EngineName, Manifest],
    wanted: tuple[EngineName, ...],
    revision: Revision,
    seen: AbstractSet[EngineName],
) -> RoleFleet:
    sets = {
        name: int(engine["spec"].get("replicas", 1)) * pods.gpus(engine["spec"]["template"])
        for name, engine in live.items()
    }
    going: dict[EngineName, int] = {}
    for pod in observed.pods:
        name = engine_of(pod)
        if name in seen and name is not None and name.role is revision.role and name not in sets:
            going[name] = going.get(name, 0) + pods.gpus(pod)
    cost = revision.nodes * pods.gpus(revision.template)
    return RoleFleet(wanted, cost, sets | going, frozenset(going))


def _names(pair: PairView) -> Pair:
    return pair.prefill.name, pair.decode.name
