"""Which pods are deleted so that their StatefulSet makes them again from its current template.

StatefulSets of engines use ``OnDelete``: Kubernetes never replaces an engine's pod by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from pdcluster_operator.api.labels import engine_of
from pdcluster_operator.plan.model import Observed, RestartPod
from pdcluster_operator.plan.objects.ownership import identity, is_being_deleted
from pdcluster_operator.plan.rollout.desired import Desired
from pdcluster_operator.plan.rollout.wanted_children import Wanted

POD_REVISION_LABEL = "controller-revision-hash"
"""Kubernetes' label of a StatefulSet's pod: the template that the pod was made from."""


def restarts(
    observed: Observed, desired: Desired, applied: AbstractSet[tuple[str, str]]
) -> Iterator[RestartPod]:
    """Yield each pod that was made from an older template of its StatefulSet.

    Args:
        applied: identities of the children that an apply would not change.
    """
    current = _current_revisions(observed, desired.children, applied)
    for pod in observed.pods:
        engine = engine_of(pod)
        if engine is None or is_being_deleted(pod):
            continue
        metadata = pod["metadata"]
        revision = current.get(engine.stateful_set)
        made_from = metadata.get("labels", {}).get(POD_REVISION_LABEL)
        if revision and made_from and made_from != revision:
            yield RestartPod(
                str(metadata.get("namespace") or "default"),
                str(metadata["name"]),
                str(metadata.get("uid", "")),
                str(metadata.get("resourceVersion", "")),
                "its StatefulSet's template changed",
            )


def _current_revisions(
    observed: Observed, children: tuple[Wanted, ...], applied: AbstractSet[tuple[str, str]]
) -> Mapping[str, str]:
    """Return the template revision of each StatefulSet, by name.

    A StatefulSet is left out while our change of it is not applied, and while Kubernetes has
    not computed its revision yet.
    """
    live = {identity(child): child for child in observed.children}
    found = {}
    for wanted in children:
        kind, name = identity(wanted.manifest)
        existing = live.get((kind, name))
        if kind != "StatefulSet" or existing is None:
            continue
        status = existing.get("status") or {}
        computed = status.get("observedGeneration") == existing["metadata"].get("generation")
        if computed and (kind, name) in applied:
            found[name] = str(status.get("updateRevision") or "")
    return found
