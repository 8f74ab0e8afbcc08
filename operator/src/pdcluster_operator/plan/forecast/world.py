"""A cluster that exists only in memory: a plan is carried out in it, and everything else goes well.

It plays the API server, Kubernetes' controllers, the kubelet and the launchers as far as the
planner can see them. Pods that are deleted are gone, new pods run, new engines are verified.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
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
from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.api.object_names import (
    CERTIFICATES_ANNOTATION,
    PAIRING_LABEL,
    POD_INDEX_LABEL,
    ROTATE_TICKET_KEY_ANNOTATION,
    EngineName,
    engine_of,
)
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.plan.children import POD_REVISION_LABEL
from pdcluster_operator.plan.connectors import is_shared_connector
from pdcluster_operator.plan.objects.drift import covers
from pdcluster_operator.plan.objects.ownership import identity
from pdcluster_operator.plan.observed.pods import accelerators
from pdcluster_operator.plan.rollout.revisions import short_hash
from pdcluster_operator.plan.types import (
    Apply,
    Manifest,
    Observed,
    RestartPod,
    Step,
    TicketKey,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
)

GONE = "the pods that were told to end are gone"
VERIFIED = "the new engines have loaded their weights, and KV was seen to move"
ROUTED = "the new router pods are ready"


class World:
    """Begins as observed. ``observed`` returns it as the operator would see it."""

    def __init__(self, seen: Observed) -> None:
        self._seen = seen
        self._children = {identity(one): one for one in seen.children}
        self._connectors = {identity(one): one for one in seen.connectors}
        # Router pods are Kubernetes' own affair: their Deployment says what matters.
        self._pods = {
            str(pod["metadata"]["name"]): pod for pod in seen.pods if engine_of(pod) is not None
        }
        self._engines, self._links = dict(seen.engines), dict(seen.links)
        self._status = seen.cluster.get("status") or {}
        self._ticket_key, self._certificates = seen.ticket_key, seen.certificates
        self._made = 0

    def observed(self) -> Observed:
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

    def write_status(self, status: Manifest) -> None:
        """Take the status of a plan."""
        self._status = status

    def engines(self) -> tuple[int, int]:
        """Return how many engines hold GPUs, and how many GPUs they hold."""
        held = {
            name: int(one["spec"].get("replicas", 1)) * accelerators(one["spec"]["template"])
            for name, one in self._sets()
        }
        for pod in self._pods.values():
            name = engine_of(pod)
            if name is not None and (("StatefulSet", name.stateful_set) not in self._children):
                held[name] = held.get(name, 0) + accelerators(pod)
        return len(held), sum(held.values())

    def perform(self, step: Step, now: float) -> None:
        """Carry out one step."""
        if isinstance(step, WriteTicketKey):
            annotations = step.manifest["metadata"].get("annotations") or {}
            self._ticket_key = TicketKey(str(annotations.get(ROTATE_TICKET_KEY_ANNOTATION, "")))
        elif isinstance(step, WriteCertificates):
            issue = str(step.manifest["metadata"]["annotations"][CERTIFICATES_ANNOTATION])
            engines = frozenset(step.engines)
            self._certificates = replace(self._certificates, issue=issue, engines=engines)
        elif isinstance(step, Apply):
            self._apply(step.manifest, now)
        elif isinstance(step, TryOut):
            self._apply(step.stored, now)
        elif isinstance(step, RestartPod):
            self._end(step.name, now)
        else:
            child = self._children.pop((step.kind, step.name), None)
            engine = engine_of(child) if child is not None else None
            if engine is not None and step.kind == "StatefulSet":
                for pod in [n for n, one in self._pods.items() if engine_of(one) == engine]:
                    self._end(pod, now)

    def others_act(self) -> str:
        """Let the others do one thing that they have to do; return it in words, empty if none."""
        ending = [n for n, pod in self._pods.items() if pod["metadata"].get("deletionTimestamp")]
        if ending:
            for name in ending:
                del self._pods[name]
            self._forget_engines()
            return GONE
        if self._make_pods() or self._speak():
            return VERIFIED
        return ROUTED if self._route() else ""

    def _apply(self, wanted: Manifest, now: float) -> None:
        self._made += 1
        key = identity(wanted)
        if is_shared_connector(wanted):
            self._connectors[key] = wanted
            return
        old = self._children.get(key)
        made = copy.deepcopy(dict(wanted))
        metadata = made["metadata"]
        known = old["metadata"] if old is not None else {}
        same = old is not None and covers(old.get("spec"), wanted.get("spec"))
        metadata["uid"] = known.get("uid") or f"forecast-{self._made}"
        metadata["resourceVersion"] = f"forecast-{self._made}"
        metadata["creationTimestamp"] = known.get("creationTimestamp") or timestamp(now)
        metadata["generation"] = int(known.get("generation") or 0) + (not same)
        made["status"] = dict((old or {}).get("status") or {})
        if made["kind"] == "StatefulSet":
            template = made["spec"]["template"]
            if old is None or not covers(old["spec"]["template"], template):
                made["status"]["updateRevision"] = f"forecast-{short_hash(template)}"
            made["status"]["observedGeneration"] = metadata["generation"]
        self._children[key] = made

    def _end(self, pod: str, now: float) -> None:
        live = self._pods.get(pod)
        if live is not None and not live["metadata"].get("deletionTimestamp"):
            metadata = {**live["metadata"], "deletionTimestamp": timestamp(now)}
            self._pods[pod] = {**live, "metadata": metadata}

    def _sets(self) -> Iterator[tuple[EngineName, Manifest]]:
        for (kind, _), child in self._children.items():
            name = engine_of(child) if kind == "StatefulSet" else None
            if name is not None:
                yield name, child

    def _forget_engines(self) -> None:
        running = {name.logical for pod in self._pods.values() if (name := engine_of(pod))}
        self._engines = {name: one for name, one in self._engines.items() if name in running}
        self._links = {name: one for name, one in self._links.items() if name in running}

    def _make_pods(self) -> bool:
        """Let every wanted pod run; return whether one had to be made or started."""
        changed = False
        for name, child in self._sets():
            for node in range(int(child["spec"].get("replicas", 1))):
                pod = self._pods.get(name.pod(node))
                if pod is not None and is_ready(pod):
                    continue
                changed = True
                self._made += 1
                self._pods[name.pod(node)] = running_pod(name, node, child, self._made)
        return changed

    def _speak(self) -> bool:
        """Let every engine report that it is ready, and every link that KV moved."""
        before = self._engines, self._links
        sets = dict(self._sets())
        self._engines = {name.logical: ready_engine(name) for name in sets} | {
            name: one for name, one in self._engines.items() if one.ready
        }
        keys = {
            name: child["metadata"]["labels"].get(PAIRING_LABEL) for name, child in sets.items()
        }
        prefill = [name for name in sets if name.role is Role.PREFILL]
        self._links = {
            decode.logical: LinksReport(
                decode.logical,
                self._engines[decode.logical].engine_id,
                tuple(
                    verified_link(one.logical, self._engines[one.logical].engine_id)
                    for one in prefill
                    if keys[one] == keys[decode]
                ),
            )
            for decode in sets
            if decode.role is Role.DECODE
        }
        return before != (self._engines, self._links)

    def _route(self) -> bool:
        changed = False
        for key, child in self._children.items():
            if key[0] != "Deployment":
                continue
            wanted = int(child["spec"].get("replicas", 1))
            status = {
                "observedGeneration": child["metadata"].get("generation", 0),
                "replicas": wanted,
                "updatedReplicas": wanted,
                "availableReplicas": wanted,
            }
            if any(child.get("status", {}).get(name) != value for name, value in status.items()):
                self._children[key] = {**child, "status": status}
                changed = True
        return changed


def running_pod(name: EngineName, node: int, child: Manifest, number: int) -> dict[str, Any]:
    """Return the pod of one node of an engine.

    Args:
        child: the engine's StatefulSet.
        number: makes the pod's UID unique.
    """
    template = child["spec"]["template"]
    revision = str((child.get("status") or {}).get("updateRevision") or "")
    labels = {POD_INDEX_LABEL: str(node), POD_REVISION_LABEL: revision}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name.pod(node),
            "namespace": name.namespace,
            "uid": f"forecast-pod-{number}",
            "resourceVersion": f"forecast-{number}",
            "labels": {**template["metadata"]["labels"], **labels},
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


def is_ready(pod: Manifest) -> bool:
    """Return whether a pod's Ready condition is True."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def ready_engine(name: EngineName, incarnation: str = "forecast") -> EngineReport:
    """Return what the launcher of a ready engine reports."""
    return EngineReport(
        ready=True,
        engine=name.logical,
        engine_id=f"{name.logical}/{incarnation}",
        role=name.role.value,
        state=EngineState.READY,
    )


def verified_link(prefill: str, engine_id: str, nbytes: int = 1) -> LinkReport:
    """Return what a decode launcher reports of a link whose canary moved ``nbytes`` bytes."""
    canary = CanaryReport(CanaryState.PASSED, nbytes)
    return LinkReport(prefill, engine_id, LinkState.ESTABLISHED, canary=canary)
