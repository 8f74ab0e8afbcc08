"""Engines of several pods of which only some fit on a node.

Such an engine holds the GPUs of the pods that fit, and does nothing with them. Two of them can keep
each other from starting for ever. After ``rollout.scheduleTimeoutSeconds`` one of them is
released: its StatefulSet gets no pods for a while, then it is tried again. What was decided stands
in annotations of the StatefulSet, so another process of the operator goes on with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdcluster_operator.api.conditions import seconds, timestamp
from pdcluster_operator.api.labels import (
    RELEASED_ANNOTATION,
    RELEASED_BECAUSE_ANNOTATION,
)
from pdcluster_operator.plan.observed.engines import released
from pdcluster_operator.plan.observed.pods import pods_by_engine, status_of, text_of
from pdcluster_operator.plan.types import Manifest, Observed

LONGEST_WORDS = 512


def with_releases(
    observed: Observed, engines: Sequence[Manifest], timeout: float, now: float
) -> dict[str, dict[str, Any]]:
    """Return the StatefulSets that get no pods now, by name, as they should be.

    At most one more is released each ``timeout``: the others may then get what it held.

    Args:
        engines: the wanted StatefulSets of several pods.
        timeout: ``rollout.scheduleTimeoutSeconds``.
    """
    found: dict[str, dict[str, Any]] = {}
    if not engines:
        return found
    live = {_name(child): child for child in observed.children if child["kind"] == "StatefulSet"}
    latest = 0.0
    for engine in engines:
        name = _name(engine)
        moment, because = released(live.get(name))
        if moment is None:
            continue
        latest = max(latest, moment)
        if now < moment + _pause(name, timeout):
            found[name] = _without_pods(engine, timestamp(moment), because)
    if now - latest <= timeout:
        return found
    pods = pods_by_engine(observed.pods)
    for engine in reversed(engines):
        name = _name(engine)
        stuck = None if name in found else _stuck(pods.get(name, ()))
        if stuck is not None and now - stuck[0] > timeout:
            because = (
                f"only some of its pods could be scheduled within {timeout:.0f} s, so they were "
                f"deleted; they are created again later: {stuck[1]}"
            )
            found[name] = _without_pods(engine, timestamp(now), because[:LONGEST_WORDS])
            break
    return found


def _pause(name: str, timeout: float) -> float:
    """Return how long a released engine waits: one to two timeouts, differing between engines."""
    return timeout * (1 + zlib.crc32(name.encode()) % 100 / 100)


def _stuck(pods: Iterable[Manifest]) -> tuple[float, str] | None:
    """Return since when a pod waits while another has its node, and the scheduler's words.

    Before that, all of them may have waited in a queue of Kueue.
    """
    waiting, placed = [], []
    for pod in pods:
        has_node = bool((pod.get("spec") or {}).get("nodeName"))
        since, words = _scheduled(pod)
        if has_node:
            placed.append(since or 0.0)
        elif since is not None:
            waiting.append((since, words))
    if not waiting or not placed:
        return None
    since, words = min(waiting)
    return max(since, min(placed)), words


def _scheduled(pod: Manifest) -> tuple[float | None, str]:
    """Return since when a pod's PodScheduled is as it is, and its message; None if unknown."""
    for condition in status_of(pod).get("conditions") or ():
        if condition.get("type") == "PodScheduled":
            since = seconds(condition.get("lastTransitionTime"))
            return since, text_of(condition.get("message"))
    return None, ""


def _without_pods(engine: Manifest, moment: str, because: str) -> dict[str, Any]:
    metadata = dict(engine["metadata"])
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    metadata["annotations"] = {
        **annotations,
        RELEASED_ANNOTATION: moment,
        RELEASED_BECAUSE_ANNOTATION: because,
    }
    return {**engine, "metadata": metadata, "spec": {**engine["spec"], "replicas": 0}}


def _name(manifest: Manifest) -> str:
    return str(manifest["metadata"]["name"])
