"""What the planner sees of an engine that is well: a pod that runs, and what launchers report."""

from __future__ import annotations

from typing import Any

from pdcluster_connector.protocol.launcher_documents import (
    CanaryReport,
    CanaryState,
    EngineReport,
    EngineState,
    LinkReport,
    LinkState,
)
from pdcluster_operator.api.labels import POD_INDEX_LABEL
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.plan.children.restarts import POD_REVISION_LABEL
from pdcluster_operator.plan.model import Manifest


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
