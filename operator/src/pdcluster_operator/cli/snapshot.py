"""The state of a cluster that ``pdcluster up`` runs, from the API, launchers and logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pdcluster_connector.protocol.launcher_documents import EngineReport, LinkReport
from pdcluster_operator.api.object_names import CLUSTER_LABEL, EngineName, engine_of
from pdcluster_operator.local.cluster import LocalCluster
from pdcluster_operator.local.controllers import is_ready
from pdcluster_operator.plan.observed.pods import describe_end
from pdcluster_operator.runtime.interfaces import Key

WAITS_FOR_ENGINES = "waits until every engine answers"


@dataclass(frozen=True, slots=True)
class PodLine:
    """One pod, as ``up`` shows it.

    Attributes:
        state: one CamelCase word.
        doing: a sentence: the launcher's message, or why the pod waits.
        log: the file that its output goes to; None before its first start.
        restarts: how often its container was started again.
        end: how its last process ended; empty if none has.
    """

    name: str
    role: str
    address: str
    state: str
    doing: str
    log: Path | None
    restarts: int
    end: str = ""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of the cluster."""

    type: str
    status: str
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cluster at one moment. ``links`` are (decode engine, link) pairs."""

    pods: tuple[PodLine, ...]
    conditions: tuple[Condition, ...]
    links: tuple[tuple[str, LinkReport], ...]

    @property
    def ready(self) -> bool:
        """Whether the Ready condition is True."""
        return any(c.type == "Ready" and c.status == "True" for c in self.conditions)

    @property
    def missing(self) -> tuple[Condition, ...]:
        """Conditions other than Ready that do not hold: the cluster waits for them."""
        return tuple(c for c in self.conditions if c.status != "True" and c.type != "Ready")


def take_snapshot(local: LocalCluster, key: Key) -> Snapshot:
    """Read everything. It is cheap enough to be called several times a second."""
    status = local.cluster(key).get("status") or {}
    conditions = msgspec.convert(status.get("conditions") or (), tuple[Condition, ...])
    reports, logs = local.loop.monitor.engines(key), local.kubelet.logs()
    pods = tuple(
        _pod_line(pod, reports, logs)
        for pod in local.api.list("Pod", key.namespace)
        if (pod["metadata"].get("labels") or {}).get(CLUSTER_LABEL) == key.name
    )
    links = tuple(
        (decode, link)
        for decode, report in sorted(local.loop.monitor.links(key).items())
        for link in report.links
    )
    return Snapshot(pods, conditions, links)


def _pod_line(
    pod: Mapping[str, Any], reports: Mapping[str, EngineReport], logs: Mapping[str, Path]
) -> PodLine:
    metadata, status, engine = pod["metadata"], pod.get("status") or {}, engine_of(pod)
    container = (status.get("containerStatuses") or [{}])[0]
    ended = (container.get("lastState") or {}).get("terminated")
    end = describe_end(ended) if ended else ""
    report = reports.get(engine.logical) if engine else None
    state, doing = _state(pod, container, end, engine, report)
    return PodLine(
        name=metadata["name"],
        role=str(metadata["labels"].get("app.kubernetes.io/component", "")),
        address=status.get("podIP", ""),
        state=state,
        doing=doing,
        log=logs.get(metadata["name"]),
        restarts=container.get("restartCount", 0),
        end=end,
    )


def _state(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    end: str,
    engine: EngineName | None,
    report: EngineReport | None,
) -> tuple[str, str]:
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating", ""
    waiting = container.get("state", {}).get("waiting")
    if waiting is not None:
        if waiting["reason"] == "CrashLoopBackOff":
            return "Died", f"{end}; {waiting['message']}"
        return waiting["reason"], waiting.get("message", "")
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition["reason"], condition["message"]
    if report is not None:
        return ("Ready" if report.ready else report.state), report.message
    # A pod without a launcher is a router's, and that one listens last.
    starts = "Starting", "" if engine else WAITS_FOR_ENGINES
    return ("Ready", "") if is_ready(pod) else starts
