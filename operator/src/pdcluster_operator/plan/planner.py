"""``make_plan``: the whole operator as one pure function.

It applies first what other objects need: the connector, the engines' addresses, the engines,
the router and its address. Then it deletes what is not wanted, and then it restarts pods. An
object that already is as wanted is not applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pdcluster_operator.api.conditions import ConditionType, StatusReason, find_condition, seconds
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan.deletions import deletions, is_being_deleted
from pdcluster_operator.plan.drift import stamped
from pdcluster_operator.plan.engines import observe_engines
from pdcluster_operator.plan.half_scheduled import with_releases
from pdcluster_operator.plan.links import observe_pairs
from pdcluster_operator.plan.model import Apply, Observed, PeerAssignment, Plan, Step
from pdcluster_operator.plan.peers import assign_peers
from pdcluster_operator.plan.prefill_scaler import as_scaled, scaler_status
from pdcluster_operator.plan.restarts import restarts
from pdcluster_operator.plan.rewrites import is_settled
from pdcluster_operator.plan.rollout.desired import Desired, desire, identity, live_engines
from pdcluster_operator.plan.routers import router_available, router_behind, router_trouble
from pdcluster_operator.plan.status.build import View, build_status, transitions
from pdcluster_operator.plan.status.progress import ChangeView
from pdcluster_operator.plan.ticket_key import ticket_key_step

BUSY_SECONDS = 2.0


def make_plan(observed: Observed, now: float) -> Plan:
    """Return what to do about one cluster now.

    Args:
        observed: the cluster and everything around it, as it was seen.
        now: seconds since the epoch; only transition times and deadlines depend on it.
    """
    observed = replace(observed, cluster=as_scaled(observed.cluster, observed.scaler))
    before = observed.cluster.get("status") or {}
    if is_being_deleted(observed.cluster):
        # The cluster owns its children, so Kubernetes' garbage collector deletes them.
        return Plan(steps=(), status=before)
    cluster, findings = check_manifest(
        observed.cluster, host_paths=observed.host_path_models, one_node=observed.one_node
    )
    desired = desire(observed, cluster, now) if findings.ok else _frozen(observed)
    steps: tuple[Step, ...] = ()
    if findings.ok:
        key = ticket_key_step(observed, cluster)
        steps = (*((key,) if key else ()), *_steps(observed, cluster, desired, now))
    view = _view(observed, cluster, desired, accepted=findings.ok)
    status = build_status(observed, cluster, findings, view, now)
    peers: tuple[PeerAssignment, ...] = ()
    if findings.ok:
        prefill, decode = (view.engines[role] for role in Role)
        peers = assign_peers(cluster, prefill, decode, observed.links)
    progress = find_condition(status, ConditionType.PROGRESSING)
    settled = progress.get("reason") == StatusReason.COMPLETE
    return Plan(
        steps=steps,
        status=status,
        peers=peers,
        requeue_after=None if settled or not findings.ok else BUSY_SECONDS,
        events=transitions(before, status),
        scaler=scaler_status(observed),
    )


def _frozen(observed: Observed) -> Desired:
    """Return the engines that run now: a spec that is not accepted changes nothing."""
    live = live_engines(observed)
    names = {role: tuple(name for name in live if name.role is role) for role in Role}
    return Desired(names, (), frozenset(), frozenset(live), stale=False)


def _steps(observed: Observed, cluster: Cluster, desired: Desired, now: float) -> Iterator[Step]:
    live = {identity(child): child for child in observed.children}
    engines = [one.manifest for one in desired.children if one.manifest["kind"] == "StatefulSet"]
    timeout = cluster.spec.rollout.schedule_timeout_seconds
    without_pods = with_releases(observed, engines, timeout, now)
    for wanted in desired.children:
        name = wanted.manifest["metadata"]["name"]
        is_engine = wanted.manifest["kind"] == "StatefulSet"
        manifest = stamped((is_engine and without_pods.get(name)) or wanted.manifest)
        child = identity(manifest)
        if not is_settled(live.get(child), manifest, observed.rewrites.get(child)):
            yield Apply(manifest, wanted.why)
    yield from desired.trials
    yield from deletions(observed, desired)
    yield from restarts(observed, desired)


def _view(observed: Observed, cluster: Cluster, desired: Desired, *, accepted: bool) -> View:
    parallelism = {role: cluster.spec.role(role).parallelism for role in Role}
    engines = {role: observe_engines(observed, desired.names[role], parallelism) for role in Role}
    pairs = observe_pairs(engines[Role.PREFILL], engines[Role.DECODE], observed.links)
    wanted = {name.stateful_set for names in desired.names.values() for name in names}
    created = [
        seconds(child["metadata"].get("creationTimestamp"))
        for child in observed.children
        if child.get("kind") == "StatefulSet" and child["metadata"]["name"] in wanted
    ]
    change = ChangeView(
        replacing=desired.stale,
        paused=cluster.spec.rollout.paused,
        router_available=router_available(observed, cluster),
        started=max((moment for moment in created if moment is not None), default=None),
        deadline=cluster.spec.rollout.progress_deadline_seconds,
        router_trouble=router_trouble(observed),
        changed=desired.changed,
        router_behind=router_behind(observed),
        scaled_to_zero=next((role.value for role in Role if accepted and not engines[role]), ""),
    )
    return View(engines, pairs, observed.links, change)
