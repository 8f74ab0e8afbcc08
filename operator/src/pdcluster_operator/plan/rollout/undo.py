"""``pdcluster rollout undo``: the spec before the last change that replaced engines.

Each stored revision holds the spec that it was made from. A revision that is used again becomes the
newest one of its role. So, of all stored specs that differ from the one of now, the last is the one
whose revisions have the highest numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.plan.observed.engines import live_by_role
from pdcluster_operator.plan.rollout.changes import (
    changed_fields,
    spec_of_engines,
    with_spec_of_engines,
)
from pdcluster_operator.plan.rollout.revisions import Revision, stored_revisions
from pdcluster_operator.plan.rollout.targets import find_targets
from pdcluster_operator.plan.types import Observed


@dataclass(frozen=True, slots=True)
class Undo:
    """A step back.

    Attributes:
        spec: the spec to write. Replicas, the rollout, monitoring and the router stay as they are.
        revisions: names of the stored revisions that engines then have, by role.
        fields: paths of the fields that change.
    """

    spec: Mapping[str, Any]
    revisions: Mapping[Role, str]
    fields: tuple[str, ...]


def undo(observed: Observed) -> Undo | None:
    """Return the step back to the spec before; None if no other one is stored."""
    now = observed.cluster["spec"]
    current = _names(_targets(observed, now))
    best: tuple[int, Undo] | None = None
    for spec in _stored_specs(observed):
        wanted = _targets(observed, spec)
        names = _names(wanted)
        if not wanted or names == current or not all(one.number for one in wanted.values()):
            continue
        age = sum(one.number for one in wanted.values())
        if best is None or age > best[0]:
            fields = changed_fields(
                spec_of_engines(observed.cluster), spec_of_engines({"spec": spec})
            )
            best = age, Undo(spec, names, tuple(fields))
    return best[1] if best else None


def _stored_specs(observed: Observed) -> Iterator[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for revision in stored_revisions(observed):
        spec = with_spec_of_engines(observed.cluster["spec"], revision.spec)
        if spec not in found:
            found.append(spec)
            yield spec


def _targets(observed: Observed, spec: Mapping[str, Any]) -> Mapping[Role, Revision]:
    """Return the revisions that a spec asks for; none if the spec cannot be read."""
    cluster = {**observed.cluster, "spec": dict(spec)}
    parsed = parse_cluster(cluster)
    if parsed.errors:
        return {}
    seen = replace(observed, cluster=cluster)
    return find_targets(seen, parsed.cluster, live_by_role(seen)).wanted


def _names(targets: Mapping[Role, Revision]) -> dict[Role, str]:
    return {role: one.name for role, one in targets.items()}
