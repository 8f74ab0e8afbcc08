"""The state of a pod: why it does not run, whether it is lost with its node, how many GPUs it has.

A status of any shape can be read.

The kubelet of a node that is gone confirms no deletion, so a pod of that node stays Terminating
until somebody removes the node. Its StatefulSet makes no other pod of that name. So the pod counts
as lost after a time, and its engine is replaced under another index.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Set as AbstractSet
from typing import Any

from pdcluster_operator.api import object_names
from pdcluster_operator.api.conditions import StatusReason, Verdict, no, seconds
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.pod_templates import (
    DOWNLOAD_CONTAINER,
    ENGINE_CONTAINER,
    ROUTER_CONTAINER,
    as_mapping,
)
from pdcluster_operator.api.spec.resources import counts_accelerators, parse_quantity
from pdcluster_operator.plan.objects.ownership import engines_of
from pdcluster_operator.plan.types import Manifest

IMAGE_TROUBLE = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull")
CONFIG_TROUBLE = (
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError",
)  # fmt: skip
WAITING_REASONS = {
    **dict.fromkeys(IMAGE_TROUBLE, StatusReason.IMAGE_UNAVAILABLE),
    **dict.fromkeys(CONFIG_TROUBLE, StatusReason.POD_CONFIG_ERROR),
}
OUR_CONTAINERS = (ENGINE_CONTAINER, ROUTER_CONTAINER, DOWNLOAD_CONTAINER)
LONGEST_WORDS = 512
OUT_OF_MEMORY, KILLED = "OOMKilled", 137
SAYS_KILLED = re.compile(r"SIGKILL|out of memory")
MORE_MEMORY = (
    "out of memory: the kernel killed it; raise its memory limit (resources), or lower its KV cache"
)
IN_QUEUE = "waits until Kueue admits it from LocalQueue"
FIRST_MESSAGES = ("", "starting vLLM")
"""What a launcher reports before vLLM has printed anything."""


def pod_trouble(pod: Manifest) -> Verdict | None:
    """Return why a pod's engine, or router, does not run; None if its process runs."""
    if metadata_of(pod).get("deletionTimestamp"):
        return no(StatusReason.DRAINING, "is being deleted")
    container = _our_container(pod)
    if container is None:
        return (
            _gated(pod)
            or _unscheduled(pod)
            or no(StatusReason.CONTAINER_CREATING, "the container is not created yet")
        )
    state = container.get("state") or {}
    if "terminated" in state:
        return no(StatusReason.ENGINE_FAILED, describe_end(state["terminated"]))
    return _waiting(pod, state["waiting"] or {}) if "waiting" in state else None


def _waiting(pod: Manifest, waiting: Mapping[str, Any]) -> Verdict:
    reason, message = text_of(waiting.get("reason")), text_of(waiting.get("message"))
    if reason == "CrashLoopBackOff":
        end, name = previous_end(pod), text_of((_our_container(pod) or {}).get("name"))
        died = f"the {name} died: {end}" if end else ""
        return no(StatusReason.ENGINE_FAILED, died or message or reason)
    known = WAITING_REASONS.get(reason, StatusReason.CONTAINER_CREATING)
    return no(known, joined(reason, message))


def is_pod_ready(pod: Manifest) -> bool:
    """Whether the pod's Ready condition is True."""
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status_of(pod).get("conditions") or ()
    )


def why_silent(pod: Manifest, engine: Mapping[str, Any]) -> Verdict | None:
    """Return why a launcher may be silent whose pod is not ready; None while it starts.

    If a node reports no more, Kubernetes' node controller sets Ready of its pods to False without a
    reason, and leaves what the kubelet said last of the containers. ``started`` means that the
    startup probe has passed.

    Args:
        engine: the engine's container, as the pod's template has it.
    """
    name, container = text_of(metadata_of(pod).get("name")), _our_container(pod) or {}
    conditions = status_of(pod).get("conditions") or ()
    marked = any(one.get("type") == "Ready" and not one.get("reason") for one in conditions)
    if container.get("ready") and marked:
        node = text_of((pod.get("spec") or {}).get("nodeName"))
        words = f"node {node} of {name} does not report to Kubernetes, and the launcher is silent"
        return no(StatusReason.NODE_NOT_READY, words)
    if container.get("ready") or not (container.get("started") and engine.get("startupProbe")):
        return None
    return no(
        StatusReason.CONTAINER_FROZEN,
        f"the container of {name} runs, but fails its readiness probe and does not answer the "
        f"operator: most likely it is frozen, or its node is overloaded; {who_restarts(engine)}",
    )


def who_restarts(engine: Mapping[str, Any]) -> str:
    """Return what becomes of an engine's container that runs and does not answer."""
    if not (probe := engine.get("livenessProbe")):
        return "without a livenessProbe, nothing starts it again"
    times, period = probe.get("failureThreshold") or 3, probe.get("periodSeconds") or 10
    return f"its livenessProbe starts it again if it fails {times} times, {period} s apart"


def previous_end(pod: Manifest) -> str:
    """Return how the previous process of the engine, or router, ended; empty if there was none."""
    terminated = ((_our_container(pod) or {}).get("lastState") or {}).get("terminated")
    return describe_end(terminated) if terminated else ""


def started_again(pod: Manifest, message: str) -> str:
    """Return the message of an engine that starts, with how its previous process ended."""
    end = previous_end(pod)
    if not end:
        return message
    again = "starting again" if message in FIRST_MESSAGES else f"{message}; started again"
    return f"{again}; its last process ended: {end}"


def _our_container(pod: Manifest) -> Mapping[str, Any] | None:
    containers = status_of(pod).get("containerStatuses") or ()
    return next((one for one in containers if one.get("name") in OUR_CONTAINERS), None)


def _gated(pod: Manifest) -> Verdict | None:
    """Return that a pod waits for its scheduling gates, and who removes them; None without one."""
    given = (pod.get("spec") or {}).get("schedulingGates") or ()
    gates = [text_of(gate.get("name")) for gate in given]
    if not gates:
        return None
    if not any(gate.startswith(object_names.KUEUE_GATES) for gate in gates):
        words = f"waits until somebody removes its scheduling gate {', '.join(gates)}"
        return no(StatusReason.SCHEDULING_GATED, words)
    labels = metadata_of(pod).get("labels") or {}
    queue, workload = (
        text_of(labels.get(object_names.QUEUE_LABEL)),
        text_of(labels.get(object_names.WORKLOAD_LABEL)),
    )
    return no(
        StatusReason.SCHEDULING_GATED,
        f"{IN_QUEUE} {queue}; kubectl describe workloads.kueue.x-k8s.io {workload} says why",
    )


def _unscheduled(pod: Manifest) -> Verdict | None:
    spec = pod.get("spec") or {}
    group = text_of((spec.get("schedulingGroup") or {}).get("podGroupName"))
    waits = f"waits for nodes together with the other pods of PodGroup {group}" if group else ""
    for condition in status_of(pod).get("conditions") or ():
        if condition.get("reason") == "SchedulingGated":
            continue  # It has no gate any more. The scheduler has not spoken since.
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            words = joined(waits, text_of(condition.get("message")))
            return no(StatusReason.UNSCHEDULABLE, words)
    if waits and not spec.get("nodeName"):
        # The scheduler writes no condition before its group has as many pods as it asks for.
        return no(StatusReason.CONTAINER_CREATING, waits)
    return None


def _end_of(text: str) -> str:
    """Return the last whole lines of a text; of one long line its beginning, which says why."""
    if len(text) <= LONGEST_WORDS:
        return text
    lines = text[-LONGEST_WORDS:].partition("\n")[2]
    return lines or f"{text.rpartition(chr(10))[2][: LONGEST_WORDS - 1]}…"


def describe_end(terminated: Mapping[str, Any]) -> str:
    """Return a process's last message and exit code, and first whether it ran out of memory."""
    words = _end_of(text_of(terminated.get("message")).strip())
    reason = text_of(terminated.get("reason"))
    how = f"exit code {terminated.get('exitCode')}"
    if reason not in ("", "Error", "Completed"):
        how += f", {reason}"
    elif terminated.get("exitCode") == KILLED and not SAYS_KILLED.search(words):
        # A launcher that is killed leaves no message: the kubelet takes the end of the log.
        words = joined("killed by SIGKILL", words and f"its log ends with {words}")
    if reason == OUT_OF_MEMORY and not words.startswith("out of memory"):
        words = joined(MORE_MEMORY, words)
    return f"{words} ({how})" if words else how


def joined(*parts: str) -> str:
    """Join the parts that are not empty with colons."""
    return ": ".join(part for part in parts if part)


def pods_by_engine(pods: Iterable[Manifest]) -> dict[str, list[Manifest]]:
    """Return the pods of each engine, by the name of its StatefulSet."""
    found: dict[str, list[Manifest]] = {}
    for pod in pods:
        engine = (metadata_of(pod).get("labels") or {}).get(object_names.ENGINE_LABEL)
        if engine:
            found.setdefault(engine, []).append(pod)
    return found


def metadata_of(manifest: Manifest) -> Mapping[str, Any]:
    """Return an object's metadata; empty if it has none."""
    return as_mapping(manifest.get("metadata"))


def status_of(manifest: Manifest) -> Mapping[str, Any]:
    """Return an object's status; empty if it has none."""
    return as_mapping(manifest.get("status"))


def text_of(value: object) -> str:
    """Return a string, or an empty one for anything else."""
    return value if isinstance(value, str) else ""


LOST_SECONDS = 60.0
"""How long after the end of its grace period a pod may still be there."""


def lost_pods(pods: Iterable[Manifest], now: float) -> frozenset[str]:
    """Return the names of the pods that should have gone long ago."""
    return frozenset(name for name, since in _ending(pods) if now > since)


def seconds_to_loss(pods: Iterable[Manifest], now: float) -> float | None:
    """Return in how many seconds the next pod is lost; None if no pod is being deleted.

    No watch event comes at that moment.
    """
    return min((since - now for _, since in _ending(pods) if now <= since), default=None)


def _ending(pods: Iterable[Manifest]) -> Iterator[tuple[str, float]]:
    """Yield the name of each pod that is being deleted, and from when on it is lost.

    ``deletionTimestamp`` is the moment at which the pod's grace period ends.
    """
    ending = (pod["metadata"] for pod in pods if pod["metadata"].get("deletionTimestamp"))
    for metadata in ending:
        if (ends := seconds(metadata["deletionTimestamp"])) is not None:
            yield str(metadata["name"]), ends + LOST_SECONDS


def lost_engines(pods: Iterable[Manifest], lost: AbstractSet[str]) -> frozenset[EngineName]:
    """Return the engines with a pod that is lost.

    Args:
        lost: names of the pods that are lost.
    """
    return engines_of(pod for pod in pods if is_lost(pod, lost))


def is_lost(pod: Manifest, lost: AbstractSet[str]) -> bool:
    """Whether a pod is one of those that are lost."""
    return str(pod["metadata"].get("name")) in lost


def gpus(template: Manifest) -> int:
    """Return the GPUs of a pod or of a pod template; 1 for one without GPUs."""
    return max(1, accelerators(template))


def accelerators(template: Manifest) -> int:
    """Return the GPUs of a pod or of a pod template."""
    asked = 0
    for container in (template.get("spec") or {}).get("containers") or ():
        limits = (container.get("resources") or {}).get("limits") or {}
        found = (parse_quantity(str(n)) for name, n in limits.items() if counts_accelerators(name))
        asked += sum(int(n) for n in found if n is not None)
    return asked
