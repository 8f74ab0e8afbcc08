"""``make_plan``: the whole operator as one pure function, in four steps.

The plan applies first what other objects need: the connector, the engines' addresses, the engines,
the router and its address. Then it deletes what is not wanted. An object that already is
as wanted is not applied.
"""

from collections import Counter
from collections.abc import Mapping, Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from pdcluster_connector.protocol.launcher_documents import PeersDocument
from pdcluster_operator.api import conditions
from pdcluster_operator.api.findings import Findings
from pdcluster_operator.api.rules.engines import within_links
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan import (
    downloads,
    name_conflicts,
    peers_and_canaries,
    prefill_scaler,
    renewals,
)
from pdcluster_operator.plan.builders.secrets import has_certificates
from pdcluster_operator.plan.children import children_now, existing_engines, steps_to
from pdcluster_operator.plan.connectors import connector_of
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.objects.ownership import engine_sets, engines_of, is_being_deleted
from pdcluster_operator.plan.observed import pods, routers
from pdcluster_operator.plan.rollout.desired import Desired, desire, in_force
from pdcluster_operator.plan.scaling.follow import follow
from pdcluster_operator.plan.status import build, events
from pdcluster_operator.plan.status.progress import ChangeView, with_failure
from pdcluster_operator.plan.types import Apply, Delete, Manifest, Observed, Plan, Step

BUSY_SECONDS = 10.0
"""How often a cluster on its way to Ready is looked at without an event, to be sure."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What follows from what is observed and desired (independent of the time, so cached).

    Attributes:
        steps: of the plan.
        strange: ConfigMaps for which some steps are left out.
        certified: whether an engine has certificates of the operator, or is to have them.
    """

    steps: tuple[Step, ...]
    strange: AbstractSet[str]
    judged: build.Judgement
    peers: Mapping[str, PeersDocument]
    routed: frozenset[str]
    certified: bool


def make_plan(observed: Observed, now: float, memo: Memo | None = None) -> Plan:
    """Return what to do about one cluster now.

    Args:
        observed: the cluster and everything around it, as it was seen.
        now: seconds since the epoch, by the clock of the API server. Only transition times and
            deadlines depend on it. A moment after it comes from a clock that was wrong.
        memo: of the last plans for this cluster. The plan is the same without it, only slower.
    """
    memo = memo or Memo()
    seen = replace(observed, cluster=prefill_scaler.as_scaled(observed.cluster, observed.scaler))
    # If nothing has changed, this is the object of the plan before, so that comparing it is quick.
    loaded = observed  # with the loads of now, which change nothing but the advice
    observed = known = memo.get("observed", (seen,), lambda one: one)
    before = observed.cluster.get("status") or {}
    if is_being_deleted(observed.cluster):
        # The cluster owns its children, so Kubernetes' garbage collector deletes them.
        return Plan(steps=(), status=before)
    # Step 1: check the spec. With one that is not accepted, changes wait, and care goes on.
    cluster, findings = _checked(observed, memo)
    if not findings.ok:
        observed, cluster = memo.get("in force", (observed,), in_force)
    # Step 2: compute what should exist.
    lost = pods.lost_pods(observed.pods, now)
    desired = memo.get(
        "desired",
        (observed, cluster, lost, findings.ok),
        lambda *_: desire(
            observed,
            cluster,
            lost,
            memo,
            accepted=findings.ok,
            downloads=findings.ok and downloads.waits(observed, cluster),
        ),
    )
    # Step 3: compare it with what exists. The time decides only which engines get no pods for a
    # while, and the period of the certificates.
    children = children_now(observed, cluster, desired, now)
    period = renewals.period_start(now)
    inputs = observed, cluster, findings, desired, children, lost, period
    outcome = memo.get("outcome", inputs, _outcome)
    # Step 4: write the status, with the times of its changes, and say when to look again.
    scaling = None
    if findings.ok:
        rolling = outcome.judged.change.desired.stale
        scaling = follow(loaded, cluster, desired.names, now, rolling=rolling)
    status = build.build_status(cluster, before, outcome.judged, now, scaling)
    if outcome.strange:
        refused = name_conflicts.why_strange(outcome.strange)
        status = with_failure(status, observed.cluster, refused.reason, refused.message, now)
    if known is seen:  # Otherwise nothing is new, so nothing is gone.
        memo.forget_unused()
    waits = (
        _next_look(observed, status, outcome.judged.change, now),
        period + renewals.PERIOD_SECONDS - now if outcome.certified else None,
        scaling.wait if scaling else None,
    )
    return Plan(
        steps=outcome.steps,
        status=status,
        peers=outcome.peers,
        routed=outcome.routed,
        requeue_after=min((wait for wait in waits if wait is not None), default=None),
        events=events.transitions(before, status, secured=has_certificates(cluster)),
        scaler=prefill_scaler.scaler_status(observed),
        scales=scaling.steps if scaling else (),
        moments=scaling.window if scaling else (),
        fault=scaling.fault if scaling else None,
    )


def _outcome(
    observed: Observed,
    cluster: Cluster,
    findings: Findings,
    desired: Desired,
    children: tuple[Apply, ...],
    lost: AbstractSet[str],
    period: float,
) -> _Outcome:
    certified = renewals.are_needed(observed, cluster)
    steps: list[Step] = []
    # Pods mount the Secrets, so these come first.
    if (findings.ok or desired.children) and (key := renewals.ticket_key_step(observed, cluster)):
        steps.append(key)
    names = chain(*desired.names.values())
    if certified and (renewal := renewals.certificates_step(observed, cluster, names, period)):
        steps.append(renewal)
    steps += steps_to(observed, desired, children)
    wanted = (child.manifest for child in desired.children)
    strange = name_conflicts.strange_connectors(observed, wanted)
    waits = None
    if findings.ok and downloads.is_for(observed, cluster):
        steps, waits = downloads.with_download(steps, observed, cluster)
    steps = [one for one in steps if _goes_on(one, observed, findings, strange)]
    judged = build.judge(observed, cluster, findings, desired, steps, lost, waits)
    peers: dict[str, PeersDocument] = {}
    for group in judged.groups:
        peers |= peers_and_canaries.assign_peers(cluster, *group, observed.links)
    return _Outcome(
        steps=tuple(steps),
        strange=strange,
        judged=judged,
        peers=peers,
        routed=_routed(observed, desired, lost),
        certified=certified,
    )


def _goes_on(step: Step, observed: Observed, findings: Findings, strange: AbstractSet[str]) -> bool:
    if isinstance(step, Apply) and connector_of(step.manifest) in strange:
        return False  # pods must not start with a connector that no operator has made
    if findings.ok and not observed.unread:
        return True
    # No engine comes or goes: new ones would mount the Secrets, and changes wait. A policy that
    # exists keeps its peers: those of the spec may be what is wrong. A budget keeps its number.
    if observed.unread and not observed.children:
        return False
    if not isinstance(step, Apply):
        return not (isinstance(step, Delete) or observed.unread)
    kind = step.manifest["kind"]
    of_spec = kind in ("NetworkPolicy", "PodDisruptionBudget") and step.uid and not findings.ok
    return kind != "StatefulSet" and not of_spec


def _routed(observed: Observed, desired: Desired, lost: AbstractSet[str]) -> frozenset[str]:
    """Return the logical ids of the engines that should not end before routers forget them.

    Routers never forget the only engine of a role. One that the operator removed waits for nobody.
    A wanted one serves without its StatefulSet, too. With ``pdcluster up``, all end together.
    """
    if observed.place.one_node:
        return frozenset()
    wanted = chain(*desired.names.values())
    live = engines_of(observed.pods).intersection(wanted).union(engine_sets(observed.children))
    engines = Counter(name.role for name in live)
    routed = routers.routed_engines(observed, live, lost)
    return frozenset(name.logical for name in routed if engines[name.role] > 1)


def _next_look(
    observed: Observed, status: Manifest, change: ChangeView, now: float
) -> float | None:
    """Return in how many seconds to look again; None if an event will come.

    On the way to Ready that is at the deadline, or earlier to be sure. Otherwise it is when a pod
    that is being deleted counts as lost.
    """
    progress = conditions.find_condition(status, conditions.ConditionType.PROGRESSING)
    if progress.get("reason") == conditions.StatusReason.COMPLETE or not change.accepted:
        loss = pods.seconds_to_loss(observed.pods, now)
        return None if loss is None else loss + 1.0
    began = max(conditions.seconds(status.get("progressingSince")) or now, change.started or 0.0)
    left = began + change.rollout.progress_deadline_seconds - now
    return min(left + 1.0, BUSY_SECONDS) if left >= 0 else BUSY_SECONDS


def _checked(observed: Observed, memo: Memo) -> tuple[Cluster, Findings]:
    """Return the parsed spec, with as many engines as may be made, and the rules that it breaks."""
    names = ("name", "namespace", "uid", "generation")
    known = {key: value for key, value in observed.cluster.items() if key != "status"}
    known["metadata"] = {name: known["metadata"].get(name) for name in names}
    allowed: dict[str, Any] = {
        "host_paths": observed.place.host_path_models,
        "one_node": observed.place.one_node,
        "mounted_certificates": observed.place.mounted_certificates,
        "pod_groups": observed.pod_groups,
        "found": observed.model_config,
    }
    spec, found = memo.get("checked", (known, allowed), lambda *_: check_manifest(known, **allowed))
    if found.ok:
        return spec, found
    existing = {one: existing_engines(observed.children, one) for one in Role}
    return within_links(spec, found, existing)
