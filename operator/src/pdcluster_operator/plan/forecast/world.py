"""A cluster that exists only in memory: a plan is carried out in it, and everything else goes well.

It plays the API server, Kubernetes' controllers, the kubelet and the launchers as far as the
planner can see them. Pods that are deleted are gone, new pods run, new engines are verified.

At the end is what ``pdcluster plan --against`` uses in place of what only the operator can see or
do. Only the operator reaches the launchers: a user reads in the status what they said last. What
``kubectl apply`` would send is sent as a dry run, so that the API server says what would come of
it. An object that was applied on the server side is applied so again, by the same field manager.
Any other object gets kubectl's merge patch: fields that were in the last applied manifest and are
not in this one are removed, and fields of others, such as an autoscaler's replicas, stay.
"""

import copy
import json
from collections.abc import Iterable, Mapping, Set as AbstractSet
from dataclasses import replace
from typing import Any

from msgspec import structs

from pdcluster_connector.protocol.launcher_documents import (
    CanaryReport,
    CanaryState,
    EngineReport,
    EngineState,
    LinkReport,
    LinksReport,
    LinkState,
)
from pdcluster_operator.api.conditions import ConditionType, Status, find_condition, timestamp
from pdcluster_operator.api.object_names import (
    CERTIFICATES_ANNOTATION,
    POD_INDEX_LABEL,
    EngineName,
    engine_of,
    pairing_key_of,
)
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan import connectors, renewals, types
from pdcluster_operator.plan.objects import drift, ownership
from pdcluster_operator.plan.observed.engines import known_ids
from pdcluster_operator.plan.observed.pods import accelerators, is_pod_ready

GONE = "the pods that were told to end are gone"
VERIFIED = "the new engines have loaded their weights, and KV was seen to move"
DOWNLOADED = "the Job has downloaded the weights"
ROUTED = "the new router pods are ready"


class World:
    """Begins as observed. ``observed`` returns it as the operator would see it."""

    def __init__(self, seen: types.Observed) -> None:
        self._seen = seen
        self._children = {ownership.identity(one): one for one in seen.children}
        self._connectors = {ownership.identity(one): one for one in seen.connectors}
        # Router pods are Kubernetes' own affair: their Deployment says what matters.
        self._pods = {
            str(pod["metadata"]["name"]): pod for pod in seen.pods if engine_of(pod) is not None
        }
        self._engines, self._links = dict(seen.engines), dict(seen.links)
        self._status = seen.cluster.get("status") or {}
        self._ticket_key, self._certificates = seen.ticket_key, seen.certificates
        self._made = 0

    def observed(self) -> types.Observed:
        """Return what the operator sees now."""
        return replace(
            self._seen,
            cluster={**self._seen.cluster, "status": self._status},
            children=tuple(self._children.values()),
            connectors=tuple(self._connectors.values()),
            pods=tuple(self._pods.values()),
            engines=dict(self._engines),
            links=dict(self._links),
            ticket_key=self._ticket_key,
            certificates=self._certificates,
        )

    def write_status(self, status: types.Manifest) -> None:
        """Take the status of a plan."""
        self._status = status

    def engines(self) -> tuple[int, int]:
        """Return how many engines hold GPUs, and how many GPUs they hold."""
        held = {
            name: int(one["spec"].get("replicas", 1)) * accelerators(one["spec"]["template"])
            for name, one in self._sets().items()
        }
        for pod in self._pods.values():
            name = engine_of(pod)
            if name is not None and (("StatefulSet", name.stateful_set) not in self._children):
                held[name] = held.get(name, 0) + accelerators(pod)
        return len(held), sum(held.values())

    def perform(self, step: types.Step, now: float) -> None:
        """Carry out one step."""
        if isinstance(step, types.WriteTicketKey):
            self._ticket_key = renewals.rotation_of(step.manifest)
        elif isinstance(step, types.WriteCertificates):
            issue = str(step.manifest["metadata"]["annotations"][CERTIFICATES_ANNOTATION])
            engines = frozenset(step.engines)
            self._certificates = replace(self._certificates, issue=issue, engines=engines)
        elif isinstance(step, types.Apply | types.TryOut):
            self._apply(step.manifest, now)
        else:
            child = self._children.pop((step.kind, step.name), None)
            engine = engine_of(child) if child is not None else None
            if engine is not None and step.kind == "StatefulSet":
                for name, pod in self._pods.items():
                    if engine_of(pod) == engine and not pod["metadata"].get("deletionTimestamp"):
                        metadata = {**pod["metadata"], "deletionTimestamp": timestamp(now)}
                        self._pods[name] = {**pod, "metadata": metadata}

    def others_act(self) -> str:
        """Let the others do one thing that they have to do; return it in words, empty if none."""
        ending = [n for n, pod in self._pods.items() if pod["metadata"].get("deletionTimestamp")]
        if ending:
            for name in ending:
                del self._pods[name]
            there = {name.logical for name in ownership.engines_of(self._pods.values())}
            self._engines = {name: one for name, one in self._engines.items() if name in there}
            self._links = {name: one for name, one in self._links.items() if name in there}
            return GONE
        if self._download():
            return DOWNLOADED
        if self._make_pods() or self._speak():
            return VERIFIED
        return ROUTED if self._route() else ""

    def _apply(self, wanted: types.Manifest, now: float) -> None:
        self._made += 1
        key = ownership.identity(wanted)
        if connectors.is_shared_connector(wanted):
            self._connectors[key] = wanted
            return
        old = self._children.get(key)
        made = copy.deepcopy(dict(wanted))
        metadata = made["metadata"]
        known = old["metadata"] if old is not None else {}
        same = old is not None and drift.covers(old.get("spec"), wanted.get("spec"))
        metadata["uid"] = known.get("uid") or f"forecast-{self._made}"
        metadata["resourceVersion"] = f"forecast-{self._made}"
        metadata["creationTimestamp"] = known.get("creationTimestamp") or timestamp(now)
        metadata["generation"] = int(known.get("generation") or 0) + (not same)
        made["status"] = dict((old or {}).get("status") or {})
        self._children[key] = made

    def _sets(self) -> dict[EngineName, types.Manifest]:
        return ownership.engine_sets(self._children.values())

    def _download(self) -> bool:
        done = {"conditions": [{"type": "Complete", "status": "True"}]}
        jobs = [one for one in self._children if one[0] == "Job"]
        waiting = [one for one in jobs if self._children[one].get("status") != done]
        self._children |= {one: {**self._children[one], "status": done} for one in waiting}
        return bool(waiting)

    def _make_pods(self) -> bool:
        """Let every wanted pod run; return whether one had to be made or started."""
        changed = False
        for name, child in self._sets().items():
            for node in range(int(child["spec"].get("replicas", 1))):
                pod = self._pods.get(name.pod(node))
                if pod is not None and is_pod_ready(pod):
                    continue
                changed = True
                self._made += 1
                self._pods[name.pod(node)] = running_pod(name, node, child, self._made)
        return changed

    def _speak(self) -> bool:
        """Let every engine report that it is ready, and every link that KV moved."""
        before = self._engines, self._links
        sets = self._sets()
        self._engines = {name.logical: ready_engine(name) for name in sets} | {
            name: one for name, one in self._engines.items() if one.ready
        }
        keys = {name: pairing_key_of(child) for name, child in sets.items()}
        self._links = _links(self._engines, keys, CanaryReport(CanaryState.PASSED, 1))
        return before != (self._engines, self._links)

    def _route(self) -> bool:
        changed = False
        for (kind, name), child in self._children.items():
            if kind != "Deployment":
                continue
            wanted = int(child["spec"].get("replicas", 1))
            status = {
                "observedGeneration": child["metadata"].get("generation", 0),
                "replicas": wanted,
                "updatedReplicas": wanted,
                "availableReplicas": wanted,
            }
            if any(child.get("status", {}).get(one) != value for one, value in status.items()):
                self._children[kind, name] = {**child, "status": status}
                changed = True
        return changed


def running_pod(name: EngineName, node: int, child: types.Manifest, number: int) -> dict[str, Any]:
    """Return the pod of one node of an engine.

    Args:
        child: the engine's StatefulSet.
        number: makes the pod's UID unique.
    """
    template = child["spec"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name.pod(node),
            "namespace": name.namespace,
            "uid": f"forecast-pod-{number}",
            "resourceVersion": f"forecast-{number}",
            "labels": {**template["metadata"]["labels"], POD_INDEX_LABEL: str(node)},
        },
        "spec": {**template["spec"], "nodeName": "forecast"},
        "status": running("192.0.2.1"),
    }


def running(address: str) -> dict[str, Any]:
    """Return the status of a pod that runs and is ready."""
    return {
        "phase": "Running",
        "podIP": address,
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{"name": "engine", "state": {"running": {}}}],
    }


def ready_engine(name: EngineName, incarnation: str = "forecast") -> EngineReport:
    """Return what the launcher of a ready engine reports."""
    return EngineReport(
        ready=True,
        engine=name.logical,
        engine_id=f"{name.logical}/{incarnation}",
        role=name.role.value,
        state=EngineState.READY,
    )


def _links(
    engines: Mapping[str, EngineReport],
    keys: Mapping[EngineName, str],
    canary: CanaryReport,
    failed: AbstractSet[tuple[Any, Any]] = frozenset(),
) -> dict[str, LinksReport]:
    """Return the report of each decode engine: a link to each prefill engine of its pairing key.

    Args:
        engines: the reports of the engines, by logical id.
        keys: pairing key of each engine.
        canary: the last one of each link.
        failed: names of the StatefulSets of pairs that are left out.
    """
    return {
        decode.logical: LinksReport(
            decode.logical,
            engines[decode.logical].engine_id,
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


def reports_in(
    cluster: types.Manifest, children: Iterable[types.Manifest]
) -> tuple[dict[str, EngineReport], dict[str, LinksReport]]:
    """Return the reports of the engines that the status calls Ready, and of their links.

    A link counts as verified if KVPathVerified is True, or if the cluster is Available and the
    link is not among those that failed.
    """
    status = cluster.get("status") or {}
    ready = {one.get("name") for one in status.get("engines") or () if one.get("state") == "Ready"}
    ids = known_ids(cluster)
    keys = {
        name: pairing_key_of(one)
        for name, one in ownership.engine_sets(children).items()
        if name.stateful_set in ready
    }
    engines = {
        name.logical: structs.replace(ready_engine(name), engine_id=ids.get(name.stateful_set, ""))
        for name in keys
    }
    failed = {(one.get("prefill"), one.get("decode")) for one in status.get("failedLinks") or ()}
    moved = any(
        find_condition(status, kind).get("status") == Status.TRUE
        for kind in (ConditionType.KV_PATH_VERIFIED, ConditionType.AVAILABLE)
    )
    canary = CanaryReport(CanaryState.PASSED if moved else CanaryState.PENDING)
    return engines, _links(engines, keys, canary, failed)


LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def server_side_manager(live: types.Manifest) -> str | None:
    """Return who applied the object's spec on the server side; None if nobody did."""
    for entry in live["metadata"].get("managedFields") or ():
        if entry.get("operation") == "Apply" and "f:spec" in (entry.get("fieldsV1") or {}):
            return str(entry.get("manager"))
    return None


def merge_patch(live: types.Manifest, document: types.Manifest) -> dict[str, Any]:
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
