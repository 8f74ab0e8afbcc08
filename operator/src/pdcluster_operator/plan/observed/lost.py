"""Engines that are lost with their node: a pod of theirs is being deleted and never goes.

The kubelet of a node that is gone confirms no deletion, so the pod stays Terminating until
somebody removes the node. Its StatefulSet makes no other pod of that name. So the engine is
replaced under another index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet

from pdcluster_operator.api.conditions import seconds
from pdcluster_operator.api.labels import engine_of
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.plan.model import Manifest

LOST_SECONDS = 60.0
"""How long after the end of its grace period a pod may still be there."""


def lost_pods(pods: Iterable[Manifest], now: float) -> frozenset[str]:
    """Return the names of the pods that should have gone long ago."""
    return frozenset(name for name, since in _ending(pods) if now > since)


def seconds_to_loss(pods: Iterable[Manifest], now: float) -> float | None:
    """Return in how many seconds the next pod is lost; None if no pod is being deleted.

    No event tells of that moment.
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
    found = (engine_of(pod) for pod in pods if is_lost(pod, lost)) if lost else ()
    return frozenset(engine for engine in found if engine is not None)


def is_lost(pod: Manifest, lost: AbstractSet[str]) -> bool:
    """Whether a pod is one of those that are lost."""
    return str(pod["metadata"].get("name")) in lost
