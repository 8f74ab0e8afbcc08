"""What launchers say of a cluster's engines, as far as its status tells.

Only the operator reaches the launchers. Somebody else reads in the status what they said last.
"""

from __future__ import annotations

from collections.abc import Iterable

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
from pdcluster_operator.api.labels import PAIRING_LABEL, engine_of
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.plan.model import Manifest
from pdcluster_operator.plan.observed.engines import known_ids


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
