"""The revision that the engines of each role should have, and the stored ones that are kept.

A stored revision is used again as long as the user's spec means the same. Both specs are
rendered by the builder of today to find out: the one that is stored and the one of now. So
another builder, another connector or another default makes no new revision. What changes for
an engine has to come from the user.

A connector's bytes exist only in its ConfigMap, and in the operator that brought it. A revision
whose connector is gone is used only while its engines exist.

Somebody may delete the ControllerRevisions of engines that run. Then these engines are what is left
of their revision, and it is made again from them. One that is rendered by today's operator may
differ, and would replace them for nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from pdcluster_operator.api import object_names
from pdcluster_operator.api.conditions import ConditionType, Status, StatusReason, find_condition
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec import parse, resolve
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan.builders.engine_objects import build_engine_pod
from pdcluster_operator.plan.connectors import config_maps_seen, mounted_connector
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.objects.drift import covers
from pdcluster_operator.plan.observed.engines import Live, nodes_of
from pdcluster_operator.plan.rollout import revisions
from pdcluster_operator.plan.rollout.revisions import Revision
from pdcluster_operator.plan.types import Manifest, Observed


@dataclass(frozen=True, slots=True)
class Targets:
    """The revisions of one cluster.

    Attributes:
        wanted: what the spec asks for, by role.
        stored: every revision that is stored, the newest first.
    """

    wanted: Mapping[Role, Revision]
    stored: tuple[Revision, ...]

    def causes(self, role: Role, engines: Iterable[EngineName], spec: Manifest) -> set[str]:
        """Return the fields of the spec because of which those engines of a role are replaced.

        The other role's fields count only if the pairing key is another one.

        Args:
            spec: see :func:`.revisions.spec_of_engines`.
        """
        names, wanted = {name.revision for name in engines if name.role is role}, self.wanted[role]
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        fields: set[str] = set()
        for old in self.stored:
            if old.role is not role or old.name not in names or old.name == wanted.name:
                continue
            rekeyed = old.pairing_key != wanted.pairing_key
            for path in revisions.changed_fields(old.spec, spec):
                if rekeyed or not path.startswith(f"{other.value}."):
                    fields.add(path)
            if old.renew != wanted.renew:
                fields.add("rollout.renew")
        return fields

    def newest(self, role: Role) -> Revision:
        """Return the wanted revision of a role, with a number that makes it the newest one."""
        wanted = self.wanted[role]
        others = (one.number for one in self.stored if one.role is role and one.name != wanted.name)
        number = min(max(others, default=0) + 1, 2**63 - 1)  # more does not fit into the field
        return replace(wanted, number=max(wanted.number, number))

    def forgotten(self, cluster: Cluster, seen: AbstractSet[EngineName]) -> frozenset[str]:
        """Return the names of the ControllerRevisions to delete.

        They are those over the limit that are not wanted and have no engine.
        """
        in_use = {(name.role, name.revision) for name in seen}
        in_use |= {(role, one.name) for role, one in self.wanted.items()}
        forgotten: set[str] = set()
        for role in Role:
            of_role = [one.name for one in self.stored if one.role is role]
            idle = [name for name in of_role if (role, name) not in in_use]
            over = idle[cluster.spec.rollout.revision_history_limit :]
            forgotten |= {object_names.revision_name(cluster.name, role, name) for name in over}
        return frozenset(forgotten)


def find_targets(
    observed: Observed, cluster: Cluster, live: Live, memo: Memo | None = None
) -> Targets:
    """Return the revisions that an accepted spec asks for.

    Args:
        live: the StatefulSets of engines, by role.
        memo: of the last plans for this cluster.
    """
    kept = tuple(one for one in observed.children if one.get("kind") == revisions.REVISION_KIND)
    maps, spec = config_maps_seen(observed), observed.cluster.get("spec")
    digest, settled = observed.connector.digest, _is_settled(observed.cluster)
    inputs = cluster, spec, digest, kept, maps, settled, live
    return (memo or Memo()).get("targets", inputs, lambda *_: _find(observed, cluster, live))


def _find(observed: Observed, cluster: Cluster, live: Live) -> Targets:
    spec = revisions.spec_of_engines(observed.cluster)
    stored = revisions.stored_revisions(observed)
    renew = cluster.spec.rollout.renew or ""
    alone = _of_engines_alone(observed, cluster, live, stored)
    known = (*(replace(one, renew=renew) for one in alone), *stored)
    usable = [one for one in known if _is_usable(one, observed, live)]
    fits = {role: list(_fitting(usable, observed, cluster, spec, role)) for role in Role}
    chosen = _of_one_key(fits)
    key = next((one.pairing_key for one in chosen.values()), "") or revisions.pairing_key(cluster)
    digest = observed.connector.digest
    wanted = {
        role: chosen.get(role) or _fresh(cluster, role, key, digest, spec, known) for role in Role
    }
    return Targets(wanted, stored)


def render(cluster: Cluster, role: Role, key: str, digest: str) -> dict[str, Any]:
    """Return today's pod template of a role, for an engine without a name."""
    nobody = revisions.nameless(cluster.namespace, cluster.name, role)
    return build_engine_pod(cluster, resolve.resolve_engine(cluster, role), nobody, key, digest)


def _fresh(
    cluster: Cluster,
    role: Role,
    key: str,
    digest: str,
    spec: Mapping[str, Any],
    known: Iterable[Revision],
) -> Revision:
    """Render a revision; return the known one if it is the same."""
    engine = resolve.resolve_engine(cluster, role)
    template = render(cluster, role, key, digest)
    renew = cluster.spec.rollout.renew or ""
    content: Any = {"template": template, "renew": renew} if renew else template
    same_role = {one.name: one for one in known if one.role is role}
    name, salt = revisions.short_hash(content), 0
    while (held := same_role.get(name)) is not None:
        if covers(held.template, template) and held.renew == renew:
            return held
        salt += 1
        name = revisions.short_hash([content, salt])
    return Revision(role, name, key, digest, engine.parallelism.nodes, template, dict(spec), renew)


def _fitting(
    known: Iterable[Revision],
    observed: Observed,
    cluster: Cluster,
    spec: Mapping[str, Any],
    role: Role,
) -> Iterator[Revision]:
    """Yield each stored revision of a role that renders to the same template as the spec."""
    renew = cluster.spec.rollout.renew or ""
    today: Any = None
    for one in known:
        if one.role is not role or renew not in ("", one.renew):
            continue
        if revisions.is_same_json(one.spec, spec):
            yield one
            continue
        if today is None:
            today = _meaning(cluster, role)
        parsed = parse.parse_cluster({**observed.cluster, "spec": dict(one.spec)})
        if not parsed.errors and revisions.is_same_json(_meaning(parsed.cluster, role), today):
            yield one


def _meaning(cluster: Cluster, role: Role) -> tuple[Any, int]:
    nodes = cluster.spec.role(role).parallelism.nodes
    return render(cluster, role, revisions.pairing_key(cluster), digest=""), nodes


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


def _is_usable(one: Revision, observed: Observed, live: Live) -> bool:
    """Whether engines can be made: somebody may have deleted the connector that they mount."""
    if one.connector == observed.connector.digest:
        return True
    mounted = mounted_connector(one.template)
    if not mounted or any(name.revision == one.name for name in live[one.role]):
        return True
    return mounted in config_maps_seen(observed)


def _of_engines_alone(
    observed: Observed, cluster: Cluster, live: Live, stored: Iterable[Revision]
) -> Iterator[Revision]:
    """Yield the revision of each role whose engines have one that is not stored.

    It counts only if it was made of the present spec. The name of a revision says so: it is a hash
    of the content, and says it of nothing that somebody changed since. If another builder made it,
    only the last status can say so.
    """
    spec = revisions.spec_of_engines(observed.cluster)
    known = {(one.role, one.name) for one in stored}
    for role in Role:
        names = {(role, name.revision) for name in live[role]}
        if len(names) == 1 and not names & known:
            one, key = of_engines(observed, live[role], spec), revisions.pairing_key(cluster)
            today = _fresh(cluster, role, key, one.connector, spec, known=())
            if one.name == today.name or _is_settled(observed.cluster):
                yield today if one.name == today.name else one


def of_engines(
    observed: Observed, engines: Mapping[EngineName, Manifest], spec: Manifest
) -> Revision:
    """Return the revision of the first of these engines, as far as the engine shows it.

    Args:
        spec: what it was rendered from; empty if that is not known.
    """
    name, engine = min(engines.items(), key=lambda item: item[0])
    template = revisions.template_of_engine(engine, name)
    mounted, digest = mounted_connector(template), observed.connector.digest
    if mounted and mounted != object_names.connector_name(digest):
        digest = mounted.rpartition("-")[2]  # no more of it is known
    return Revision(
        role=name.role,
        name=name.revision,
        pairing_key=object_names.pairing_key_of(engine),
        connector=digest,
        nodes=nodes_of(template),
        template=template,
        spec=dict(spec),
    )


def _is_settled(cluster: Mapping[str, Any]) -> bool:
    """Whether the engines that run were made of the present spec, as the last status says.

    Ready and Complete say so, and so does a change of another kind that is under way. So does a
    step that fails, if Ready has its reason too, and would be True without it. While a change is
    held or fails, the reason may be any other one.
    """
    status = cluster.get("status") or {}
    seen = status.get("observedGeneration") == cluster["metadata"].get("generation")
    found = {kind: find_condition(status, kind) for kind in ConditionType}
    true = {kind for kind, one in found.items() if one.get("status") == Status.TRUE}
    reason = found[ConditionType.PROGRESSING].get("reason")
    going = ConditionType.PROGRESSING in true and reason != StatusReason.REPLACING
    failed = reason == found[ConditionType.READY].get("reason") and (
        reason not in (StatusReason.PAUSED, StatusReason.REPLACING)
        and {ConditionType.PREFILL_READY, ConditionType.DECODE_READY} <= true
    )
    done = ConditionType.READY in true or reason == StatusReason.COMPLETE
    return seen and (going or failed or done)
