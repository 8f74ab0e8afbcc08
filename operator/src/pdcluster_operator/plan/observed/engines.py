"""A view of each engine, from its pods and from the report of its launcher.

An engine is ready, not ready for a stated reason, or unknown. It is unknown only if its pods are
ready and its launcher does not answer the operator.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.protocol.launcher_documents import EngineReport
from pdcluster_operator.api import object_names
from pdcluster_operator.api.conditions import (
    Status,
    StatusReason,
    Verdict,
    no,
    seconds,
    unknown,
    yes,
)
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.pod_templates import ENGINE_CONTAINER
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan.objects.ownership import engine_sets
from pdcluster_operator.plan.observed import pods
from pdcluster_operator.plan.types import Manifest, Observed

REPORTED_STATES = {
    "Starting": StatusReason.STARTING,
    "LoadingWeights": StatusReason.LOADING_WEIGHTS,
    "WarmingUp": StatusReason.WARMING_UP,
    "Draining": StatusReason.DRAINING,
    "Failed": StatusReason.ENGINE_FAILED,
    "Frozen": StatusReason.ENGINE_FROZEN,
}
HELD = "waits until the first prefill engine and the first decode engine have their nodes"
READY = {"True": True, "False": False, "Unknown": None}
STARTS = (StatusReason.STARTING, StatusReason.LOADING_WEIGHTS, StatusReason.WARMING_UP)


Live = Mapping[Role, Mapping[EngineName, Manifest]]
"""The StatefulSets of engines, by role and by name."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """One wanted engine as it was seen.

    Attributes:
        ready: None if unknown.
        reason: why it is not ready; EnginesReady if it is.
        message: the reason in a sentence, with the engine's last words where it died.
        engine_id: of the running incarnation, or the last one known; empty if none was.
        address: IP of the leader's pod; empty if it has none.
        data_parallel_size: number of its data-parallel ranks: as it reports, or as the spec says.
        follower_addresses: IPs of its other pods in their order; empty ones for those without.
    """

    name: EngineName
    ready: bool | None
    reason: str
    message: str
    engine_id: str
    address: str
    data_parallel_size: int
    follower_addresses: tuple[str, ...] = ()


def live_by_role(observed: Observed) -> dict[Role, dict[EngineName, Manifest]]:
    """Return the StatefulSets of engines, by role and by name."""
    sets = engine_sets(observed.children)
    return {role: {name: one for name, one in sets.items() if name.role is role} for role in Role}


def observe_engines(
    observed: Observed,
    cluster: Cluster,
    names: Mapping[Role, Iterable[EngineName]],
    held: AbstractSet[EngineName] = frozenset(),
) -> dict[Role, tuple[EngineView, ...]]:
    """Return a view of each engine, by role.

    An engine that exists is judged by the number of pods that its template asks for. A change of
    the spec may be paused, and somebody may scale the StatefulSet.

    Args:
        held: engines that are not created before the first pair has its nodes.
    """
    by_engine = pods.pods_by_engine(observed.pods)
    known = known_ids(observed.cluster)
    sets = engine_sets(observed.children)

    def view(name: EngineName) -> EngineView:
        report = observed.engines.get(name.logical)
        asked = cluster.spec.role(name.role).parallelism
        template = sets[name]["spec"]["template"] if name in sets else None
        nodes = nodes_of(template) if template else asked.nodes
        container = next(_containers(template), {}) if template else {}
        theirs = {name.pod(node) for node in range(nodes)}
        found_pods = by_engine.get(name.stateful_set, ())
        own = sorted((pod for pod in found_pods if _name(pod) in theirs), key=_name)
        _, because = released(sets.get(name))
        kept_back = HELD if name in held else because
        found = _judge(name, nodes, own, report, container)
        if kept_back and found.status is Status.FALSE:  # else the mark is somebody else's
            found = no(StatusReason.UNSCHEDULABLE, kept_back)
        addresses = {_name(pod): pods.text_of(pods.status_of(pod).get("podIP")) for pod in own}
        return EngineView(
            name,
            READY[found.status],
            found.reason,
            found.message,
            (report.engine_id if report else "") or known.get(name.stateful_set, ""),
            addresses.get(name.pod(), ""),
            (report.data_parallel_size if report else None) or asked.data,
            tuple(addresses.get(name.pod(node), "") for node in range(1, nodes)),
        )

    return {role: tuple(map(view, names[role])) for role in Role}


def nodes_of(template: Manifest) -> int:
    """Return how many pods an engine has. A StatefulSet has none while its engine is released."""
    words = [word for one in _containers(template) for word in one.get("args") or ()]
    nodes = dict(pairwise(words)).get("--nnodes", "")
    return int(nodes) if nodes.isdecimal() else 1


def _containers(template: Manifest) -> Iterator[Mapping[str, Any]]:
    return (one for one in template["spec"]["containers"] if one["name"] == ENGINE_CONTAINER)


def _judge(
    name: EngineName,
    nodes: int,
    own: Sequence[Manifest],
    report: EngineReport | None,
    container: Mapping[str, Any],
) -> Verdict:
    if len(own) < nodes or _name(own[0]) != name.pod():
        return no(StatusReason.PODS_MISSING, f"{len(own)} of {counted(nodes, 'pod')} so far")
    for pod in own:
        trouble = pods.pod_trouble(pod)
        if trouble is not None:
            return no(trouble.reason, pods.joined(_name(pod), trouble.message))
    waiting = [pod for pod in own if not pods.is_pod_ready(pod)]
    if report is None:
        return _silent(name, waiting, container)
    if not report.ready:
        reason = REPORTED_STATES.get(report.state, StatusReason.STARTING)
        starts = reason in STARTS
        message = pods.started_again(own[0], report.message) if starts else report.message
        if reason is StatusReason.ENGINE_FROZEN:
            message = f"{pods.joined(name.pod(), message)}; {pods.who_restarts(container)}"
        return no(reason, message)
    followers = [pod for pod in waiting if _name(pod) != name.pod()]
    if followers:
        return no(StatusReason.STARTING, f"{_name(followers[0])} is not ready")
    return yes(StatusReason.ENGINES_READY)


def _silent(name: EngineName, waiting: Sequence[Manifest], container: Mapping[str, Any]) -> Verdict:
    """Judge an engine whose launcher does not answer: by its pods, or as unknown."""
    if waiting:
        found = (pods.why_silent(pod, container) for pod in waiting)
        words = pods.started_again(waiting[0], "the launcher does not answer yet")
        return next(filter(None, found), no(StatusReason.STARTING, words))
    message = (
        f"{name.pod()} is ready, but its launcher does not answer the operator, whose log says why"
    )
    return unknown(StatusReason.LAUNCHER_UNREACHABLE, message)


def known_ids(cluster: Manifest) -> dict[str, str]:
    """Return the engine ids in the status, by engine; empty if an engine has never answered."""
    entries = pods.status_of(cluster).get("engines")
    return {
        str(entry.get("name")): pods.text_of(entry.get("engineId"))
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, Mapping)
    }


def _name(pod: Manifest) -> str:
    return pods.text_of(pods.metadata_of(pod).get("name"))


def released(engine: Manifest | None) -> tuple[float | None, str]:
    """Return when and why a live StatefulSet was released; None and empty if it was not.

    One that is released has no pods. A mark on another one is somebody else's.
    """
    annotations = pods.metadata_of(engine or {}).get("annotations") or {}
    if engine is None or engine["spec"].get("replicas") != 0:
        return None, ""
    moment = seconds(annotations.get(object_names.RELEASED_ANNOTATION))
    because = annotations.get(object_names.RELEASED_BECAUSE_ANNOTATION) if moment else ""
    return moment, pods.text_of(because)
