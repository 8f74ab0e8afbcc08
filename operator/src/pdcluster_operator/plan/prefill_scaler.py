"""A PrefillScaler decides how many prefill engines the PDCluster of its name has.

The number is put into the spec before anything looks at it. So every rule holds for it, and
nothing else knows where it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.api.labels import role_selector
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.plan.deletions import existing_engines, is_being_deleted
from pdcluster_operator.plan.model import Manifest, Observed, ScalerStatus


def as_scaled(cluster: Manifest, scaler: Manifest | None) -> Manifest:
    """Return the PDCluster with the number of prefill engines that its scaler wants."""
    wanted = ((scaler or {}).get("spec") or {}).get("replicas")
    spec = cluster.get("spec")
    if scaler is None or is_being_deleted(scaler) or not isinstance(wanted, int):
        return cluster
    if not isinstance(spec, Mapping) or not isinstance(spec.get("prefill") or {}, Mapping):
        return cluster  # the rules say what is wrong with it
    return {
        **cluster,
        "spec": {**spec, "prefill": {**(spec.get("prefill") or {}), "replicas": wanted}},
    }


def scaler_status(observed: Observed) -> ScalerStatus | None:
    """Return the status to write to the scaler; None if it has it, or if there is no scaler."""
    scaler = observed.scaler
    if scaler is None or is_being_deleted(scaler):
        return None
    status: dict[str, Any] = {
        "replicas": existing_engines(observed.children, Role.PREFILL),
        "selector": role_selector(str(observed.cluster["metadata"]["name"]), Role.PREFILL),
    }
    if scaler.get("status") == status:
        return None
    return ScalerStatus(str(scaler["metadata"].get("uid", "")), status)
