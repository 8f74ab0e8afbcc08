"""What the status of a pod says: why it does not run, such as an image that cannot be pulled.

A status of any shape can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.api.conditions import StatusReason
from pdcluster_operator.api.labels import ENGINE_LABEL, KUEUE_GATES, QUEUE_LABEL, WORKLOAD_LABEL
from pdcluster_operator.api.spec.pod_templates import ENGINE_CONTAINER, ROUTER_CONTAINER
from pdcluster_operator.plan.model import Manifest

IMAGE_TROUBLE = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull")
CONFIG_TROUBLE = (
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError",
)  # fmt: skip
WAITING_REASONS = {
    **dict.fromkeys(IMAGE_TROUBLE, StatusReason.IMAGE_UNAVAILABLE),
    **dict.fromkeys(CONFIG_TROUBLE, StatusReason.POD_CONFIG_ERROR),
}
OUR_CONTAINERS = (ENGINE_CONTAINER, ROUTER_CONTAINER)
LONGEST_WORDS = 512
OUT_OF_MEMORY = "OOMKilled"
MORE_MEMORY = (
    "out of memory: the kernel killed it; raise its memory limit (resources), or lower its KV cache"
)
IN_QUEUE = "waits until Kueue admits it from LocalQueue"
FIRST_MESSAGES = ("", "starting vLLM")
"""What a launcher reports before vLLM has printed anything."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod's engine, or router, does not run."""

    reason: StatusReason
    message: str


def pod_trouble(pod: Manifest) -> Trouble | None:
    """Return why a pod's engine, or router, does not run; None if its process runs."""
    if metadata_of(pod).get("deletionTimestamp"):
        return Trouble(StatusReason.DRAINING, "is being deleted")
    container = _our_container(pod)
    if container is None:
        return (
            _gated(pod)
            or _unscheduled(pod)
            or Trouble(StatusReason.CONTAINER_CREATING, "the container is not created yet")
        )
    state = container.get("state") or {}
    if "terminated" in state:
        return Trouble(StatusReason.ENGINE_FAILED, describe_end(state["terminated"]))
    return _waiting(pod, state["waiting"] or {}) if "waiting" in state else None


def _waiting(pod: Manifest, waiting: Mapping[str, Any]) -> Trouble:
    reason, message = text_of(waiting.get("reason")), text_of(waiting.get("message"))
    if reason == "CrashLoopBackOff":
        end, name = previous_end(pod), text_of((_our_container(pod) or {}).get("name"))
        died = f"the {name} died: {end}" if end else ""
        return Trouble(StatusReason.ENGINE_FAILED, died or message or reason)
    known = WAITING_REASONS.get(reason, StatusReason.CONTAINER_CREATING)
    return Trouble(known, joined(reason, message))


def is_pod_ready(pod: Manifest) -> bool:
    """Whether the pod's Ready condition is True."""
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status_of(pod).get("conditions") or ()
    )


def previous_end(pod: Manifest) -> str:
    """Return how the previous process of the engine, or router, ended; empty if there was none."""
    terminated = ((_our_container(pod) or {}).get("lastState") or {}).get("terminated")
    return describe_end(terminated) if terminated else ""


def started_again(pod: Manifest, message: str) -> str:
    """Return what an engine says while it starts, with how its previous process ended."""
    end = previous_end(pod)
    if not end:
        return message
    again = "starting again" if message in FIRST_MESSAGES else f"{message}; started again"
    return f"{again}; its last process ended: {end}"


def _our_container(pod: Manifest) -> Mapping[str, Any] | None:
    containers = status_of(pod).get("containerStatuses") or ()
    return next((one for one in containers if one.get("name") in OUR_CONTAINERS), None)


def _gated(pod: Manifest) -> Trouble | None:
    """Return whose scheduling gates keep the pod from the scheduler; None if it has none."""
    given = (pod.get("spec") or {}).get("schedulingGates") or ()
    gates = [text_of(gate.get("name")) for gate in given]
    if not gates:
        return None
    if not any(gate.startswith(KUEUE_GATES) for gate in gates):
        words = f"waits until somebody removes its scheduling gate {', '.join(gates)}"
        return Trouble(StatusReason.SCHEDULING_GATED, words)
    labels = metadata_of(pod).get("labels") or {}
    queue, workload = text_of(labels.get(QUEUE_LABEL)), text_of(labels.get(WORKLOAD_LABEL))
    return Trouble(
        StatusReason.SCHEDULING_GATED,
        f"{IN_QUEUE} {queue}; kubectl describe workloads.kueue.x-k8s.io {workload} says why",
    )


def _unscheduled(pod: Manifest) -> Trouble | None:
    spec = pod.get("spec") or {}
    group = text_of((spec.get("schedulingGroup") or {}).get("podGroupName"))
    waits = f"waits for nodes together with the other pods of PodGroup {group}" if group else ""
    for condition in status_of(pod).get("conditions") or ():
        if condition.get("reason") == "SchedulingGated":
            continue  # It has no gate any more. The scheduler has not spoken since.
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            words = joined(waits, text_of(condition.get("message")))
            return Trouble(StatusReason.UNSCHEDULABLE, words)
    if waits and not spec.get("nodeName"):
        # The scheduler says nothing of a pod before its group has as many pods as it asks for.
        return Trouble(StatusReason.CONTAINER_CREATING, waits)
    return None


def describe_end(terminated: Mapping[str, Any]) -> str:
    """Return a process's last message and exit code, and first whether it ran out of memory."""
    words = text_of(terminated.get("message")).strip()[-LONGEST_WORDS:]
    reason = text_of(terminated.get("reason"))
    how = f"exit code {terminated.get('exitCode')}"
    if reason not in ("", "Error", "Completed"):
        how += f", {reason}"
    if reason == OUT_OF_MEMORY and not words.startswith("out of memory"):
        words = joined(MORE_MEMORY, words)
    return f"{words} ({how})" if words else how


def joined(*parts: str) -> str:
    """Join what is not empty with colons."""
    return ": ".join(part for part in parts if part)


def pods_by_engine(pods: Iterable[Manifest]) -> dict[str, list[Manifest]]:
    """Return the pods of each engine, by the name of its StatefulSet."""
    found: dict[str, list[Manifest]] = {}
    for pod in pods:
        engine = (metadata_of(pod).get("labels") or {}).get(ENGINE_LABEL)
        if engine:
            found.setdefault(engine, []).append(pod)
    return found


def metadata_of(manifest: Manifest) -> Mapping[str, Any]:
    """Return an object's metadata; empty if it has none."""
    metadata = manifest.get("metadata")
    return metadata if isinstance(metadata, (dict, Mapping)) else {}


def status_of(manifest: Manifest) -> Mapping[str, Any]:
    """Return an object's status; empty if it has none."""
    status = manifest.get("status")
    return status if isinstance(status, (dict, Mapping)) else {}


def text_of(value: object) -> str:
    """Return a string, or an empty one for anything else."""
    return value if isinstance(value, str) else ""
