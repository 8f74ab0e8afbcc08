"""The children of one spec: every object that should exist, and why.

Which engines and which routers these are, :mod:`.desired` decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from pdcluster_operator.api.labels import EngineName
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan.builders.connector_configmap import build_connector_configmap
from pdcluster_operator.plan.builders.disruption_budget import (
    build_disruption_budget,
    build_router_budget,
)
from pdcluster_operator.plan.builders.engine_service import build_engine_service
from pdcluster_operator.plan.builders.engine_statefulset import build_engine_statefulset
from pdcluster_operator.plan.builders.network_policies import (
    build_engines_policy,
    build_router_policy,
)
from pdcluster_operator.plan.builders.router_deployment import build_router_deployment
from pdcluster_operator.plan.builders.router_service import build_router_service
from pdcluster_operator.plan.builders.service_account import build_service_account
from pdcluster_operator.plan.drift import stamped
from pdcluster_operator.plan.model import ConnectorBundle
from pdcluster_operator.plan.rollout.routing import Routing
from pdcluster_operator.plan.rollout.stored import Revision, build_revision, mounted_connector


@dataclass(frozen=True, slots=True)
class Wanted:
    """One child, stamped with a hash of itself, and why it is wanted."""

    manifest: dict[str, Any]
    why: str


@dataclass(frozen=True, slots=True)
class Build:
    """What the children of one spec are made from.

    Attributes:
        serving: the revision that engines are made from, by role; None if it is not known.
        numbers: the number with which a role's revision has to be stored.
    """

    cluster: Cluster
    connector: ConnectorBundle
    serving: Mapping[Role, Revision | None]
    numbers: Mapping[Role, int]
    routing: Routing
    operator_namespace: str | None

    def children(
        self, names: Mapping[Role, tuple[EngineName, ...]], skipped: AbstractSet[EngineName]
    ) -> Iterator[Wanted]:
        """Yield the children in order; ``skipped`` engines are not among them."""
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


def wanted_children(
    build: Build,
    names: Mapping[Role, tuple[EngineName, ...]],
    skipped: AbstractSet[EngineName],
) -> tuple[Wanted, ...]:
    """Return the children, in the order in which they are applied.

    Args:
        skipped: engines that are not applied: they wait, or are of another revision.
    """
    wanted = build.children(names, skipped)
    return tuple(Wanted(stamped(child.manifest), child.why) for child in wanted)
