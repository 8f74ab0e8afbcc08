"""The status of a PDCluster: conditions, counts, engines, failed links and ``status.transfer``.

It is made in two parts. :func:`judge` says all that does not depend on the time, so that it is
computed once while nothing changes. :func:`build_status` adds what does: Progressing, and when each
condition and each failed link last changed.

``status.transfer`` says whose certificates the engines have, until when, and who has none. It is
judged from the templates of the pods that run, not from the spec. Engines can be older than the
field of the spec, and ``rollout.paused`` keeps engines of another revision.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.protocol.launcher_documents import LinkState
from pdcluster_operator.api import conditions as api_conditions, object_names
from pdcluster_operator.api.conditions import ConditionType, Status, StatusReason, Verdict
from pdcluster_operator.api.findings import Findings
from pdcluster_operator.api.schema.status_schema import MAX_ENGINES, MAX_FAILED_LINKS, MAX_LINKS
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.api.spec.types import Certificates, Cluster, Role
from pdcluster_operator.plan import children, prefill_scaler, renewals
from pdcluster_operator.plan.builders.protection import is_closed
from pdcluster_operator.plan.builders.router import endpoint
from pdcluster_operator.plan.builders.secrets import has_certificates
from pdcluster_operator.plan.objects.ownership import engine_sets
from pdcluster_operator.plan.observed import links, routers
from pdcluster_operator.plan.observed.engines import EngineView, observe_engines
from pdcluster_operator.plan.observed.links import PairView
from pdcluster_operator.plan.observed.pods import is_lost, text_of
from pdcluster_operator.plan.rollout.desired import Desired
from pdcluster_operator.plan.scaling.follow import Scaling
from pdcluster_operator.plan.status import conditions, link_states
from pdcluster_operator.plan.status.progress import ChangeView, progressing, progressing_since
from pdcluster_operator.plan.types import Observed, Step


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the status says, as far as it does not depend on the time.

    Attributes:
        verdicts: of all conditions but Progressing.
        change: how far the live objects are from the wanted ones.
        groups: of each pairing key, the engines among which links are kept.
        fields: fields of the status, as they are written.
        links: what is told of the first links.
        failed: the first links that failed, or whose canary did.
        transfer: ``status.transfer``; empty if it is not written.
    """

    verdicts: Mapping[ConditionType, Verdict]
    change: ChangeView
    groups: Sequence[links.Group]
    fields: Mapping[str, Any]
    links: tuple[link_states.ToldLink, ...]
    failed: tuple[PairView, ...]
    transfer: Mapping[str, Any]


def judge(
    observed: Observed,
    cluster: Cluster,
    findings: Findings,
    desired: Desired,
    steps: Iterable[Step],
    lost: AbstractSet[str],
    waits: Verdict | None = None,
) -> Judgement:
    """Return what the status says of a cluster (independent of the time, so it is cached).

    Args:
        steps: those of the plan. They may be about to change the routers.
        lost: names of the pods that are lost with their nodes.
        waits: why new engines wait for their weights; None if they do not.
    """
    before = observed.cluster.get("status") or {}
    engines = observe_engines(observed, cluster, desired.names, desired.held)
    if waits is not None:
        engines = {role: tuple(_waiting(observed, waits, found)) for role, found in engines.items()}
    prefill, decode = (engines[role] for role in Role)
    groups = [
        links.linkable(group, desired.blocked)
        for group in links.by_pairing_key(prefill, decode, desired.keys)
    ]
    pairs = [pair for group in groups for pair in links.observe_pairs(*group, observed.links)]
    wanted = {name for names in desired.names.values() for name in names}
    created = [
        api_conditions.seconds(one["metadata"].get("creationTimestamp"))
        for name, one in engine_sets(observed.children).items()
        if name in wanted
    ]
    empty = [role.value for role in Role if not desired.names[role]]
    change = ChangeView(
        desired=desired,
        rollout=cluster.spec.rollout,
        started=max((moment for moment in created if moment is not None), default=None),
        unreachable=routers.why_unreachable(observed, cluster, accepted=findings.ok),
        router_behind=routers.router_behind(observed, steps),
        scaled_to_zero=empty[0] if findings.ok and empty else "",
        accepted=findings.ok,
        waits=waits,
    )
    established = sum(pair.state is LinkState.ESTABLISHED for pair in pairs)
    failed = (pair for pair in pairs if pair.state is LinkState.FAILED or pair.canary_failed)
    fields = {
        "model": cluster.served_name,
        "prefill": _count(prefill),
        "decode": _count(decode),
        "links": f"{established}/{len(pairs)}",
        "endpoint": endpoint(cluster) if findings.ok else before.get("endpoint"),
        "selector": object_names.role_selector(cluster.name, Role.DECODE),
        "replicas": children.existing_engines(observed.children, Role.DECODE),
        "engines": [_engine(engine) for engine in (*prefill, *decode)][:MAX_ENGINES],
    }
    if fields["endpoint"] is None:  # a PDCluster from a backup has lost its status
        del fields["endpoint"]
    return Judgement(
        _verdicts(observed, cluster, findings, engines, pairs, change),
        change,
        groups,
        fields,
        tuple(map(link_states.told_link, pairs[:MAX_LINKS])),
        tuple(islice(failed, MAX_FAILED_LINKS)),
        transfer_status(observed, cluster, change, lost),
    )


def build_status(
    cluster: Cluster,
    before: Mapping[str, Any],
    judged: Judgement,
    now: float,
    scaling: Scaling | None = None,
) -> dict[str, Any]:
    """Return the whole status. It is equal to the last one if nothing has changed.

    Args:
        before: the last one.
        scaling: what is said of the number of engines, with ``spec.autoscaling``.
    """
    since = progressing_since(before, cluster.generation, now)
    ready = judged.verdicts[ConditionType.READY]
    progress = progressing(ready, judged.change, since, now)
    verdicts = {**judged.verdicts, ConditionType.PROGRESSING: progress}
    if scaling is not None:
        verdicts[ConditionType.SCALING_TARGETS_MET] = scaling.verdict
    ordered = [(kind, verdicts[kind]) for kind in ConditionType if kind in verdicts]
    status: dict[str, Any] = {
        "observedGeneration": cluster.generation,
        "conditions": api_conditions.set_conditions(before, ordered, cluster.generation, now),
        **judged.fields,
        "linkStates": link_states.link_states(
            before, judged.links, cluster.spec.verification.canary.interval_seconds, now
        ),
        "failedLinks": link_states.failed_links(before, judged.failed, now),
    }
    if judged.transfer:
        status["transfer"] = judged.transfer
    if scaling is not None:
        status["scaling"] = scaling.fields
    exceeded = progress.reason == StatusReason.PROGRESS_DEADLINE_EXCEEDED
    if progress.status is Status.TRUE or exceeded:
        status["progressingSince"] = api_conditions.timestamp(since)
    return status


def _verdicts(
    observed: Observed,
    cluster: Cluster,
    findings: Findings,
    engines: Mapping[Role, tuple[EngineView, ...]],
    pairs: Sequence[PairView],
    change: ChangeView,
) -> dict[ConditionType, Verdict]:
    key = routers.served_key(observed, cluster) if cluster.spec.router.pods else ""
    served = {name for name, own in change.desired.keys.items() if key in ("", own)}
    # Nobody sees which engines older pods of routers know, or those with arguments of the user.
    if routers.routers_run(observed, key) and routers.engines_are_listed(observed, key):
        served &= routers.listed_engines(observed, served, key)
    reached = [pair for pair in pairs if {pair.prefill.name, pair.decode.name} <= served]
    before = observed.cluster.get("status") or {}
    old = {kind: api_conditions.find_condition(before, kind) for kind in ConditionType}
    prefill, decode = (engines[role] for role in Role)
    prefill_ready = conditions.role_ready(prefill, accepted=findings.ok)
    scaler = observed.scaler if findings.ok else None
    decides = prefill_scaler.who_decides(observed.cluster, scaler)
    words = "; ".join(filter(None, (prefill_ready.message, decides)))
    known = not (change.desired.children and is_closed(cluster))
    share = cluster.spec.verification.max_local_share
    interval = cluster.spec.verification.canary.interval_seconds
    verdicts = {
        ConditionType.ACCEPTED: conditions.accepted(findings, clients_known=known),
        ConditionType.PREFILL_READY: replace(prefill_ready, message=words),
        ConditionType.DECODE_READY: conditions.role_ready(decode, accepted=findings.ok),
        ConditionType.KV_LINKS_ESTABLISHED: conditions.links_established(
            pairs, old[ConditionType.KV_LINKS_ESTABLISHED]
        ),
        ConditionType.KV_PATH_VERIFIED: conditions.path_verified(
            pairs, old[ConditionType.KV_PATH_VERIFIED], interval
        ),
        ConditionType.TRANSPORT_HEALTHY: conditions.local_prefill(
            decode, observed.links, share, old[ConditionType.TRANSPORT_HEALTHY]
        )
        or conditions.transport_healthy(
            pairs, cluster.spec.transfer, old[ConditionType.TRANSPORT_HEALTHY]
        ),
        ConditionType.AVAILABLE: conditions.available(reached, change),
    }
    verdicts[ConditionType.READY] = conditions.summary(verdicts, change, findings)
    return verdicts


def _waiting(
    observed: Observed, waits: Verdict, engines: Iterable[EngineView]
) -> Iterator[EngineView]:
    """Yield the engines; those that do not exist yet say why they wait."""
    sets = engine_sets(observed.children)
    for one in engines:
        exists = one.name in sets
        yield one if exists else replace(one, reason=waits.reason, message=waits.message)


def _count(engines: Sequence[EngineView]) -> str:
    return f"{sum(engine.ready is True for engine in engines)}/{len(engines)}"


def _engine(engine: EngineView) -> dict[str, Any]:
    states = {True: "Ready", None: "Unknown", False: str(engine.reason)}
    return {
        "name": engine.name.stateful_set,
        "role": engine.name.role.value,
        "state": states[engine.ready],
        "engineId": engine.engine_id,
        "message": engine.message[: link_states.LONGEST_DETAIL],
    }


def transfer_status(
    observed: Observed, cluster: Cluster, change: ChangeView, lost: AbstractSet[str]
) -> dict[str, Any]:
    """Return ``status.transfer``; nothing while there are no pods of engines.

    Lost pods do not count: they may stay for ever, long after their objects are gone.

    Args:
        lost: names of the pods that are lost.
    """
    pods = [pod for pod in observed.pods if not is_lost(pod, lost)]
    found = renewals.certificates_by_engine(pods, observed.children)
    if not found:
        return {}
    sources = set(found.values())
    source = sources.pop() if len(sources) == 1 else Certificates.MIXED
    status: dict[str, Any] = {"certificates": source.value}
    if source is not Certificates.NONE and (moment := _not_after(observed, found)):
        status["notAfter"] = moment
    without = sum(one is Certificates.NONE for one in found.values())
    unknown = sum(one is Certificates.UNKNOWN for one in found.values())
    said = []
    if without and has_certificates(cluster):
        said.append(_without_tls(without, len(found), cluster, change))
    if unknown:
        said.append(_unknown(unknown, len(found)))
    if said:
        status["message"] = " ".join(said)
    return status


def tls_warning(status: object) -> str:
    """Return the message of ``status.transfer``, on engines without TLS; empty if it has none."""
    return text_of(as_mapping(as_mapping(status).get("transfer")).get("message"))


def _not_after(observed: Observed, engines: Iterable[object_names.EngineName]) -> str:
    """Return when the first certificate expires.

    An engine whose certificate has expired no longer answers. So while an engine does not answer,
    the moment in the former status stays if it is earlier.
    """
    reports = [observed.engines.get(engine.logical) for engine in engines]
    moments = [report.certificate_expires for report in reports if report is not None]
    known = [api_conditions.timestamp(moment) for moment in moments if moment is not None]
    before = (observed.cluster.get("status") or {}).get("transfer") or {}
    if None in reports or not known:
        known.append(str(before.get("notAfter") or ""))
    return min(filter(None, known), default="")


def _without_tls(without: int, engines: int, cluster: Cluster, change: ChangeView) -> str:
    tls = cluster.spec.transfer.tls.value
    if not change.accepted:
        remedy = "They stay until the spec is accepted"
    elif change.rollout.paused:
        remedy = "Set spec.rollout.paused to false to replace them"
    elif change.desired.stale:
        remedy = "They are being replaced"
    else:
        remedy = "Another value of spec.rollout.renew replaces them"
    return (
        f"{without} of {counted(engines, 'engine')} without TLS, made before spec.transfer.tls "
        f"was {tls}: whoever reaches their ports can read where their KV lies. {remedy}."
    )


def _unknown(unknown: int, engines: int) -> str:
    return (
        f"It is not known which certificates {unknown} of {counted(engines, 'engine')} have: their "
        "StatefulSets and their stored revisions are gone. The operator speaks only TLS with them. "
        "Delete their pods if they stay."
    )
