"""The steps from the live children to the desired ones: applies and deletions.

No step deletes a pod. StatefulSets of engines use ``OnDelete``, and an engine's name contains its
revision: another revision means other engines (:mod:`.rollout.moves`). What somebody else changes
in a pod template reaches a pod only when that pod is made again for another reason.

An engine of several pods may hold the GPUs of the pods that fit on a node, and do nothing with
them. Two such engines can keep each other from starting for ever. After
``rollout.scheduleTimeoutSeconds`` one of them is released: its StatefulSet gets no pods for a
while, then it is tried again. What was decided stands in annotations of the StatefulSet, so another
process of the operator goes on with it.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdcluster_operator.api import conditions, object_names
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan.builders.engine_objects import POD_GROUP_KIND
from pdcluster_operator.plan.objects import drift, ownership
from pdcluster_operator.plan.observed.engines import released
from pdcluster_operator.plan.observed.pods import pods_by_engine, status_of, text_of
from pdcluster_operator.plan.rollout.desired import Desired
from pdcluster_operator.plan.rollout.revisions import REVISION_KIND
from pdcluster_operator.plan.types import Apply, Delete, Manifest, Observed, Step, deletion


def children_now(
    observed: Observed, cluster: Cluster, desired: Desired, now: float
) -> tuple[Apply, ...]:
    """Return the children as they should be now: some engines may have to be without pods."""
    sets = [one.manifest for one in desired.children if one.manifest["kind"] == "StatefulSet"]
    engines = [engine for engine in sets if engine["spec"]["replicas"] > 1]
    timeout = cluster.spec.rollout.schedule_timeout_seconds
    released = {
        ownership.identity(engine): drift.stamped(engine)
        for engine in with_releases(observed, engines, timeout, now).values()
    }
    if not released:
        return desired.children
    return tuple(
        replace(one, manifest=released.get(ownership.identity(one.manifest), one.manifest))
        for one in desired.children
    )


def steps_to(observed: Observed, desired: Desired, children: tuple[Apply, ...]) -> Iterator[Step]:
    """Yield the steps from the live children to the desired ones, in order.

    Args:
        children: those of ``desired``, as they should be now.
    """
    live = {
        ownership.identity(child): child for child in (*observed.connectors, *observed.children)
    }
    uids = {
        name: str(one["metadata"].get("uid") or "")
        for name, one in live.items()
        if not ownership.is_being_deleted(one)
    }
    trials = {ownership.identity(trial.manifest): trial for trial in desired.trials}
    for wanted in children:
        name = ownership.identity(wanted.manifest)
        if (trial := trials.pop(name, None)) is not None:
            yield replace(trial, manifest=wanted.manifest, why=wanted.why)
        elif not drift.is_settled(live.get(name), wanted.manifest, observed.rewrites.get(name)):
            yield replace(wanted, uid=uids.get(name, ""))
    for name, trial in trials.items():
        yield replace(trial, manifest=drift.stamped(trial.manifest), uid=uids.get(name, ""))
    yield from deletions(observed, desired)


MANAGED_KINDS = frozenset(
    {
        "StatefulSet",
        "Deployment",
        "Service",
        "ServiceAccount",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Job",
        POD_GROUP_KIND,
        REVISION_KIND,
    }
)
"""The kinds that a PDCluster owns. A plan deletes no object of another kind."""


def deletions(observed: Observed, desired: Desired) -> Iterator[Delete]:
    """Yield each child that is not wanted and that nothing needs any more."""
    wanted = {ownership.identity(child.manifest) for child in desired.children}
    there = {*ownership.engine_sets(observed.children), *ownership.engines_of(observed.pods)}
    kept = {name.stateful_set for name in desired.kept}
    leaving = there.difference(desired.kept, *desired.names.values())
    for child in observed.children:
        kind, name = ownership.identity(child)
        if kind not in MANAGED_KINDS or (kind, name) in wanted or ownership.is_being_deleted(child):
            continue
        if kind == "StatefulSet" and name in kept:
            continue
        if kind == "Service" and name in {one.stateful_set for one in there}:
            # An engine needs its address until its last pod is gone.
            continue
        if kind == REVISION_KIND and name not in desired.forgotten:
            continue
        if kind == POD_GROUP_KIND and (leaving or desired.kept):
            # A pod that is leaving may restart once more. It needs what it was made with.
            continue
        gone = deletion(child, "the spec no longer asks for it")
        yield replace(gone, makes_room=bool(desired.blocked))


def existing_engines(children: Iterable[Manifest], role: Role) -> int:
    """Return how many engines of a role exist and are not being deleted."""
    sets = ownership.engine_sets(children)
    return sum(name.role is role and not ownership.is_being_deleted(sets[name]) for name in sets)


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
    sets = (child for child in observed.children if child["kind"] == "StatefulSet")
    live = {child["metadata"]["name"]: child for child in sets}
    latest = 0.0
    for engine in engines:
        name = engine["metadata"]["name"]
        moment, because = released(live.get(name))
        if moment is None or moment > now:  # a clock that was wrong
            continue
        latest = max(latest, moment)
        # It waits for one to two timeouts, and not as long as another one.
        if now < moment + timeout * (1 + zlib.crc32(name.encode()) % 100 / 100):
            found[name] = _without_pods(engine, conditions.timestamp(moment), because)
    if now - latest <= timeout:
        return found
    pods = pods_by_engine(observed.pods)
    for engine in reversed(engines):
        name = engine["metadata"]["name"]
        since, words = _stuck(pods.get(name, ()))
        if name not in found and now - since > timeout:
            because = (
                f"only some of its pods could be scheduled within {timeout:.0f} s, so they were "
                f"deleted; they are created again later: {words}"
            )
            found[name] = _without_pods(engine, conditions.timestamp(now), because[:LONGEST_WORDS])
            break
    return found


def _stuck(pods: Iterable[Manifest]) -> tuple[float, str]:
    """Return since when a pod waits while another has its node, and the scheduler's words.

    Before that, all of them may have waited in a queue of Kueue. It is never if none waits so.
    """
    waiting, placed = [], []
    for pod in pods:
        has_node = bool((pod.get("spec") or {}).get("nodeName"))
        since, words = _scheduled(pod)
        if has_node:
            placed.append(since or 0.0)
        elif since is not None:
            waiting.append((since, words))
    since, words = min(waiting, default=(math.inf, ""))
    return max(since, min(placed, default=math.inf)), words


def _scheduled(pod: Manifest) -> tuple[float | None, str]:
    """Return since when a pod's PodScheduled is as it is, and its message; None if unknown."""
    for condition in status_of(pod).get("conditions") or ():
        if condition.get("type") == "PodScheduled":
            since = conditions.seconds(condition.get("lastTransitionTime"))
            return since, text_of(condition.get("message"))
    return None, ""


def _without_pods(engine: Manifest, moment: str, because: str) -> dict[str, Any]:
    metadata = dict(engine["metadata"])
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    metadata["annotations"] = {
        **annotations,
        object_names.RELEASED_ANNOTATION: moment,
        object_names.RELEASED_BECAUSE_ANNOTATION: because,
    }
    return {**engine, "metadata": metadata, "spec": {**engine["spec"], "replicas": 0}}
