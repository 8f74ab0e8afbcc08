"""PrefillScaler: it sets the number of prefill engines of the PDCluster of its name.

The number is put into the spec before anything looks at it. So every rule holds for it, and
no other code has to know about scalers. The scaler may bound it by the number of decode engines.
"""

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.api.object_names import role_selector
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.children import existing_engines
from pdcluster_operator.plan.objects.ownership import is_being_deleted
from pdcluster_operator.plan.types import Manifest, Observed, ScalerStatus

LEAST_SHARE = "minPercentOfDecode"
MOST_SHARE = "maxPercentOfDecode"


def as_scaled(cluster: Manifest, scaler: Manifest | None) -> Manifest:
    """Return the PDCluster with the number of prefill engines that its scaler wants."""
    scaled = _scaled(cluster, scaler)
    if scaled is None:
        return cluster  # there is no scaler, or the rules say what is wrong with the spec
    (number, _), spec = scaled, cluster["spec"]
    prefill = {**(spec.get("prefill") or {}), "replicas": number}
    return {**cluster, "spec": {**spec, "prefill": prefill}}


def who_decides(cluster: Manifest, scaler: Manifest | None) -> str:
    """Return that a scaler decides, for the message of PrefillReady; empty without one."""
    _, words = _scaled(cluster, scaler) or (0, "")
    return words


def _scaled(cluster: Manifest, scaler: Manifest | None) -> tuple[int, str] | None:
    """Return the number of prefill engines, and that a scaler decides it; None if none does."""
    if scaler is None or is_being_deleted(scaler):
        return None
    wanted, spec = scaler.get("spec") or {}, cluster.get("spec")
    if not isinstance(spec, Mapping):
        return None
    prefill, decode = spec.get("prefill") or {}, spec.get("decode") or {}
    asked = wanted.get("replicas")
    others = decode.get("replicas", 1) if isinstance(decode, Mapping) else None
    if not (isinstance(asked, int) and isinstance(others, int) and isinstance(prefill, Mapping)):
        return None
    shares = (wanted.get(name) for name in (LEAST_SHARE, MOST_SHARE))
    least, most = (  # rounded up
        -(-share * max(0, others) // 100) if isinstance(share, int) else None for share in shares
    )
    words = f"PrefillScaler {cluster['metadata']['name']} decides how many"
    if least is not None and asked < least:
        return least, f"{words}: it asks for {asked}, and its {LEAST_SHARE} allows {least}"
    if most is not None and asked > most:
        return most, f"{words}: it asks for {asked}, and its {MOST_SHARE} allows {most}"
    return asked, words


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
