"""``make_plan``: the whole operator as one pure function.

It applies first what other objects need: the connector, the engines' addresses, the engines,
the router and its address. Then it deletes what is not wanted, and then it restarts pods. An
object that already is as wanted is not applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from pdcluster_operator.api.conditions import ConditionType, StatusReason, find_condition, seconds
from pdcluster_operator.api.findings import Findings
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.enums import Role, RolloutType
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.secrets import has_certificates
from pdcluster_operator.plan.children import steps_to
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.name_conflicts import (
    may_be_taken,
    strange_connectors,
    why_strange,
)
from pdcluster_operator.plan.objects.ownership import is_being_deleted
from pdcluster_operator.plan.observed.engines import observe_engines
from pdcluster_operator.plan.observed.links import by_pairing_key, observe_pairs, to_sample
from pdcluster_operator.plan.observed.pods import lost_pods, seconds_to_loss
from pdcluster_operator.plan.observed.routers import (
    routed_engines,
    router_available,
    router_behind,
    router_trouble,
)
from pdcluster_operator.plan.peers import assign_peers
from pdcluster_operator.plan.prefill_scaler import as_scaled, scaler_status
from pdcluster_operator.plan.rollout.desired import Desired, desire, live_engines
from pdcluster_operator.plan.rollout.fleet import engine_keys
from pdcluster_operator.plan.rollout.wanted_children import Wanted
from pdcluster_operator.plan.secrets import (
    are_needed,
    certificates_step,
    period_start,
    seconds_to_renewal,
    ticket_key_step,
)
from pdcluster_operator.plan.status.build import View, build_status
from pdcluster_operator.plan.status.events import transitions
from pdcluster_operator.plan.status.progress import ChangeView, with_failure
from pdcluster_operator.plan.types import (
    Manifest,
    Observed,
    PeerAssignment,
    Plan,
    Step,
    WriteCertificates,
)

BUSY_SECONDS = 10.0
"""How often a cluster on its way to Ready is looked at without an event, to be sure."""


def make_plan(observed: Observed, now: float, memo: Memo | None = None) -> Plan:
    """Return what to do about one cluster now.

    Args:
        observed: the cluster and everything around it, as it was seen.
        now: seconds since the epoch; only transition times and deadlines depend on it.
        memo: of the last plans for this cluster. The plan is the same without it, only slower.
    """
    memo = memo or Memo()
    seen = replace(observed, cluster=as_scaled(observed.cluster, observed.scaler))
    # What is equal to what was seen before is the same object then, and is compared at once.
    observed = memo.get("observed", (seen,), lambda one: one)
    before = observed.cluster.get("status") or {}
    if is_being_deleted(observed.cluster):
        # The cluster owns its children, so Kubernetes' garbage collector deletes them.
        return Plan(steps=(), status=before)
    cluster, findings = _checked(observed, memo)
    lost = lost_pods(observed.pods, now)
    desired = memo.get(
        "desired",
        (observed, cluster, lost, findings.ok),
        lambda *_: desire(observed, cluster, lost, memo) if findings.ok else _frozen(observed),
    )
    certified = memo.get("certificates are needed", (observed, cluster), are_needed)
    steps: tuple[Step, ...] = ()
    if certified:
        inputs = observed, cluster, desired.names, period_start(now)
        certificates = memo.get("certificates", inputs, _certificates_step)
        steps = () if certificates is None else (certificates,)
    if findings.ok:
        key = ticket_key_step(observed, cluster)
        rest = steps_to(observed, cluster, desired, now, memo)
        steps = (*((key,) if key else ()), *steps, *rest)
    strange = memo.get("strange connectors", (observed, desired.children), _strange_connectors)
    if strange:
        steps = tuple(step for step in steps if may_be_taken(step, observed, strange))
    view = memo.get(
        "view",
        (observed, cluster, desired, steps, findings.ok),
        lambda *_: _view(observed, cluster, desired, steps, memo, accepted=findings.ok),
    )
    status = build_status(observed, cluster, findings, view, lost, now, memo)
    if strange:
        refused = why_strange(strange)
        status = with_failure(status, observed.cluster, refused.reason, refused.message, now)
    peers: tuple[PeerAssignment, ...] = ()
    if findings.ok:
        peers = memo.get("peers", (observed, cluster, desired, view), _peers)
    progress = find_condition(status, ConditionType.PROGRESSING)
    settled = progress.get("reason") == StatusReason.COMPLETE
    if settled or not findings.ok:
        loss = seconds_to_loss(observed.pods, now)
        look = None if loss is None else loss + 1.0
    else:
        look = _next_look(status, view, now)
    waits = (look, seconds_to_renewal(now) if certified else None)
    if observed is seen:  # Otherwise nothing is new, so nothing is gone.
        memo.forget_unused()
    return Plan(
        steps=steps,
        status=status,
        peers=peers,
        routed=memo.get("routed", (observed, lost), _routed),
        requeue_after=min((wait for wait in waits if wait is not None), default=None),
        events=transitions(before, status, secured=has_certificates(cluster)),
        scaler=scaler_status(observed),
    )


def _certificates_step(
    observed: Observed, cluster: Cluster, names: Mapping[Role, tuple[EngineName, ...]], begin: float
) -> WriteCertificates | None:
    wanted = (name for role in Role for name in names[role])
    return certificates_step(observed, cluster, wanted, begin)


def _strange_connectors(observed: Observed, children: Iterable[Wanted]) -> frozenset[str]:
    return strange_connectors(observed, (child.manifest for child in children))


def _peers(
    observed: Observed, cluster: Cluster, desired: Desired, view: View
) -> tuple[PeerAssignment, ...]:
    prefill, decode = (view.engines[role] for role in Role)
    return tuple(
        assignment
        for group in by_pairing_key(prefill, decode, desired.keys)
        for assignment in assign_peers(cluster, *to_sample(group, desired.blocked), observed.links)
    )


def _routed(observed: Observed, lost: AbstractSet[str]) -> frozenset[str]:
    """Return the logical ids of the engines that should not end before routers forget them.

    Routers never forget the only engine of a role. One that the operator removed waits for nobody:
    its StatefulSet is gone. With ``pdcluster up``, routers and engines end together.
    """
    if observed.one_node:
        return frozenset()
    live = live_engines(observed)
    engines = Counter(name.role for name in live)
    routed = routed_engines(observed, live, lost)
    return frozenset(name.logical for name in routed if engines[name.role] > 1)


def _next_look(status: Manifest, view: View, now: float) -> float:
    """Return in how many seconds to look again: at the deadline, or earlier to be sure."""
    began = max(seconds(status.get("progressingSince")) or now, view.change.started or 0.0)
    left = began + view.change.deadline - now
    return min(left + 1.0, BUSY_SECONDS) if left >= 0 else BUSY_SECONDS


def _checked(observed: Observed, memo: Memo) -> tuple[Cluster, Findings]:
    live = observed.cluster
    names = ("name", "namespace", "uid", "generation")
    known = {key: value for key, value in live.items() if key != "status"}
    known["metadata"] = {name: live["metadata"].get(name) for name in names}
    allowed = (
        observed.host_path_models,
        observed.one_node,
        observed.mounted_certificates,
        observed.pod_groups,
    )
    return memo.get("checked", (known, *allowed), _check)


def _check(
    live: Manifest,
    host_paths: bool,
    one_node: bool,
    mounted_certificates: bool,
    pod_groups: bool,
) -> tuple[Cluster, Findings]:
    return check_manifest(
        live,
        host_paths=host_paths,
        one_node=one_node,
        mounted_certificates=mounted_certificates,
        pod_groups=pod_groups,
    )


def _frozen(observed: Observed) -> Desired:
    """Return the engines that run now: a spec that is not accepted changes nothing."""
    live = live_engines(observed)
    names = {role: tuple(name for name in live if name.role is role) for role in Role}
    keys = engine_keys(observed, {}, {})
    return Desired(names, (), frozenset(), frozenset(live), stale=False, keys=keys)


def _view(
    observed: Observed,
    cluster: Cluster,
    desired: Desired,
    steps: Iterable[Step],
    memo: Memo,
    *,
    accepted: bool,
) -> View:
    parallelism = {role: cluster.spec.role(role).parallelism for role in Role}
    engines = {
        role: observe_engines(observed, desired.names[role], parallelism, memo, desired.held)
        for role in Role
    }
    groups = by_pairing_key(engines[Role.PREFILL], engines[Role.DECODE], desired.keys)
    pairs = tuple(
        pair
        for group in groups
        for pair in observe_pairs(*to_sample(group, desired.blocked), observed.links, memo)
    )
    wanted = {name.stateful_set for names in desired.names.values() for name in names}
    created = [
        seconds(child["metadata"].get("creationTimestamp"))
        for child in observed.children
        if child.get("kind") == "StatefulSet" and child["metadata"]["name"] in wanted
    ]
    change = ChangeView(
        replacing=desired.stale,
        paused=cluster.spec.rollout.paused,
        surging=cluster.spec.rollout.type is RolloutType.SURGE,
        router_available=router_available(observed, cluster),
        started=max((moment for moment in created if moment is not None), default=None),
        deadline=cluster.spec.rollout.progress_deadline_seconds,
        router_trouble=router_trouble(observed),
        changed=desired.changed,
        stuck=desired.stuck,
        router_behind=router_behind(observed, steps),
        scaled_to_zero=next((role.value for role in Role if accepted and not engines[role]), ""),
    )
    return View(engines, pairs, observed.links, change)
