"""What a plan costs when nothing has changed: function calls, which need no quiet machine.

The goals are at most 0.5 ms of CPU time with one engine of each role, and 10 ms with 64 of each.
`make bench-operator` measures them; `e2e/bench_operator/plan_at_rest.py` says how.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import pytest
from simulated_cluster import SimulatedCluster, manifest

from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.observed.pods import LOST_SECONDS, lost_pods
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.renewals import PERIOD_SECONDS
from pdcluster_operator.plan.types import Observed, Place

MOST_CALLS = 190
"""There were 150, with any number of engines. In 0.5 ms, CPython calls some 3,000 functions."""


def at_rest(engines: int, tls: str = "Disabled") -> SimulatedCluster:
    replicas = {role: {"replicas": engines} for role in ("prefill", "decode")}
    world = SimulatedCluster(manifest(**replicas, transfer={"device": "CPU", "tls": tls}))
    world.memo = Memo()  # type: ignore[assignment]  # to check each result would take a minute
    world.bring_up()
    assert world.condition("Ready")["status"] == "True"
    return world


def seen_again(observed: Observed) -> Observed:
    """The same objects in new collections, as the store and the monitor return them."""
    return replace(
        observed,
        children=(*observed.children,),
        pods=(*observed.pods,),
        engines=dict(observed.engines),
        links=dict(observed.links),
        rewrites=dict(observed.rewrites),
        connectors=(*observed.connectors,),
    )


def calls(function: Callable[[], object]) -> int:
    """Count the calls of Python functions."""
    count = 0

    def seen(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("engines", [1, 64])
def test_a_plan_at_rest_calls_few_functions(engines: int) -> None:
    world, memo = at_rest(engines), Memo()
    observed = world.observed()
    first = make_plan(observed, world.now, memo)
    again = seen_again(observed)
    assert make_plan(again, world.now, memo) == first
    counted = calls(lambda: make_plan(again, world.now, memo))
    assert counted <= MOST_CALLS, (
        f"a plan at rest for {engines} engines of each role calls {counted} functions, and "
        f"{MOST_CALLS} are allowed: the goal is at most 0.5 ms with one engine of each role and "
        "10 ms with 64. What does not change is computed once, with the memo of plan/memo.py; "
        "cProfile shows what is computed again"
    )


MOMENTS = (0, 1, 59, 62, 121, 601, 3601, PERIOD_SECONDS, 3 * PERIOD_SECONDS)


@pytest.mark.parametrize("trouble", ["none", "pod ends", "all silent", "router ends"])
@pytest.mark.parametrize("tls", ["Disabled", "Enabled"])
def test_what_changes_with_the_time_alone_is_computed_again(trouble: str, tls: str) -> None:
    """Nothing else has changed. Each plan is compared with one that remembers nothing."""
    world = at_rest(2, tls)
    if trouble == "pod ends":
        name = world.leaders("prefill")[0].pod()
        world.pods[name]["metadata"]["deletionTimestamp"] = timestamp(world.now)
    if trouble == "all silent":
        world.engines.clear()
        world.links.clear()
    if trouble == "router ends":
        [router] = [one for (kind, _), one in world.children.items() if kind == "Deployment"]
        metadata = {"name": "a-router", "deletionTimestamp": timestamp(world.now)}
        labels = router["metadata"]["labels"]
        world.pods["a-router"] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"namespace": "default", "uid": "a-router", "labels": labels, **metadata},
            "spec": router["spec"]["template"]["spec"],
            "status": {"phase": "Running"},
        }
    observed, memo = world.observed(), Memo()
    plans = []
    for moment in MOMENTS:
        now = world.now + moment
        plans.append(make_plan(seen_again(observed), now, memo))
        assert plans[-1] == make_plan(observed, now), f"after {moment} s"
    steps = [plan.steps for plan in plans]
    assert (steps[0] != steps[-1]) == (tls == "Enabled" or trouble == "pod ends")
    if trouble == "router ends":
        assert plans[0].routed == plans[-1].routed  # all of them are in the newest template


@pytest.mark.parametrize("accepted", [True, False])
def test_a_pod_that_ends_is_looked_at_when_it_counts_as_lost(accepted: bool) -> None:
    """No event tells of that moment."""
    world = at_rest(1)
    if not accepted:
        world.edit(engine={"blockSize": -1})
    name = world.leaders("prefill")[0].pod()
    world.pods[name]["metadata"]["deletionTimestamp"] = timestamp(world.now)
    world.cluster["status"] = make_plan(world.observed(), world.now).status
    plan, moment = make_plan(world.observed(), world.now), 0.0
    while moment <= LOST_SECONDS:
        assert plan.requeue_after is not None
        moment += plan.requeue_after
        plan = make_plan(world.observed(), world.now + moment)
    assert moment <= LOST_SECONDS + 10
    assert lost_pods(world.observed().pods, world.now + moment) == {name}


def test_each_part_of_what_is_observed_is_an_input() -> None:
    """A plan after any change is the one that remembers nothing, and so is the next."""
    world, memo = at_rest(2), Memo()
    whole = world.observed()
    less = {
        "children": whole.children[1:],
        "pods": whole.pods[1:],
        "engines": dict(list(whole.engines.items())[1:]),
        "links": {},
        "connectors": (),
        "ticket_key": None,
        "place": Place("elsewhere", host_path_models=False, one_node=True),
        "pod_groups": False,
        "unread": True,
        "cluster": {**whole.cluster, "status": {}},
    }
    for part, value in less.items():
        for observed in (whole, replace(whole, **{part: value}), whole):
            for _ in range(2):
                plan = make_plan(seen_again(observed), world.now, memo)
                assert plan == make_plan(observed, world.now), part
