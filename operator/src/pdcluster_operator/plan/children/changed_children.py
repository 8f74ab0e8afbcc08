"""The steps that take the children to what is desired: applies, deletions and restarts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet

from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.children.deletions import deletions
from pdcluster_operator.plan.children.half_scheduled import with_releases
from pdcluster_operator.plan.children.restarts import restarts
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.model import Apply, Manifest, Observed, Step
from pdcluster_operator.plan.objects.drift import stamped
from pdcluster_operator.plan.objects.ownership import identity, is_being_deleted
from pdcluster_operator.plan.objects.rewrites import is_settled
from pdcluster_operator.plan.rollout.desired import Desired
from pdcluster_operator.plan.rollout.wanted_children import Wanted


def steps_to(
    observed: Observed, cluster: Cluster, desired: Desired, now: float, memo: Memo
) -> tuple[Step, ...]:
    """Return the steps in order."""
    children = _children(observed, cluster, desired, now, memo)
    return memo.get(
        "steps",
        (observed, desired, children),
        lambda *_: tuple(_steps(observed, desired, children, memo)),
    )


def _steps(
    observed: Observed, desired: Desired, children: Iterable[Wanted], memo: Memo
) -> Iterator[Step]:
    live = {identity(child): child for child in (*observed.connectors, *observed.children)}
    applied = _applied(observed, live, children, memo)
    for wanted in children:
        name = identity(wanted.manifest)
        if name not in applied:
            yield Apply(wanted.manifest, wanted.why, _uid(live.get(name)))
    yield from desired.trials
    yield from deletions(observed, desired)
    yield from restarts(observed, desired, applied)


def _children(
    observed: Observed, cluster: Cluster, desired: Desired, now: float, memo: Memo
) -> tuple[Wanted, ...]:
    """Return the children as they should be now: some engines may have to be without pods."""
    engines = memo.get("engines of several pods", (desired.children,), _of_several_pods)
    timeout = cluster.spec.rollout.schedule_timeout_seconds
    released = {
        identity(engine): stamped(engine)
        for engine in with_releases(observed, engines, timeout, now).values()
    }
    if not released:
        return desired.children
    return tuple(
        Wanted(released.get(identity(one.manifest), one.manifest), one.why)
        for one in desired.children
    )


def _of_several_pods(children: Iterable[Wanted]) -> tuple[Manifest, ...]:
    engines = (one.manifest for one in children if one.manifest["kind"] == "StatefulSet")
    return tuple(engine for engine in engines if engine["spec"]["replicas"] > 1)


def _applied(
    observed: Observed,
    live: Mapping[tuple[str, str], Manifest],
    children: Iterable[Wanted],
    memo: Memo,
) -> AbstractSet[tuple[str, str]]:
    """Return the identities of the children that an apply would not change."""
    found = set()
    for wanted in children:
        name = identity(wanted.manifest)
        inputs = live.get(name), wanted.manifest, observed.rewrites.get(name)
        if memo.get(("settled", *name), inputs, is_settled):
            found.add(name)
    return found


def _uid(live: Manifest | None) -> str:
    if live is None or is_being_deleted(live):
        return ""
    return str(live["metadata"].get("uid") or "")
