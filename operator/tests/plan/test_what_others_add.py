"""What others add to our objects, and objects of theirs beside them, decide nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from simulated_cluster import START, SimulatedCluster, copied, manifest, verified_link

from pdcluster_connector.protocol.launcher_documents import EngineReport, EngineState, LinksReport
from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.plan.objects.drift import rewritten_event
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.types import Observed, Plan, Rewrite

GONE = "default.llama.prefill.gone1.0"
STUCK = {
    "name": "agent",
    "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
    "lastState": {"terminated": {"exitCode": 7, "message": "the agent died"}},
}
THEIRS = {
    "type": "example.com/Checked",
    "status": "False",
    "reason": "NotChecked",
    "message": "somebody else's condition",
    "lastTransitionTime": timestamp(START - 10_000),
}
PASSED = {"type": "Initialized", "status": "True", "lastTransitionTime": timestamp(START)}


def _metadata(live: dict[str, Any]) -> None:
    metadata = live["metadata"]
    metadata["labels"] = {"a.example": "x", **(metadata.get("labels") or {}), "z.example": "x"}
    metadata["annotations"] = {"a.example": "x", **(metadata.get("annotations") or {})}
    metadata["finalizers"] = ["example.com/keep"]


def _pod(pod: dict[str, Any], *, first: bool) -> dict[str, Any]:
    pod = copied(pod)
    _metadata(pod)
    status = pod.setdefault("status", {})
    for field, added in (("containerStatuses", [STUCK]), ("conditions", [THEIRS, PASSED])):
        held = list(status.get(field) or ())
        status[field] = [*added, *held] if first else [*held, *added]
    containers = pod.get("spec", {}).get("containers")
    if containers:
        pod["spec"]["containers"] = [*containers, {"name": "agent", "image": "agent"}]
    return pod


def _child(child: dict[str, Any]) -> dict[str, Any]:
    child = copied(child)
    _metadata(child)
    child.setdefault("status", {})["conditions"] = [THEIRS]
    return child


def _stranger(name: str) -> dict[str, Any]:
    """A pod that somebody runs under the cluster's label, for example to look for a fault."""
    labels = {"pdcluster.dev/cluster": "llama", "app.kubernetes.io/component": "debug"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "uid": name, "labels": labels,
                     "deletionTimestamp": timestamp(START)},
        "spec": {"containers": [{"name": "engine"}]},
        "status": {"containerStatuses": [{**STUCK, "name": "engine"}]},
    }  # fmt: skip


def _links(links: LinksReport) -> LinksReport:
    """A launcher may still tell of a peer that was deleted."""
    rest = verified_link(GONE, f"{GONE}/0123456789abcdef")
    return structs.replace(links, links=(rest, *links.links, rest))


def adorned(observed: Observed, *, first: bool) -> Observed:
    cluster = copied(observed.cluster)
    _metadata(cluster)
    if "status" in cluster:
        held = cluster["status"]["conditions"]
        cluster["status"]["conditions"] = [THEIRS, *held] if first else [*held, THEIRS]
    pods = [_pod(pod, first=first) for pod in observed.pods]
    gone = EngineReport(
        ready=True, engine=GONE, engine_id=f"{GONE}/0123456789abcdef", state=EngineState.READY
    )
    return replace(
        observed,
        cluster=cluster,
        children=tuple(map(_child, observed.children)),
        pods=(_stranger("a-debug"), *pods, _stranger("z-debug")),
        engines={GONE: gone, **observed.engines},
        links={name: _links(links) for name, links in observed.links.items()},
    )


class Adorned(SimulatedCluster):
    """Compares each plan with that of the same objects after others have added to them."""

    def plan(self) -> Plan:
        plan = super().plan()
        for first in (True, False):
            other = make_plan(adorned(self.observed(), first=first), self.now)
            assert sorted(map(repr, other.steps)) == sorted(map(repr, plan.steps))
            assert _ours(other) == _ours(plan)
            assert (other.peers, other.routed) == (plan.peers, plan.routed)
        return plan


def _ours(plan: Plan) -> dict[str, Any]:
    conditions = [one for one in plan.status["conditions"] if one["type"] != THEIRS["type"]]
    return {**plan.status, "conditions": conditions}


def up(**spec: Any) -> Adorned:
    world = Adorned(manifest(**spec))
    world.bring_up()
    return world


def test_in_a_rollout() -> None:
    world = up(decode={"replicas": 2})
    world.children["ServiceAccount", "left-over"] = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "left-over", "namespace": "default", "uid": "7",
                     "resourceVersion": "7"},
    }  # fmt: skip
    world.edit(decode={"replicas": 2, "engine": {"env": [{"name": "A", "value": "1"}]}})
    for turn in range(6):
        world.step()
        if turn % 2:
            world.others_act()
    world.edit(decode={"replicas": 1})
    for _ in range(4):
        world.step()
        world.others_act()
    assert ("ServiceAccount", "left-over") not in world.children
    assert world.condition("Ready")["status"] == "True"


def test_in_trouble() -> None:
    world = up(prefill={"parallelism": {"tensor": 2, "nodes": 2}}, decode={"replicas": 1})
    since = timestamp(world.now)
    stuck = {"name": "engine", "state": {"waiting": {"reason": "ErrImagePull"}}}
    dead = {"name": "engine", "state": {"terminated": {"exitCode": 1}}}
    homeless = {"type": "PodScheduled", "status": "False", "lastTransitionTime": since}
    for trouble in (
        {"containerStatuses": [stuck]},
        {"containerStatuses": [dead]},
        {"containerStatuses": [], "conditions": [homeless]},
    ):
        for name in list(world.pods):
            before = copied(world.pods[name]["status"])
            world.pods[name]["status"] |= {"conditions": [{"type": "Ready", "status": "False"}]}
            world.pods[name]["status"] |= copied(trouble)
            world.step()
            world.pods[name]["status"] = before
    for name in list(world.pods):
        del world.pods[name]
        world.step()
    world.engines.clear()
    world.links.clear()
    world.step()


@pytest.mark.parametrize(
    ("fields", "shown"),
    [("ab", "a, b."), ("abcde", "a, b, c, d, e."), ("abcdef", "a, b, c, d, e and 1 more.")],
)
def test_the_event_of_a_rewrite_names_five_fields_and_counts_the_others(
    fields: str, shown: str
) -> None:
    wanted = {"kind": "StatefulSet", "metadata": {"name": "tiny-decode-abcde-0"}}
    event = rewritten_event(wanted, Rewrite("hash", tuple((path, "1") for path in fields)))
    assert event.type == "Warning"
    assert event.message.startswith("StatefulSet tiny-decode-abcde-0: something else, ")
    assert f"what the operator applies: {shown}" in event.message
