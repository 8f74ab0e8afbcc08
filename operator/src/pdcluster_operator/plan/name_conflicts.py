"""Reasons not to apply a desired child.

Three reasons: another object has the child's name, an object of that name is still being deleted,
or somebody made it immutable. A ConfigMap that PDClusters share belongs to none of them, so its
content decides. No pods are started that would mount a connector whose content is not the one of
its name.
"""

from collections.abc import Iterable, Set as AbstractSet

from pdcluster_operator.api.conditions import Verdict, no
from pdcluster_operator.api.object_names import connector_name
from pdcluster_operator.plan.connectors import connector_of, is_forged, is_shared_connector
from pdcluster_operator.plan.objects.ownership import controller_uid, is_being_deleted
from pdcluster_operator.plan.types import Manifest, Observed

NAME_CONFLICT = "NameConflict"
STILL_BEING_DELETED = "StillBeingDeleted"
IMMUTABLE = "Immutable"


def why_not_applied(desired: Manifest, live: Manifest | None) -> Verdict | None:
    """Return why ``desired`` must not be applied over ``live``; None if it may be.

    Args:
        live: the object of that kind and name on the server; None if there is none.
    """
    if live is None:
        return None
    kind, name = str(desired["kind"]), str(desired["metadata"]["name"])
    if is_shared_connector(desired):
        return _why_not_shared(desired, live)
    if controller_uid(desired) != controller_uid(live):
        return name_conflict(kind, name)
    if is_being_deleted(live):
        return no(STILL_BEING_DELETED, f"{kind} {name} is still being deleted")
    if live.get("immutable"):
        # To replace it would be no remedy: the kubelet never looks at an immutable Secret again.
        return no(
            IMMUTABLE,
            f"{kind} {name} is immutable, so it cannot be changed: delete it, and the operator "
            "makes another one; then set spec.rollout.renew to a new value, because pods that run "
            "do not see it",
        )
    return None


def strange_connectors(observed: Observed, children: Iterable[Manifest]) -> frozenset[str]:
    """Return the ConfigMaps that pods of ``children`` mount as connectors, and that are not known.

    One that is missing counts, too: somebody may have put another one into its place that the
    operator's watch does not see. The operator's own connector is compared when it is applied.
    """
    known = {str(one["metadata"]["name"]) for one in observed.connectors if not is_forged(one)}
    mounted = {connector_of(child) for child in children} - {""}
    return frozenset(mounted - known - {connector_name(observed.connector.digest)})


def why_strange(strange: AbstractSet[str]) -> Verdict:
    """Return the reason and the message with which the status reports strange connectors."""
    return no(
        NAME_CONFLICT,
        f"ConfigMap {min(strange)} is missing, or does not hold the connector that its name says: "
        "somebody deleted or replaced it, and pods may have started with another connector. Delete "
        "it if it exists, and set spec.rollout.renew to a new value: engines then mount the "
        "operator's own connector",
    )


def _why_not_shared(desired: Manifest, live: Manifest) -> Verdict | None:
    """Judge by the content: whoever wrote the same bytes, they may be mounted if immutable."""
    name = desired["metadata"]["name"]
    same = all(live.get(part) == desired.get(part) for part in ("immutable", "binaryData", "data"))
    if controller_uid(live) or not same:
        return no(
            NAME_CONFLICT,
            f"ConfigMap {name} exists and does not hold this operator's connector, or is not "
            "immutable: delete it, and the operator makes the right one",
        )
    if is_being_deleted(live):
        return no(STILL_BEING_DELETED, f"ConfigMap {name} is still being deleted")
    return None


def name_conflict(kind: str, name: str) -> Verdict:
    """Return the verdict on an object that has the name of a child and another owner."""
    return no(
        NAME_CONFLICT,
        f"{kind} {name} exists and does not belong to this PDCluster: "
        "rename it, or give the PDCluster another name",
    )
