"""Observed engines and links -> ``status``: conditions, counts, engines and failed links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.launcher_documents import LinksReport, LinkState
from pdcluster_operator.api.conditions import (
    ConditionType,
    Status,
    StatusReason,
    Verdict,
    find_condition,
    readable_reason,
    set_conditions,
    timestamp,
)
from pdcluster_operator.api.findings import Findings
from pdcluster_operator.api.labels import role_selector
from pdcluster_operator.api.schema.status_schema import MAX_ENGINES, MAX_FAILED_LINKS
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.router import endpoint
from pdcluster_operator.plan.children import existing_engines
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.observed.engines import EngineView
from pdcluster_operator.plan.observed.links import PairView
from pdcluster_operator.plan.prefill_scaler import who_decides
from pdcluster_operator.plan.status.certificates import transfer_status
from pdcluster_operator.plan.status.conditions import (
    accepted,
    available,
    links_established,
    path_verified,
    role_ready,
    summary,
    transport_healthy,
    with_scaler,
    with_warnings,
)
from pdcluster_operator.plan.status.local_prefill import local_prefill
from pdcluster_operator.plan.status.progress import ChangeView, progressing, progressing_since
from pdcluster_operator.plan.types import Observed

LONGEST_DETAIL = 512


@dataclass(frozen=True, slots=True)
class View:
    """Everything that the status is computed from."""

    engines: Mapping[Role, tuple[EngineView, ...]]
    pairs: tuple[PairView, ...]
    links: Mapping[str, LinksReport]
    change: ChangeView


def build_status(
    observed: Observed,
    cluster: Cluster,
    findings: Findings,
    view: View,
    lost: AbstractSet[str],
    now: float,
    memo: Memo,
) -> dict[str, Any]:
    """Return the whole status. It is equal to the last one if nothing has changed.

    Args:
        lost: names of the pods that are lost with their nodes.
    """
    before = observed.cluster.get("status") or {}
    since = progressing_since(before, cluster.generation, now)
    judged = memo.get(
        "verdicts",
        (observed, cluster, findings, view),
        lambda *_: _verdicts(observed, cluster, findings, view, memo),
    )
    ready = judged[ConditionType.READY]
    verdicts = {
        kind: progressing(ready, view.change, findings, since, now)
        if kind is ConditionType.PROGRESSING
        else judged[kind]
        for kind in ConditionType
    }
    conditions = set_conditions(before, verdicts.items(), cluster.generation, now)
    established, troubled = memo.get("counted", (view.pairs,), _counted)
    counts = memo.get("counts", (observed, view), _counts)
    status: dict[str, Any] = {
        "observedGeneration": cluster.generation,
        "conditions": conditions,
        "model": cluster.served_name,
        "prefill": counts["prefill"],
        "decode": counts["decode"],
        "links": f"{established}/{len(view.pairs)}",
        "endpoint": endpoint(cluster) if findings.ok else str(before.get("endpoint") or ""),
        "selector": role_selector(cluster.name, Role.DECODE),
        "replicas": counts["replicas"],
        "engines": counts["engines"],
        "failedLinks": _failed_links(before, troubled, now),
    }
    inputs = observed, cluster, view.change, lost
    if transfer := memo.get("transfer", inputs, transfer_status):
        status["transfer"] = transfer
    if _on_its_way(verdicts[ConditionType.PROGRESSING]):
        status["progressingSince"] = timestamp(since)
    return status


def _on_its_way(progressing: Verdict) -> bool:
    exceeded = progressing.reason == StatusReason.PROGRESS_DEADLINE_EXCEEDED
    return progressing.status is Status.TRUE or exceeded


def _verdicts(
    observed: Observed,
    cluster: Cluster,
    findings: Findings,
    view: View,
    memo: Memo,
) -> dict[ConditionType, Verdict]:
    """Return the verdicts that do not depend on the time: all but Progressing."""
    before = observed.cluster.get("status") or {}
    prefill, decode = (view.engines[role] for role in Role)

    def of_links(
        kind: ConditionType, judge: Callable[[Sequence[PairView], Mapping[str, Any]], Verdict]
    ) -> Verdict:
        return memo.get(kind, (view.pairs, find_condition(before, kind)), judge)

    verdicts = {
        ConditionType.ACCEPTED: with_warnings(accepted(findings), findings),
        ConditionType.PREFILL_READY: with_scaler(
            role_ready(prefill, findings), who_decides(observed.cluster, observed.scaler)
        ),
        ConditionType.DECODE_READY: role_ready(decode, findings),
        ConditionType.KV_LINKS_ESTABLISHED: of_links(
            ConditionType.KV_LINKS_ESTABLISHED, links_established
        ),
        ConditionType.KV_PATH_VERIFIED: of_links(ConditionType.KV_PATH_VERIFIED, path_verified),
        ConditionType.TRANSPORT_HEALTHY: local_prefill(
            decode,
            view.links,
            cluster.spec.verification.max_local_share,
            find_condition(before, ConditionType.TRANSPORT_HEALTHY),
        )
        or transport_healthy(view.pairs, cluster.spec.transfer),
        ConditionType.AVAILABLE: available(view.pairs, view.change),
    }
    verdicts[ConditionType.READY] = summary(verdicts, view.change)
    return verdicts


def _counted(pairs: Sequence[PairView]) -> tuple[int, tuple[PairView, ...]]:
    """Return how many links are established, and the first links with trouble."""
    established = sum(pair.state is LinkState.ESTABLISHED for pair in pairs)
    troubled = (pair for pair in pairs if pair.state is LinkState.FAILED or pair.canary_failed)
    return established, tuple(islice(troubled, MAX_FAILED_LINKS))


def _counts(observed: Observed, view: View) -> dict[str, Any]:
    """Return how many engines there are and are ready, and what each of them says."""
    prefill, decode = (view.engines[role] for role in Role)
    return {
        "prefill": _count(prefill),
        "decode": _count(decode),
        "replicas": existing_engines(observed.children, Role.DECODE),
        "engines": [_engine(engine) for engine in (*prefill, *decode)][:MAX_ENGINES],
    }


def _count(engines: Sequence[EngineView]) -> str:
    return f"{sum(engine.ready is True for engine in engines)}/{len(engines)}"


def _engine(engine: EngineView) -> dict[str, Any]:
    states = {True: "Ready", None: "Unknown", False: engine.reason.value}
    return {
        "name": engine.name.stateful_set,
        "role": engine.name.role.value,
        "state": states[engine.ready],
        "engineId": engine.engine_id,
        "message": engine.message[:LONGEST_DETAIL],
    }


def _failed_links(
    before: Mapping[str, Any], pairs: Sequence[PairView], now: float
) -> list[dict[str, Any]]:
    old = {
        (entry.get("prefill"), entry.get("decode"), entry.get("reason")): entry
        for entry in before.get("failedLinks") or ()
    }
    written = []
    for pair in pairs:
        if pair.state is LinkState.FAILED:
            reason, message = readable_reason(pair.reason or "Unknown"), pair.message
        else:
            reason, message = Reason.CANARY_FAILED.value, pair.canary.message
        prefill, decode = pair.prefill.name.stateful_set, pair.decode.name.stateful_set
        known = old.get((prefill, decode, reason), {})
        written.append(
            {
                "prefill": prefill,
                "decode": decode,
                "reason": reason,
                "message": message[:LONGEST_DETAIL],
                "lastTransitionTime": known.get("lastTransitionTime") or timestamp(now),
            }
        )
    return written
