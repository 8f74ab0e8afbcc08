"""Which revision the engines of each role should have.

A stored revision is used again as long as the user's spec means the same. Both specs are
rendered by the builder of today to find out: the one that is stored and the one of now. So
another builder, another connector or another default makes no new revision. What changes for
an engine has to come from the user.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.api.conditions import ConditionType, find_condition
from pdcluster_operator.api.labels import PAIRING_LABEL, QUEUE_LABEL, engine_of
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.engine_pod import build_engine_pod
from pdcluster_operator.plan.model import Manifest, Observed
from pdcluster_operator.plan.objects.drift import covers
from pdcluster_operator.plan.rollout.adopted import adopted_revisions
from pdcluster_operator.plan.rollout.before_tls import (
    speaking_alike,
    speaks_alike,
    spec_with_tls,
)
from pdcluster_operator.plan.rollout.changes import spec_of_engines
from pdcluster_operator.plan.rollout.revision import is_same_json, pairing_key, short_hash
from pdcluster_operator.plan.rollout.stored import (
    REVISION_KIND,
    Revision,
    nameless,
    stored_revisions,
)
from pdcluster_operator.plan.shared_connectors.connector_mounts import (
    config_maps_seen,
    mounted_connector,
)

NO_CONNECTOR = ""


@dataclass(frozen=True, slots=True)
class Targets:
    """The revisions of one cluster.

    Attributes:
        wanted: what the spec asks for, by role.
        stored: every revision that is stored, the newest first.
    """

    wanted: Mapping[Role, Revision]
    stored: tuple[Revision, ...]

    def named(self, role: Role, name: str) -> Revision | None:
        """Return a revision that is wanted or stored; None if it is not known."""
        known = (self.wanted[role], *self.stored)
        return next((one for one in known if one.role is role and one.name == name), None)

    def number(self, role: Role) -> int:
        """Return the number that makes the wanted revision of a role the newest one."""
        others = [
            one.number
            for one in self.stored
            if one.role is role and one.name != self.wanted[role].name
        ]
        return max([self.wanted[role].number, max(others, default=0) + 1])


def find_targets(
    observed: Observed, cluster: Cluster, live: Mapping[Role, Mapping[EngineName, Manifest]]
) -> Targets:
    """Return the revisions that an accepted spec asks for.

    Args:
        live: the StatefulSets of engines, by role.
    """
    spec = spec_of_engines(observed.cluster)
    stored = stored_revisions(observed)
    known = (*stored, *adopted_revisions(observed, spec, live, {one.role for one in stored}))
    running = _pairing_keys(live)
    usable = [
        one
        for one in known
        if _is_usable(one, observed, cluster, live)
        and (speaks_alike(one, cluster) or one.pairing_key in running)
    ]
    fits = {role: list(_fitting(usable, observed, cluster, spec, role)) for role in Role}
    chosen = _of_one_key(fits)
    if len(chosen) < len(Role):
        chosen = _of_one_key({role: speaking_alike(cluster, fits[role]) for role in Role})
    key = next((one.pairing_key for one in chosen.values()), "") or pairing_key(cluster)
    digest = observed.connector.digest
    wanted = {
        role: chosen.get(role) or _fresh(cluster, role, key, digest, spec, known) for role in Role
    }
    return Targets(wanted, stored)


def what_targets_depend_on(
    observed: Observed, cluster: Cluster, live: Mapping[Role, Mapping[EngineName, Manifest]]
) -> tuple[Any, ...]:
    """Return all that :func:`find_targets` looks at. For equal values it returns the same."""
    kept = tuple(child for child in observed.children if child.get("kind") == REVISION_KIND)
    status = observed.cluster.get("status") or {}
    judged = (
        status.get("observedGeneration"),
        find_condition(status, ConditionType.READY).get("reason"),
        observed.cluster["metadata"].get("generation"),
    )
    spec = observed.cluster.get("spec")
    maps = config_maps_seen(observed)
    return cluster, spec, observed.connector.digest, kept, maps, judged, live


def render(cluster: Cluster, role: Role, key: str, digest: str) -> dict[str, Any]:
    """Return today's pod template of a role, for an engine without a name."""
    nobody = nameless(cluster.namespace, cluster.name, role)
    return build_engine_pod(cluster, resolve_engine(cluster, role), nobody, key, digest)


def _fresh(
    cluster: Cluster,
    role: Role,
    key: str,
    digest: str,
    spec: Mapping[str, Any],
    known: Iterable[Revision],
) -> Revision:
    """Render a revision; return the known one if it is the same."""
    engine = resolve_engine(cluster, role)
    template = render(cluster, role, key, digest)
    renew = cluster.spec.rollout.renew or ""
    content: Any = {"template": template, "renew": renew} if renew else template
    same_role = {one.name: one for one in known if one.role is role}
    name, salt = short_hash(content), 0
    while (held := same_role.get(name)) is not None:
        if covers(held.template, template) and held.renew == renew:
            return held
        salt += 1
        name = short_hash([content, salt])
    return Revision(role, name, key, digest, engine.parallelism.nodes, template, dict(spec), renew)


def _fitting(
    known: Iterable[Revision],
    observed: Observed,
    cluster: Cluster,
    spec: Mapping[str, Any],
    role: Role,
) -> Iterator[Revision]:
    """Yield each revision of a role that means what the spec means."""
    renew = cluster.spec.rollout.renew or ""
    today: Any = None
    for one in known:
        if one.role is not role or renew not in ("", one.renew):
            continue
        if is_same_json(one.spec, spec):
            yield one
            continue
        if today is None:
            today = _meaning(cluster, role)
        parsed = parse_cluster({**observed.cluster, "spec": spec_with_tls(one, cluster)})
        if not parsed.errors and is_same_json(_meaning(parsed.cluster, role), today):
            yield one


def _meaning(cluster: Cluster, role: Role) -> tuple[Any, int]:
    nodes = cluster.spec.role(role).parallelism.nodes
    return render(cluster, role, pairing_key(cluster), NO_CONNECTOR), nodes


def _of_one_key(fits: Mapping[Role, list[Revision]]) -> dict[Role, Revision]:
    """Return the newest fitting revision of each role; engines of both must pair."""
    prefill, decode = fits[Role.PREFILL], fits[Role.DECODE]
    if not prefill or not decode:
        return {role: found[0] for role, found in fits.items() if found}
    for one in prefill:
        for other in decode:
            if one.pairing_key == other.pairing_key:
                return {Role.PREFILL: one, Role.DECODE: other}
    return {Role.PREFILL: prefill[0]}


def _pairing_keys(live: Mapping[Role, Mapping[EngineName, Manifest]]) -> frozenset[str]:
    engines = (engine for found in live.values() for engine in found.values())
    labels = (engine["metadata"].get("labels") or {} for engine in engines)
    return frozenset(str(found.get(PAIRING_LABEL, "")) for found in labels)


def _is_usable(
    one: Revision,
    observed: Observed,
    cluster: Cluster,
    live: Mapping[Role, Mapping[EngineName, Manifest]],
) -> bool:
    """Whether engines can be made: somebody may have deleted the connector that they mount."""
    if observed.connector.digest.startswith(one.connector):
        return True
    mounted = mounted_connector(cluster.name, one.template)
    if not mounted or any(name.revision == one.name for name in live[one.role]):
        return True
    return mounted in config_maps_seen(observed)


def live_by_role(observed: Observed) -> dict[Role, dict[EngineName, Manifest]]:
    """Return the StatefulSets of engines, by role and by name."""
    found: dict[Role, dict[EngineName, Manifest]] = {role: {} for role in Role}
    for child in observed.children:
        name = engine_of(child) if child.get("kind") == "StatefulSet" else None
        if name is not None:
            found[name.role][name] = child
    return found


def queues_of(live: Mapping[Role, Mapping[EngineName, Manifest]]) -> dict[EngineName, str]:
    """Return the queue that each existing engine was made for. Kueue lets none change it."""
    return {
        name: str((engine["metadata"].get("labels") or {}).get(QUEUE_LABEL, ""))
        for found in live.values()
        for name, engine in found.items()
    }
