"""The children of one spec: every object that should exist, with a reason for each.

Which engines and which routers these are, :mod:`.desired` decides.

A new revision is tried out on the API server before anything is made of it. The revision is stored
once the server would take its objects. So a stored revision has passed, and one that was refused
leaves the engines as they are, or is why a new cluster has none.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from pdcluster_operator.api import object_names
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.types import Cluster, Role, RolloutType
from pdcluster_operator.plan import connectors
from pdcluster_operator.plan.builders import engine_objects, protection, router
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.objects.drift import stamped
from pdcluster_operator.plan.objects.ownership import identity
from pdcluster_operator.plan.rollout import moves, revisions
from pdcluster_operator.plan.rollout.gangs import Gangs
from pdcluster_operator.plan.rollout.revisions import Revision
from pdcluster_operator.plan.rollout.routing import Members, Routing, router_template
from pdcluster_operator.plan.types import Apply, ConnectorBundle, TryOut


@dataclass(frozen=True, slots=True)
class Build:
    """What the children of one spec are made from.

    Attributes:
        serving: the revision that engines are made from, by role.
        numbers: the number with which a role's revision has to be stored.
        pods: how many pods the engines of a role should have.
        config_maps: names of the ConfigMaps with a connector that exist.
        gangs: which pods get their nodes together.
        queues: the queue of each engine that exists; empty for those without. Kueue lets none
            change it.
        given: the spec as the user wrote it.
        stored_routers: the template that each router's Deployment carries, by its name.
        every_address: see :class:`pdcluster_operator.plan.types.Place`.
    """

    cluster: Cluster
    connector: ConnectorBundle
    serving: Mapping[Role, Revision]
    numbers: Mapping[Role, int]
    routing: Routing
    operator_namespace: str | None
    pods: Mapping[Role, int]
    config_maps: frozenset[str] = frozenset()
    gangs: Gangs = field(default_factory=Gangs)
    queues: Mapping[EngineName, str] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    stored_routers: Mapping[str, str] = field(default_factory=dict)
    every_address: str = ""

    def children(
        self, names: Mapping[Role, tuple[EngineName, ...]], skipped: AbstractSet[EngineName]
    ) -> Iterator[Apply]:
        """Yield the children in order; ``skipped`` engines are not among them."""
        yield from self._fences()
        routers = self._routers()
        yield from self._connectors(routers)
        for gang in self.gangs.groups:
            group = engine_objects.build_pod_group(
                self.cluster, gang.name, gang.pods, gang.priority
            )
            yield Apply(group, "pods that get their nodes together")
        for role in Role:
            revision = self.serving[role]
            yield from self._revision(revision)
            for name in names[role]:
                if name not in skipped:
                    yield from self._engine(name, revision)
        stop = self.routing.stop
        for one in routers:
            yield Apply(one, "the router that sends requests to the engines", makes_room=stop)
        service = router.build_router_service(self.cluster, self.routing.served_key)
        if service is not None:
            yield Apply(service, "the address for clients", makes_room=stop)

    def _routers(self) -> list[dict[str, Any]]:
        """Return the routers of each pairing key that has engines of both roles."""
        if self.cluster.spec.router.pods == 0:
            return []
        return [
            self._router(key, members)
            for key, members in self.routing.members.items()
            if all(members[role] for role in Role)
        ]

    def _router(self, key: str, members: Members) -> dict[str, Any]:
        name = object_names.router_deployment_name(self.cluster.name, key)
        stored = self.stored_routers.get(name, "")
        made_from = self.given, key, self._gate(), stored, self.every_address
        rendered = router_template(self.cluster, *made_from)
        engines = [name for role in Role for name in members[role]]
        made = router.build_router_deployment(
            self.cluster, key, router.bound(rendered["template"], engines), stop=self.routing.stop
        )
        text = json.dumps(rendered, sort_keys=True, separators=(",", ":"))
        made["metadata"].setdefault("annotations", {})[object_names.RENDERED_ANNOTATION] = text
        return made

    def _connectors(self, routers: Iterable[Mapping[str, Any]]) -> Iterator[Apply]:
        """Yield this operator's connector if it is mounted. Of another one it has no bytes."""
        templates = [one.template for one in self.serving.values()]
        templates += [one["spec"]["template"] for one in routers]
        if object_names.connector_name(self.connector.digest) in map(
            connectors.mounted_connector, templates
        ):
            shared = connectors.build_connector_configmap(self.cluster.namespace, self.connector)
            yield Apply(shared, "the connector that engines mount")

    def _gate(self) -> str:
        """Return the ConfigMap that routers mount: that of the engines, so that both stay.

        Engines whose image holds the connector mount none. Their routers stay with the one that
        there was when the engines were made.
        """
        engines = self.serving[Role.PREFILL]
        if mounted := connectors.mounted_connector(engines.template):
            return mounted
        older = object_names.connector_name(engines.connector)
        newest = object_names.connector_name(self.connector.digest)
        return older if older in self.config_maps else newest

    def _revision(self, revision: Revision) -> Iterator[Apply]:
        """Yield the ControllerRevision if it is not stored, or is not the newest one."""
        number = self.numbers.get(revision.role, revision.number)
        if number != revision.number:
            stored = revisions.build_revision(self.cluster, replace(revision, number=number))
            yield Apply(stored, f"what {revision.role} engines are made from")

    def _fences(self) -> Iterator[Apply]:
        """Yield what must exist before the first pod: its identity, and who may reach it."""
        account = protection.build_service_account(self.cluster, self.given)
        yield Apply(account, "the ServiceAccount of all pods")
        policy = protection.build_engines_policy(self.cluster, self.operator_namespace)
        yield Apply(policy, "who may reach the engines")
        if (policy_of_router := protection.build_router_policy(self.cluster)) is not None:
            yield Apply(policy_of_router, "who may reach the router")
        for role in Role:
            budget = protection.build_disruption_budget(self.cluster, role, self.pods[role])
            yield Apply(budget, f"how many {role} engines may be evicted at once")
        budget_of_routers = protection.build_router_budget(self.cluster, self.routing.served_key)
        if budget_of_routers is not None:
            yield Apply(budget_of_routers, "how many routers may be evicted at once")

    def _engine(self, name: EngineName, revision: Revision) -> Iterator[Apply]:
        service = engine_objects.build_engine_service(self.cluster, name, revision.pairing_key)
        yield Apply(service, f"addresses of {name.role} engine {name.index}")
        queue = self.queues.get(name, self.cluster.spec.scheduling.queue_name or "")
        template = revisions.engine_template(revision, name)
        if group := self.gangs.of.get(name):  # stored templates name no PodGroup of ours
            template["spec"] = {**template["spec"], "schedulingGroup": {"podGroupName": group}}
        engine = engine_objects.build_engine_statefulset(
            self.cluster,
            name,
            template,
            pairing_key=revision.pairing_key,
            nodes=revision.nodes,
            queue=queue,
        )
        yield Apply(engine, f"{name.role} engine {name.index}")


def wanted_children(
    build: Build,
    names: Mapping[Role, tuple[EngineName, ...]],
    skipped: AbstractSet[EngineName],
    memo: Memo | None = None,
) -> tuple[Apply, ...]:
    """Return the children, stamped with hashes of themselves, in the order of their applies.

    Args:
        skipped: engines that are not applied: they wait, or are of another revision.
        memo: of the plans before. A child that is as it was is not hashed again.
    """
    memo = memo or Memo()
    return tuple(
        one  # Others share it: operators of two releases would stamp it in turns.
        if connectors.is_shared_connector(one.manifest)
        else replace(
            one, manifest=memo.get(("child", *identity(one.manifest)), (one.manifest,), stamped)
        )
        for one in build.children(names, skipped)
    )


USED_UP = "exceeded quota"


def try_out(cluster: Cluster, revision: Revision, *, first: bool) -> TryOut:
    """Return the step that tries a revision out; see :class:`TryOut` for ``first``."""
    name = EngineName(cluster.namespace, cluster.name, revision.role, revision.name, 0)
    engine = engine_objects.build_engine_statefulset(
        cluster,
        name,
        revisions.engine_template(revision, name),
        pairing_key=revision.pairing_key,
        nodes=revision.nodes,
    )
    why = f"would the API server take {revision.role} engines of revision {revision.name}?"
    # The quota of a new cluster may be free later, and its pods wait for that by themselves.
    beside = cluster.spec.rollout.type is RolloutType.SURGE and not first
    stored = revisions.build_revision(cluster, revision)
    address = engine_objects.build_engine_service(cluster, name, revision.pairing_key)
    tried = (engine, _pod_of(engine)) if first else (engine, _pod_of(engine), address)
    return TryOut(tried, stored, beside, why, first)


def refusal(step: TryOut, kind: str, message: str) -> str | None:
    """Return why a revision is refused, in words; None if what it lacks may come by itself.

    Args:
        message: with which the API server refused the dry run of a ``kind``.
    """
    if USED_UP in message and not step.beside:
        return None
    remedy = f"; {moves.MAKE_ROOM}" if USED_UP in message else ""
    result = "no engine of either role is created" if step.first else "the old engines serve on"
    return f"the API server refuses the new {kind}, so {result}: {message}{remedy}"


def _pod_of(engine: dict[str, Any]) -> dict[str, Any]:
    """Return a pod as the StatefulSet would make it, with a name that the server makes up."""
    template, metadata = engine["spec"]["template"], engine["metadata"]
    labels = {**template["metadata"]["labels"], object_names.POD_INDEX_LABEL: "0"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **template["metadata"],
            "generateName": f"{metadata['name']}-",
            "namespace": metadata["namespace"],
            "labels": labels,
        },
        "spec": template["spec"],
    }
