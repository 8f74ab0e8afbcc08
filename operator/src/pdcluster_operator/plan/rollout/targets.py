"""The revision that the engines of each role should have, and the stored ones that are kept.

A stored revision is used again as long as the user's spec means the same. Both specs are
rendered by the builder of today to find out: the one that is stored and the one of now. So
another builder, another connector or another default makes no new revision. What changes for
an engine has to come from the user.

Two kinds come from older operators. Engines may exist without a stored revision; theirs is adopted.
And a revision from before ``spec.transfer.tls`` does not mention TLS. An upgrade replaces no
engine, so its engines run without TLS, and engines with TLS never pair with them. So when one role
gets another revision, the other role may need one too. Once its engines are gone, such a revision
is not used again where the spec wants TLS.

A connector's bytes exist only in its ConfigMap, and in the operator that brought it. So a
ConfigMap of the cluster's own stays for as long as a revision that names it. What stays of those
that a namespace shares, :mod:`..connectors` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.api.conditions import ConditionType, StatusReason, find_condition
from pdcluster_operator.api.labels import PAIRING_LABEL, QUEUE_LABEL
from pdcluster_operator.api.object_names import EngineName, own_connector_name, revision_name
from pdcluster_operator.api.spec.enums import Certificates, Role, TlsMode
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.engine_pod import build_engine_pod
from pdcluster_operator.plan.builders.secrets import (
    certificates_of,
    certificates_of_template,
)
from pdcluster_operator.plan.connectors import (
    config_maps_seen,
    digest_in,
    mounted_connector,
)
from pdcluster_operator.plan.objects.drift import covers
from pdcluster_operator.plan.observed.engines import Live
from pdcluster_operator.plan.rollout.changes import spec_of_engines
from pdcluster_operator.plan.rollout.revisions import (
    REVISION_KIND,
    Revision,
    is_same_json,
    nameless,
    pairing_key,
    renamed,
    short_hash,
    stored_revisions,
    without_group,
)
from pdcluster_operator.plan.types import Observed

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


def find_targets(observed: Observed, cluster: Cluster, live: Live) -> Targets:
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


def what_targets_depend_on(observed: Observed, cluster: Cluster, live: Live) -> tuple[Any, ...]:
    """Return everything that the result of :func:`find_targets` depends on."""
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


def _pairing_keys(live: Live) -> frozenset[str]:
    engines = (engine for found in live.values() for engine in found.values())
    labels = (engine["metadata"].get("labels") or {} for engine in engines)
    return frozenset(str(found.get(PAIRING_LABEL, "")) for found in labels)


def _is_usable(
    one: Revision,
    observed: Observed,
    cluster: Cluster,
    live: Live,
) -> bool:
    """Whether engines can be made: somebody may have deleted the connector that they mount."""
    if observed.connector.digest.startswith(one.connector):
        return True
    mounted = mounted_connector(cluster.name, one.template)
    if not mounted or any(name.revision == one.name for name in live[one.role]):
        return True
    return mounted in config_maps_seen(observed)


def queues_of(live: Live) -> dict[EngineName, str]:
    """Return the queue that each existing engine was made for. Kueue lets none change it."""
    return {
        name: str((engine["metadata"].get("labels") or {}).get(QUEUE_LABEL, ""))
        for found in live.values()
        for name, engine in found.items()
    }


def adopted_revisions(
    observed: Observed,
    spec: Mapping[str, Any],
    live: Live,
    stored: set[Role],
) -> Iterator[Revision]:
    """Yield the revision of engines that exist without one: an older operator stored none.

    They are taken for engines of this spec only if that operator had seen this very spec and
    had nothing left to replace.
    """
    status = observed.cluster.get("status") or {}
    seen = status.get("observedGeneration") == observed.cluster["metadata"].get("generation")
    ready = find_condition(status, ConditionType.READY).get("reason")
    if not seen or ready in (StatusReason.PAUSED, StatusReason.REPLACING):
        return
    for role in Role:
        revisions = {name.revision for name in live[role]}
        if role in stored or len(revisions) != 1:
            continue
        name, engine = min(live[role].items(), key=lambda item: item[0])
        template = engine["spec"]["template"]
        key = str((engine["metadata"].get("labels") or {}).get(PAIRING_LABEL, ""))
        nobody = nameless(name.namespace, name.cluster, role)
        mounted = mounted_connector(name.cluster, template)
        yield Revision(
            role=role,
            name=name.revision,
            pairing_key=key,
            connector=digest_in(mounted) or observed.connector.digest,
            nodes=int(engine["spec"].get("replicas") or 1),
            template=renamed(_given(without_group(template, name)), name, nobody, key),
            spec=dict(spec),
        )


def _given(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a live template without the empty fields that an API server adds."""
    metadata = {name: value for name, value in template["metadata"].items() if value is not None}
    return {**template, "metadata": metadata}


def spec_with_tls(one: Revision, cluster: Cluster) -> dict[str, Any]:
    """Return the spec of a revision. One from before there was TLS agrees with ``cluster``.

    So neither today's default nor a spec that says Disabled replaces its engines. A spec that says
    Mounted does: its user wants TLS.
    """
    transfer = one.spec.get("transfer") or {}
    wanted = cluster.spec.transfer.tls
    held = certificates_of_template(one.template, cluster.name)
    if "tls" in transfer or held is Certificates.OPERATOR or wanted is TlsMode.MOUNTED:
        return dict(one.spec)
    return {**one.spec, "transfer": {**transfer, "tls": wanted.value}}


def speaking_alike(cluster: Cluster, found: Iterable[Revision]) -> list[Revision]:
    """Return the revisions whose engines can pair with one that is rendered today."""
    return [one for one in found if speaks_alike(one, cluster)]


def speaks_alike(one: Revision, cluster: Cluster) -> bool:
    """Whether the engines of a revision can pair with one that is rendered today."""
    return certificates_of_template(one.template, cluster.name) is certificates_of(cluster)


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
