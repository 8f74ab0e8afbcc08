"""Which children of a cluster are deleted because the spec does not want them any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdcluster_operator.api.labels import engine_of
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.plan.builders.pod_group import POD_GROUP_KIND
from pdcluster_operator.plan.model import Delete, Manifest, Observed
from pdcluster_operator.plan.objects.ownership import identity, is_being_deleted
from pdcluster_operator.plan.rollout.desired import Desired, live_engines
from pdcluster_operator.plan.rollout.stored import REVISION_KIND
from pdcluster_operator.plan.shared_connectors.connector_mounts import config_maps_of

MANAGED_KINDS = frozenset(
    {
        "StatefulSet",
        "Deployment",
        "Service",
        "ConfigMap",
        "ServiceAccount",
        "NetworkPolicy",
        "PodDisruptionBudget",
        POD_GROUP_KIND,
        REVISION_KIND,
    }
)
"""The kinds that the operator creates. It deletes no object of another kind."""


def deletions(observed: Observed, desired: Desired) -> Iterator[Delete]:
    """Yield each child that is not wanted and that nothing needs any more."""
    wanted = {identity(child.manifest) for child in desired.children}
    kept_engines = {name.stateful_set for name in desired.kept}
    leaving = _leaving(observed, desired)
    for child in observed.children:
        kind, name = identity(child)
        if kind not in MANAGED_KINDS or (kind, name) in wanted or is_being_deleted(child):
            continue
        engine = engine_of(child)
        if engine is not None and engine.stateful_set in kept_engines:
            continue
        if kind == "Service" and engine in leaving:
            # An engine that is leaving needs its name until its last pod is gone.
            continue
        if kind == REVISION_KIND and name not in desired.forgotten:
            continue
        if kind == "ConfigMap" and (name in desired.mounted or _is_mounted(observed, name)):
            continue
        if kind in ("ConfigMap", POD_GROUP_KIND) and (leaving or desired.kept):
            # A pod that is leaving may restart once more. It needs what it was made with.
            continue
        metadata = child["metadata"]
        yield Delete(
            str(child.get("apiVersion")),
            kind,
            str(metadata.get("namespace") or "default"),
            name,
            str(metadata.get("uid", "")),
            str(metadata.get("resourceVersion", "")),
            "the spec no longer asks for it",
        )


def existing_engines(children: Iterable[Manifest], role: Role) -> int:
    """Return how many engines of a role exist and are not being deleted."""
    engines = (
        engine_of(c) for c in children if c.get("kind") == "StatefulSet" and not is_being_deleted(c)
    )
    return sum(engine is not None and engine.role is role for engine in engines)


def _is_mounted(observed: Observed, config_map: str) -> bool:
    """Whether a live pod or template mounts it. An older operator stored no revision that does."""
    live = (*observed.children, *observed.pods)
    return any(config_map in config_maps_of(one) for one in live)


def _leaving(observed: Observed, desired: Desired) -> set[EngineName]:
    """Return the engines that are not wanted and still have a StatefulSet or a pod."""
    wanted = {name for names in desired.names.values() for name in names} | desired.kept
    pods = (engine_of(pod) for pod in observed.pods)
    found = {*live_engines(observed), *(name for name in pods if name is not None)}
    return found - wanted
