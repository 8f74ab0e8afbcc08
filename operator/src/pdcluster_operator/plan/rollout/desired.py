"""What a spec wants to exist, and which of it may be created now.

Engines are replaced by Recreate: the engines of another revision are deleted first, and the new
ones are created when the pods of the old ones are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.api.labels import EngineName, engine_of
from pdcluster_operator.api.spec.enums import ConnectorSource
from pdcluster_operator.api.spec.resolve import Engine, resolve_engine
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
    engine_revision,
)
from pdcluster_operator.plan.builders.network_policies import (
    build_engines_policy,
    build_router_policy,
)
from pdcluster_operator.plan.builders.router_deployment import build_router_deployment
from pdcluster_operator.plan.builders.router_service import build_router_service
from pdcluster_operator.plan.builders.service_account import build_service_account
from pdcluster_operator.plan.drift import stamped
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.model import ConnectorBundle, Manifest, Observed
from pdcluster_operator.plan.rollout.revision import pairing_key


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
    """

    names: Mapping[Role, tuple[EngineName, ...]]
    children: tuple[Wanted, ...]
    blocked: frozenset[EngineName]
    kept: frozenset[EngineName]
    stale: bool


def live_engines(observed: Observed) -> tuple[EngineName, ...]:
    """Return the engines that exist, sorted."""
    names = (engine_of(child) for child in observed.children if child.get("kind") == "StatefulSet")
    return tuple(sorted(name for name in names if name is not None))


def desire(observed: Observed, cluster: Cluster, memo: Memo | None = None) -> Desired:
    """Return what should exist for an accepted spec."""
    memo = memo or Memo()
    connector = observed.connector
    key, engines, revisions = memo.get("revisions", (cluster, connector.digest), _revisions)
    live = live_engines(observed)
    seen = {*live, *(name for name in map(engine_of, observed.pods) if name is not None)}
    names: dict[Role, tuple[EngineName, ...]] = {}
    blocked: set[EngineName] = set()
    kept: set[EngineName] = set()
    for role, revision in revisions.items():
        wanted = engine_names(cluster, role, revision)
        others = {name for name in seen if name.role is role and name.revision != revision}
        names[role] = wanted
        if others and cluster.spec.rollout.paused:
            names[role] = tuple(name for name in live if name in others)
            kept.update(names[role])
        elif others:
            blocked.update(name for name in wanted if name not in live)
    stale = any(name not in names[name.role] for name in seen) or bool(kept)
    build = _Build(cluster, connector, engines, key, observed.operator_namespace)
    children = memo.get("children", (build, names, kept | blocked), _stamped)
    return Desired(names, children, frozenset(blocked), frozenset(kept), stale)


def _revisions(
    cluster: Cluster, digest: str
) -> tuple[str, Mapping[Role, Engine], Mapping[Role, str]]:
    """Return the pairing key, and each role's settings and revision."""
    key = pairing_key(cluster)
    engines = {role: resolve_engine(cluster, role) for role in Role}
    revisions = {
        role: engine_revision(cluster, engine, key, digest) for role, engine in engines.items()
    }
    return key, engines, revisions


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
    engines: Mapping[Role, Engine]
    pairing_key: str
    operator_namespace: str | None

    def children(
        self, names: Mapping[Role, tuple[EngineName, ...]], skipped: AbstractSet[EngineName]
    ) -> Iterator[Wanted]:
        yield from self._fences()
        if self._needs_connector():
            connector = build_connector_configmap(self.cluster, self.connector)
            yield Wanted(connector, "the connector that engines mount")
        for role in Role:
            for name in names[role]:
                if name not in skipped:
                    yield from self._engine(name)
        router = build_router_deployment(
            self.cluster,
            self.pairing_key,
            names[Role.PREFILL],
            names[Role.DECODE],
            self.connector.digest,
        )
        if router is not None:
            yield Wanted(router, "the router before the engines")
        service = build_router_service(self.cluster, self.pairing_key)
        if service is not None:
            yield Wanted(service, "the address for clients")

    def _needs_connector(self) -> bool:
        router = self.cluster.spec.router
        if router.replicas and router.api_key_secret_ref is not None:
            return True  # the gate is in the connector, not in the router's image
        return any(engine.connector is ConnectorSource.BUNDLED for engine in self.engines.values())

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
        budget_of_routers = build_router_budget(self.cluster, self.pairing_key)
        if budget_of_routers is not None:
            yield Wanted(budget_of_routers, "how many routers may be evicted at once")

    def _engine(self, name: EngineName) -> Iterator[Wanted]:
        service = build_engine_service(self.cluster, name, self.pairing_key)
        yield Wanted(service, f"addresses of {name.role} engine {name.index}")
        engine = build_engine_statefulset(
            self.cluster, self.engines[name.role], name, self.pairing_key, self.connector.digest
        )
        yield Wanted(engine, f"{name.role} engine {name.index}")


def identity(manifest: Manifest) -> tuple[str, str]:
    """Return the kind and name of a child, which identify it within a cluster."""
    return str(manifest.get("kind")), str(manifest["metadata"]["name"])
