"""``make_plan``: the whole operator as one pure function.

Order of steps: what others need first (the connector, names, engines, the router, its
address), then deletions. Nothing is applied that the live object already says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pdcluster_operator.api.conditions import seconds
from pdcluster_operator.api.labels import APPLIED_ANNOTATION, EngineName, engine_of
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan.builders.router_deployment import ROUTER_COMPONENT
from pdcluster_operator.plan.drift import covers
from pdcluster_operator.plan.engines import observe_engines
from pdcluster_operator.plan.links import observe_pairs
from pdcluster_operator.plan.model import (
    Apply,
    Delete,
    Manifest,
    Observed,
    PeerAssignment,
    Plan,
    RestartPod,
    Step,
)
from pdcluster_operator.plan.peers import assign_peers
from pdcluster_operator.plan.pods import pod_trouble
from pdcluster_operator.plan.rollout.desired import Desired, Wanted, desire, identity, live_engines
from pdcluster_operator.plan.status.build import View, build_status, transitions
from pdcluster_operator.plan.status.progress import ChangeView
from pdcluster_operator.plan.ticket_key import ticket_key_step

MANAGED_KINDS = frozenset(
    {
        "StatefulSet",
        "Deployment",
        "Service",
        "ConfigMap",
        "ServiceAccount",
        "NetworkPolicy",
        "PodDisruptionBudget",
    }
)
POD_REVISION_LABEL = "controller-revision-hash"
BUSY_SECONDS = 2.0


def make_plan(observed: Observed, now: float) -> Plan:
    """Return what to do about one cluster now.

    Args:
        observed: the cluster and everything around it, as it was seen.
        now: seconds since the epoch; only transition times and deadlines depend on it.
    """
    before = observed.cluster.get("status") or {}
    if observed.cluster.get("metadata", {}).get("deletionTimestamp"):
        # Kubernetes' garbage collector takes the children; they are owned.
        return Plan(steps=(), status=before)
    cluster, findings = check_manifest(
        observed.cluster, host_paths=observed.host_path_models, one_node=observed.one_node
    )
    desired = desire(observed, cluster) if findings.ok else _frozen(observed)
    steps: tuple[Step, ...] = ()
    if findings.ok:
        key = ticket_key_step(observed, cluster)
        steps = (*((key,) if key else ()), *_steps(observed, desired))
    view = _view(observed, cluster, desired)
    status = build_status(observed, cluster, findings, view, now)
    peers: tuple[PeerAssignment, ...] = ()
    if findings.ok:
        prefill, decode = (view.engines[role] for role in Role)
        peers = assign_peers(cluster, prefill, decode, observed.links)
    ready = status["conditions"][-1]["status"] == "True"
    return Plan(
        steps=steps,
        status=status,
        peers=peers,
        requeue_after=None if ready or not findings.ok else BUSY_SECONDS,
        events=transitions(before, status),
    )


def _frozen(observed: Observed) -> Desired:
    """Keep what runs: a spec that is not accepted makes nothing and removes nothing."""
    live = live_engines(observed)
    names = {role: tuple(name for name in live if name.role is role) for role in Role}
    return Desired(names, (), frozenset(), frozenset(live), stale=False)


def _steps(observed: Observed, desired: Desired) -> Iterator[Step]:
    live = {identity(child): child for child in observed.children}
    for wanted in desired.children:
        manifest = stamped(wanted.manifest)
        if not is_applied(live.get(identity(manifest)), manifest):
            yield Apply(manifest, wanted.why)
    yield from _deletions(observed, desired)
    yield from _restarts(observed, desired, live)


def stamped(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with a hash of itself, so that a removed field is noticed."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    metadata = dict(manifest["metadata"])
    metadata["annotations"] = {**metadata.get("annotations", {}), APPLIED_ANNOTATION: digest}
    return {**manifest, "metadata": metadata}


def is_applied(live: Manifest | None, desired: Mapping[str, Any]) -> bool:
    """Whether applying ``desired`` (stamped) would change nothing."""
    return live is not None and covers(live, desired)


def _deletions(observed: Observed, desired: Desired) -> Iterator[Step]:
    keep = {identity(wanted.manifest) for wanted in desired.children}
    kept_engines = {name.stateful_set for name in desired.kept}
    leaving = _leaving(observed, desired)
    for child in observed.children:
        kind, name = identity(child)
        metadata = child["metadata"]
        if kind not in MANAGED_KINDS or (kind, name) in keep or metadata.get("deletionTimestamp"):
            continue
        engine = engine_of(child)
        if engine is not None and engine.stateful_set in kept_engines:
            continue
        if kind == "Service" and engine in leaving:
            # An engine that is leaving needs its name until its last pod is gone.
            continue
        if kind == "ConfigMap" and (leaving or desired.kept):
            # A pod that is leaving may restart once more, and mounts what it was made with.
            continue
        yield Delete(
            str(child.get("apiVersion")),
            kind,
            str(metadata.get("namespace") or "default"),
            name,
            str(metadata.get("uid", "")),
            str(metadata.get("resourceVersion", "")),
            "the spec does not want it any more",
        )


def _leaving(observed: Observed, desired: Desired) -> set[EngineName]:
    """Engines that are not wanted and of which a StatefulSet or a pod is left."""
    wanted = {name for names in desired.names.values() for name in names} | desired.kept
    pods = (engine_of(pod) for pod in observed.pods)
    found = {*live_engines(observed), *(name for name in pods if name is not None)}
    return found - wanted


def _restarts(
    observed: Observed, desired: Desired, live: Mapping[tuple[str, str], Manifest]
) -> Iterator[Step]:
    """Pods that were made from an older template of their StatefulSet (OnDelete)."""
    sets = _current_sets(desired.children, live)
    for pod in observed.pods:
        engine = engine_of(pod)
        metadata = pod["metadata"]
        if engine is None or metadata.get("deletionTimestamp"):
            continue
        current = sets.get(engine.stateful_set)
        made_from = metadata.get("labels", {}).get(POD_REVISION_LABEL)
        if current and made_from and made_from != current:
            yield RestartPod(
                str(metadata.get("namespace") or "default"),
                str(metadata["name"]),
                str(metadata.get("uid", "")),
                str(metadata.get("resourceVersion", "")),
                "its StatefulSet's template changed",
            )


def _current_sets(
    children: tuple[Wanted, ...], live: Mapping[tuple[str, str], Manifest]
) -> dict[str, str]:
    """Update revision by name, of StatefulSets that are as wanted and that were reconciled."""
    found = {}
    for wanted in children:
        kind, name = identity(wanted.manifest)
        existing = live.get((kind, name))
        if kind != "StatefulSet" or existing is None:
            continue
        status = existing.get("status") or {}
        current = status.get("observedGeneration") == existing["metadata"].get("generation")
        if current and is_applied(existing, stamped(wanted.manifest)):
            found[name] = str(status.get("updateRevision") or "")
    return found


def _view(observed: Observed, cluster: Cluster, desired: Desired) -> View:
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
        router_available=_router_available(observed, cluster),
        started=max((moment for moment in created if moment is not None), default=None),
        deadline=cluster.spec.rollout.progress_deadline_seconds,
        router_trouble=_router_trouble(observed),
    )
    return View(engines, pairs, change)


def _router_available(observed: Observed, cluster: Cluster) -> bool | None:
    if cluster.spec.router.replicas == 0:
        return None
    deployments = [child for child in observed.children if child.get("kind") == "Deployment"]
    return any((child.get("status") or {}).get("availableReplicas") for child in deployments)


def _router_trouble(observed: Observed) -> str:
    """Return why a router pod does not run; empty if all run, or none exists."""
    for pod in observed.pods:
        metadata = pod["metadata"]
        component = (metadata.get("labels") or {}).get("app.kubernetes.io/component")
        if component == ROUTER_COMPONENT and (found := pod_trouble(pod)):
            return f"{metadata['name']}: {found.message}"
    return ""
