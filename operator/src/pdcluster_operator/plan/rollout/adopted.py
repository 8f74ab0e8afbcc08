"""Revisions of engines that exist without one: an operator of an older release stored none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pdcluster_operator.api.conditions import ConditionType, StatusReason, find_condition
from pdcluster_operator.api.labels import PAIRING_LABEL
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.plan.model import Manifest, Observed
from pdcluster_operator.plan.rollout.stored import Revision, nameless, renamed, without_group
from pdcluster_operator.plan.shared_connectors.connector_mounts import digest_in, mounted_connector


def adopted_revisions(
    observed: Observed,
    spec: Mapping[str, Any],
    live: Mapping[Role, Mapping[EngineName, Manifest]],
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
