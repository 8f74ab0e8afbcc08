"""What a spec wants to exist, and which of it may be created now.

While engines of another revision exist, :mod:`.moves` says what comes next and :mod:`.routing`
which engines the routers know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from pdcluster_operator.api.labels import PAIRING_LABEL, EngineName, engine_of
from pdcluster_operator.api.spec.enums import RolloutType
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan.builders.connector_configmap import build_connector_configmap
from pdcluster_operator.plan.builders.disruption_budget import (
    build_disruption_budget,
    build_router_budget,
)
from pdcluster_operator.plan.builders.engine_service import build_engine_service
from pdcluster_operator.plan.builders.engine_statefulset import (
    build_engine_statefulset,
    engine_names,
)
from pdcluster_operator.plan.builders.network_policies import (
    build_engines_policy,
    build_router_policy,
)
from pdcluster_operator.plan.builders.router_deployment import build_router_deployment
from pdcluster_operator.plan.builders.router_service import build_router_service
from pdcluster_operator.plan.builders.service_account import build_service_account
from pdcluster_operator.plan.drift import stamped
from pdcluster_operator.plan.lost import lost_engines
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.model import ConnectorBundle, Manifest, Observed, TryOut
from pdcluster_operator.plan.rollout.changes import in_words, spec_of_engines, what_changed
from pdcluster_operator.plan.rollout.fleet import engine_keys, observe_fleet
from pdcluster_operator.plan.rollout.history import keep_history
from pdcluster_operator.plan.rollout.moves import frozen, next_moves
from pdcluster_operator.plan.rollout.routing import Routing, route
from pdcluster_operator.plan.rollout.stored import Revision, build_revision, mounted_connector
from pdcluster_operator.plan.rollout.targets import (
    Targets,
    find_targets,
    live_by_role,
    what_targets_depend_on,
)
from pdcluster_operator.plan.rollout.try_out import try_out


@dataclass(frozen=True, slots=True)
class Wanted:
    """One child, stamped with a hash of itself, and why it is wanted."""

    manifest: dict[str, Any]
    why: str


@dataclass(frozen=True, slots=True)
class Desired:
    """What should exist.

    Attributes:
        names: the engines that serve the spec, by role; with ``paused`` the old ones.
        children: to be applied, in order.
        blocked: engines that wait until those of another revision are gone.
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


def live_engines(observed: Observed) -> tuple[EngineName, ...]:
    """Return the engines that exist, sorted."""
    return tuple(sorted(name for names in live_by_role(observed).values() for name in names))


def desire(observed: Observed, cluster: Cluster, now: float, memo: Memo | None = None) -> Desired:
    """Return what should exist for an accepted spec."""
    memo = memo or Memo()
    live = live_by_role(observed)
    lost = lost_engines(observed.pods, now)
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
        fleet = observe_fleet(observed, cluster, live, names, target, seen, lost, keys, now, memo)
        replacing = any(not _is_of(name, serving) for name in seen)
        held = hold and replacing
        moves = frozen(fleet) if held else next_moves(fleet, cluster.spec.rollout.type)
        blocked = {name for found in names.values() for name in found} - moves.made
        kept -= moves.removed
        stuck = moves.stuck
        if cluster.spec.rollout.type is not RolloutType.RECREATE or not replacing:
            routing = route(observed, fleet, moves, key, hold=hold)
        elif not hold:
            routing = Routing(key, {key: names})
    names = {role: (*names[role], *_of(kept, role)) for role in Role}
    waiting = any(serving[role] is not targets.wanted[role] for role in Role)
    stale = bool(seen.difference(*names.values())) or bool(kept) or waiting
    history = keep_history(cluster, targets, seen)
    build = _Build(
        cluster,
        observed.connector,
        serving,
        {role: targets.number(role) for role in Role if serving[role] is targets.wanted[role]},
        routing,
        observed.operator_namespace,
    )
    return Desired(
        names,
        memo.get("children", (build, names, kept | blocked), _stamped),
        frozenset(blocked),
        frozenset(kept),
        stale,
        history.forgotten,
        history.mounted,
        in_words(list(_changes(targets, seen, spec_of_engines(observed.cluster)))) if stale else "",
        tuple(_trial(cluster, targets, role) for role in untried),
        keys,
        stuck,
    )


def _is_of(name: EngineName, serving: Mapping[Role, Revision | None]) -> bool:
    revision = serving[name.role]
    return revision is not None and name.revision == revision.name


def _of(names: AbstractSet[EngineName], role: Role) -> list[EngineName]:
    return sorted(name for name in names if name.role is role)


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


def _changes(
    targets: Targets, seen: AbstractSet[EngineName], spec: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the fields in which the spec differs from those that older engines were made from."""
    for role, name in sorted({(name.role, name.revision) for name in seen}):
        wanted, old = targets.wanted[role], targets.named(role, name)
        if old is not None and old.name != wanted.name:
            rekeyed = old.pairing_key != wanted.pairing_key
            yield from what_changed(old.spec, spec, role, rekeyed=rekeyed)


def _stamped(
    build: _Build,
    names: Mapping[Role, tuple[EngineName, ...]],
    skipped: AbstractSet[EngineName],
) -> tuple[Wanted, ...]:
    wanted = build.children(names, skipped)
    return tuple(Wanted(stamped(child.manifest), child.why) for child in wanted)


@dataclass(frozen=True, slots=True)
class _Build:
    """Makes the children of one spec."""

    cluster: Cluster
    connector: ConnectorBundle
    serving: Mapping[Role, Revision | None]
    numbers: Mapping[Role, int]
    routing: Routing
    operator_namespace: str | None

    def children(
        self, names: Mapping[Role, tuple[EngineName, ...]], skipped: AbstractSet[EngineName]
    ) -> Iterator[Wanted]:
        yield from self._fences()
        if self._needs_connector():
            connector = build_connector_configmap(self.cluster, self.connector)
            yield Wanted(connector, "the connector that engines mount")
        for role in Role:
            revision = self.serving[role]
            if revision is None:
                continue
            yield from self._revision(revision)
            for name in names[role]:
                if name not in skipped:
                    yield from self._engine(name, revision)
        for key, members in self.routing.members.items():
            router = build_router_deployment(
                self.cluster, key, members[Role.PREFILL], members[Role.DECODE], self._gate()
            )
            if router is not None:
                yield Wanted(router, "the router before the engines")
        service = build_router_service(self.cluster, self.routing.served_key)
        if service is not None:
            yield Wanted(service, "the address for clients")

    def _needs_connector(self) -> bool:
        digest = self.connector.digest
        router = self.cluster.spec.router
        if router.replicas and router.api_key_secret_ref is not None and self._gate() == digest:
            return True  # the gate is in the connector, not in the router's image
        return any(
            digest.startswith(one.connector) and mounted_connector(self.cluster.name, one.template)
            for one in self.serving.values()
            if one is not None
        )

    def _gate(self) -> str:
        """Return the connector that routers mount: that of the engines, so that both stay."""
        known = [one.connector for one in self.serving.values() if one is not None]
        return known[0] if known else self.connector.digest

    def _revision(self, revision: Revision) -> Iterator[Wanted]:
        """Yield the ControllerRevision if it is not stored, or is not the newest one."""
        number = self.numbers.get(revision.role, revision.number)
        if number != revision.number:
            stored = build_revision(self.cluster, replace(revision, number=number))
            yield Wanted(stored, f"what {revision.role} engines are made from")

    def _fences(self) -> Iterator[Wanted]:
        """Yield what must exist before the first pod: its identity, and who may reach it."""
        yield Wanted(build_service_account(self.cluster), "who the pods are")
        policy = build_engines_policy(self.cluster, self.operator_namespace)
        yield Wanted(policy, "who may reach the engines")
        policy_of_router = build_router_policy(self.cluster)
        if policy_of_router is not None:
            yield Wanted(policy_of_router, "who may reach the router")
        for role in Role:
            budget = build_disruption_budget(self.cluster, role)
            yield Wanted(budget, f"how many {role} engines may be evicted at once")
        budget_of_routers = build_router_budget(self.cluster, self.routing.served_key)
        if budget_of_routers is not None:
            yield Wanted(budget_of_routers, "how many routers may be evicted at once")

    def _engine(self, name: EngineName, revision: Revision) -> Iterator[Wanted]:
        service = build_engine_service(self.cluster, name, revision.pairing_key)
        yield Wanted(service, f"addresses of {name.role} engine {name.index}")
        engine = build_engine_statefulset(self.cluster, revision, name)
        yield Wanted(engine, f"{name.role} engine {name.index}")


def identity(manifest: Manifest) -> tuple[str, str]:
    """Return the kind and name of a child, which identify it within a cluster."""
    return str(manifest.get("kind")), str(manifest["metadata"]["name"])
