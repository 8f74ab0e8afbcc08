"""``make_plan``: the whole operator as one pure function.

It applies first what other objects need: the connector, the engines' addresses, the engines,
the router and its address. Then it deletes what is not wanted, and then it restarts pods. An
object that already is as wanted is not applied.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdcluster_operator.api.conditions import ConditionType, StatusReason, find_condition, seconds
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan.builders.certificates import has_certificates
from pdcluster_operator.plan.certificates import certificates_step
from pdcluster_operator.plan.deletions import deletions, is_being_deleted
from pdcluster_operator.plan.drift import is_applied, stamped
from pdcluster_operator.plan.engines import observe_engines
from pdcluster_operator.plan.links import observe_pairs
from pdcluster_operator.plan.model import Apply, Observed, PeerAssignment, Plan, Step
from pdcluster_operator.plan.peers import assign_peers
from pdcluster_operator.plan.restarts import restarts
from pdcluster_operator.plan.rollout.desired import Desired, desire, identity, live_engines
from pdcluster_operator.plan.routers import router_available, router_trouble
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
    before = observed.cluster.get("status") or {}
    if is_being_deleted(observed.cluster):
        # The cluster owns its children, so Kubernetes' garbage collector deletes them.
        return Plan(steps=(), status=before)
    cluster, findings = check_manifest(
        observed.cluster, host_paths=observed.host_path_models, one_node=observed.one_node
    )
    desired = desire(observed, cluster) if findings.ok else _frozen(observed)
    names = (name for role in Role for name in desired.names[role])
    certificates = certificates_step(observed, cluster, names, now)
    steps: tuple[Step, ...] = () if certificates is None else (certificates,)
    if findings.ok:
        key = ticket_key_step(observed, cluster)
        steps = (*((key,) if key else ()), *steps, *_steps(observed, desired))
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
        events=transitions(before, status, secured=has_certificates(cluster)),
    )


def _frozen(observed: Observed) -> Desired:
    """Return the engines that run now: a spec that is not accepted changes nothing."""
    live = live_engines(observed)
    names = {role: tuple(name for name in live if name.role is role) for role in Role}
    return Desired(names, (), frozenset(), frozenset(live), stale=False)


def _steps(observed: Observed, desired: Desired) -> Iterator[Step]:
    live = {identity(child): child for child in observed.children}
    for wanted in desired.children:
        manifest = stamped(wanted.manifest)
        if not is_applied(live.get(identity(manifest)), manifest):
            yield Apply(manifest, wanted.why)
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
        scaled_to_zero=next((role.value for role in Role if accepted and not engines[role]), ""),
    )
    return View(engines, pairs, observed.links, change)
