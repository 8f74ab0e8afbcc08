"""What ``pdcluster plan --against`` uses in place of what only the operator can see or do.

Only the operator reaches the launchers: a user reads in the status what they said last. What
``kubectl apply`` would send is sent as a dry run, so that the API server says what would come of
it. An object that was applied on the server side is applied so again, by the same field manager.
Any other object gets kubectl's merge patch: fields that were in the last applied manifest and are
not in this one are removed, and fields of others, such as an autoscaler's replicas, stay.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pdcluster_connector.protocol.launcher_documents import (
    CanaryReport,
    CanaryState,
    EngineReport,
    EngineState,
    LinkReport,
    LinksReport,
    LinkState,
)
from pdcluster_operator.api.conditions import ConditionType, Status, find_condition
from pdcluster_operator.api.object_names import PAIRING_LABEL, EngineName, engine_of
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.plan.observed.engines import known_ids
from pdcluster_operator.plan.types import Manifest


def reports_in(
    cluster: Manifest, children: Iterable[Manifest]
) -> tuple[dict[str, EngineReport], dict[str, LinksReport]]:
    """Return the reports of the engines that the status calls Ready, and of their links.

    A link counts as verified if KVPathVerified is True, or if the cluster is Available and the
    link is not among those that failed.
    """
    status = cluster.get("status") or {}
    ready = {one.get("name") for one in status.get("engines") or () if one.get("state") == "Ready"}
    ids = known_ids(cluster)
    keys: dict[EngineName, str] = {}
    for child in children:
        name = engine_of(child) if child.get("kind") == "StatefulSet" else None
        if name is not None and name.stateful_set in ready:
            keys[name] = str(child["metadata"]["labels"].get(PAIRING_LABEL, ""))
    engines = {
        name.logical: EngineReport(
            ready=True,
            engine=name.logical,
            engine_id=ids.get(name.stateful_set, ""),
            role=name.role.value,
            state=EngineState.READY,
        )
        for name in keys
    }
    failed = {(one.get("prefill"), one.get("decode")) for one in status.get("failedLinks") or ()}
    moved = any(
        find_condition(status, kind).get("status") == Status.TRUE
        for kind in (ConditionType.KV_PATH_VERIFIED, ConditionType.AVAILABLE)
    )
    canary = CanaryReport(CanaryState.PASSED if moved else CanaryState.PENDING)
    links = {
        decode.logical: LinksReport(
            decode.logical,
            ids.get(decode.stateful_set, ""),
            tuple(
                LinkReport(
                    one.logical,
                    engines[one.logical].engine_id,
                    LinkState.ESTABLISHED,
                    canary=canary,
                )
                for one in sorted(keys)
                if one.role is Role.PREFILL
                and keys[one] == keys[decode]
                and (one.stateful_set, decode.stateful_set) not in failed
            ),
        )
        for decode in keys
        if decode.role is Role.DECODE
    }
    return engines, links


LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def server_side_manager(live: Manifest) -> str | None:
    """Return who applied the object's spec on the server side; None if nobody did."""
    for entry in live["metadata"].get("managedFields") or ():
        if entry.get("operation") == "Apply" and "f:spec" in (entry.get("fieldsV1") or {}):
            return str(entry.get("manager"))
    return None


def merge_patch(live: Manifest, document: Manifest) -> dict[str, Any]:
    """Return the JSON merge patch of ``kubectl apply`` on the client side."""
    annotations = live["metadata"].get("annotations") or {}
    try:
        last = json.loads(annotations.get(LAST_APPLIED, "{}"))
    except ValueError:
        last = {}
    last = last if isinstance(last, Mapping) else {}
    labelled = {"labels", "annotations"}
    metadata = {k: v for k, v in (document.get("metadata") or {}).items() if k in labelled}
    old = {k: v for k, v in (last.get("metadata") or {}).items() if k in labelled}
    wanted = {"metadata": metadata, "spec": document.get("spec")}
    return _with_removals({"metadata": old, "spec": last.get("spec")}, wanted)


def _with_removals(last: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``wanted`` with a null for each field that only ``last`` has."""
    last = last if isinstance(last, Mapping) else {}
    patch: dict[str, Any] = dict.fromkeys(last)
    for name, value in wanted.items():
        whole = not isinstance(value, Mapping)
        patch[name] = value if whole else _with_removals(last.get(name), value)
    return patch
