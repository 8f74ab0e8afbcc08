"""An engine of several pods of which only some fit gives its nodes back."""

from __future__ import annotations

import pytest
from simulated_cluster import SimulatedCluster, brought_up, manifest

from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.api.object_names import RELEASED_ANNOTATION, RELEASED_BECAUSE_ANNOTATION
from pdcluster_operator.plan import children

TIMEOUT = 100
WORDS = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def world_of(engines: int, nodes: int = 2) -> SimulatedCluster:
    world = SimulatedCluster(
        manifest(
            prefill={"replicas": engines, "parallelism": {"tensor": nodes, "nodes": nodes}},
            rollout={"scheduleTimeoutSeconds": TIMEOUT},
        )
    )
    world.step()
    schedule(world)
    return world


def schedule(world: SimulatedCluster, *, room: bool = False) -> None:
    """Do the scheduler's work: each leading pod has a node, followers only if there is room."""
    world.make_pods()
    for name, pod in world.pods.items():
        if pod["spec"].get("nodeName"):
            continue
        if room or name.endswith("-0"):
            pod["spec"]["nodeName"] = "node"
            pod["status"] = {"phase": "Pending"}
        elif not pod["status"].get("conditions"):
            waiting = {"type": "PodScheduled", "status": "False", "message": WORDS,
                       "lastTransitionTime": timestamp(world.now)}  # fmt: skip
            pod["status"] = {"phase": "Pending", "conditions": [waiting]}


def sizes(world: SimulatedCluster) -> list[int]:
    return [
        child["spec"]["replicas"]
        for (kind, name), child in sorted(world.children.items())
        if kind == "StatefulSet" and "-prefill-" in name
    ]


def step(world: SimulatedCluster, seconds: float) -> None:
    """Let time pass, and let the StatefulSets' controller delete the pods that are too many."""
    world.now += seconds
    world.step()
    for (kind, name), child in world.children.items():
        if kind == "StatefulSet" and child["spec"]["replicas"] == 0:
            world.pods = {pod: it for pod, it in world.pods.items() if not pod.startswith(name)}


def test_a_half_scheduled_engine_is_released_with_the_reason_and_tried_again() -> None:
    world = world_of(1)
    step(world, TIMEOUT - 5)
    assert sizes(world) == [2]
    step(world, 10)
    assert sizes(world) == [0]
    step(world, 5)
    condition = world.condition("PrefillReady")
    assert condition["reason"] == "Unschedulable"
    assert WORDS in condition["message"]
    assert "scheduled within 100 s" in condition["message"]
    assert world.plan().steps == (), "it is written once"
    for _ in range(20):
        step(world, 10)
    assert sizes(world) == [2], "after one to two timeouts"
    [engine] = [c for (kind, name), c in world.children.items()
                if kind == "StatefulSet" and "-prefill-" in name]  # fmt: skip
    assert RELEASED_ANNOTATION not in engine["metadata"].get("annotations", {})
    schedule(world, room=True)
    world.run_pods()
    world.speak()
    world.step()
    assert world.condition("PrefillReady")["status"] == "True"


def test_an_engine_whose_pods_take_long_to_end_is_released_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(children.zlib, "crc32", lambda _: 90)  # a pause of 1.9 timeouts
    world = world_of(1)
    world.now += TIMEOUT + 5
    world.step()
    assert sizes(world) == [0]

    def moment() -> str | None:
        [engine] = [c for (kind, name), c in world.children.items()
                    if kind == "StatefulSet" and "-prefill-" in name]  # fmt: skip
        return engine["metadata"]["annotations"].get(RELEASED_ANNOTATION)

    first = moment()
    # The API server promises no order of what it lists.
    world.children = dict(reversed(world.children.items()))
    for _ in range(9):
        world.now += TIMEOUT / 5
        world.step()
        assert (sizes(world), moment()) == ([0], first)


YEAR = 365 * 86_400.0


def test_a_release_by_a_clock_that_was_ahead_ends_when_the_clock_is_right_again() -> None:
    world = world_of(1)
    world.now += YEAR
    step(world, TIMEOUT + 5)
    assert sizes(world) == [0]
    world.now -= YEAR
    step(world, 1)
    assert sizes(world) == [2]
    step(world, 1)
    assert world.plan().steps == ()


def test_an_engine_whose_pods_serve_is_ready_whatever_its_mark_says() -> None:
    """Somebody restored an old mark, and scaled the engine to 0: its pods serve until they end."""
    world = brought_up(decode={"replicas": 1})
    [engine] = [it for (kind, name), it in world.children.items()
                if kind == "StatefulSet" and "-decode-" in name]  # fmt: skip
    engine["spec"]["replicas"] = 0
    engine["metadata"]["annotations"] |= {
        RELEASED_ANNOTATION: timestamp(world.now - 5.0),
        RELEASED_BECAUSE_ANNOTATION: "of another day",
    }
    world.step()
    assert world.condition("DecodeReady")["status"] == "True"
    assert world.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("ahead", [-YEAR, -5.0, 5.0, YEAR])
def test_a_mark_on_an_engine_that_has_its_pods_decides_nothing(ahead: float) -> None:
    world = world_of(1)
    schedule(world, room=True)
    world.run_pods()
    world.speak()
    world.step()
    [engine] = [c for (kind, name), c in world.children.items()
                if kind == "StatefulSet" and "-prefill-" in name]  # fmt: skip
    engine["metadata"]["annotations"][RELEASED_ANNOTATION] = timestamp(world.now + ahead)
    for _ in range(3):
        step(world, 1)
        assert sizes(world) == [2]
    assert world.condition("PrefillReady")["status"] == "True"


def test_of_two_that_hold_each_others_nodes_one_gives_way() -> None:
    world = world_of(2)
    step(world, TIMEOUT + 5)
    assert sizes(world) == [2, 0], "one at a time: the other may now get what it held"
    step(world, TIMEOUT / 2)
    assert sizes(world) == [2, 0]
    for pod in world.pods.values():
        pod["spec"]["nodeName"] = "node"
        pod["status"] = {"phase": "Pending"}
    step(world, TIMEOUT)
    assert sizes(world)[0] == 2


def test_each_timeout_one_more_is_released() -> None:
    world = world_of(2)
    step(world, TIMEOUT + 5)
    assert sizes(world) == [2, 0]
    step(world, TIMEOUT - 1)  # and one second that each step takes
    assert sizes(world) == [2, 0], "the other has the whole of a timeout"
    step(world, 1)
    assert sizes(world)[0] == 0


@pytest.mark.parametrize("node", [1, 2, 3])
def test_the_pod_that_waits_longest_counts(node: int) -> None:
    world = world_of(1, nodes=4)
    [engine] = world.leaders("prefill")
    late = world.pods[engine.pod(node)]
    late["status"]["conditions"][0]["lastTransitionTime"] = timestamp(world.now + TIMEOUT)
    step(world, TIMEOUT + 5)
    assert sizes(world) == [0]


@pytest.mark.parametrize("moment", [None, "", "yesterday", 7])
def test_a_pod_that_does_not_say_since_when_it_waits_does_not_count(moment: object) -> None:
    world = world_of(1)
    [engine] = world.leaders("prefill")
    [waiting] = world.pods[engine.pod(1)]["status"]["conditions"]
    waiting["lastTransitionTime"] = moment
    step(world, 10 * TIMEOUT)
    assert sizes(world) == [2]
    del waiting["lastTransitionTime"]
    step(world, 10 * TIMEOUT)
    assert sizes(world) == [2]


def test_an_engine_that_fits_nowhere_holds_nothing_and_is_left_waiting() -> None:
    world = world_of(1)
    for pod in world.pods.values():
        pod["spec"].pop("nodeName", None)
    step(world, 10 * TIMEOUT)
    assert sizes(world) == [2]


def test_an_engine_whose_pods_all_have_nodes_may_start_slowly() -> None:
    """Its pods are not ready for longer than the timeout, and that has nothing to do with nodes."""
    world = world_of(1)
    schedule(world, room=True)
    for pod in world.pods.values():
        pod["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(world.now)},
            {"type": "Ready", "status": "False", "lastTransitionTime": timestamp(world.now)},
        ]
    step(world, 10 * TIMEOUT)
    assert sizes(world) == [2]


def test_an_engine_of_one_pod_is_never_released() -> None:
    world = world_of(3, nodes=1)
    step(world, 10 * TIMEOUT)
    assert sizes(world) == [1, 1, 1]


def test_the_time_in_a_queue_is_none_in_which_an_engine_holds_nodes() -> None:
    """PodScheduled is False while a pod has a gate, too, and keeps its moment after that."""
    world = world_of(1)
    for pod in world.pods.values():
        gated = {"type": "PodScheduled", "status": "False", "message": WORDS,
                 "lastTransitionTime": timestamp(world.now)}  # fmt: skip
        pod["spec"].pop("nodeName", None)
        pod["status"] = {"phase": "Pending", "conditions": [gated]}
    step(world, 10 * TIMEOUT)
    assert sizes(world) == [2]
    first = next(pod for name, pod in world.pods.items() if "-prefill-" in name)
    first["spec"]["nodeName"] = "node"
    first["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(world.now)}
    ]
    step(world, TIMEOUT - 5)
    assert sizes(world) == [2]
    step(world, 10)
    assert sizes(world) == [0]


def test_an_engine_holds_nodes_since_its_first_pod_has_one() -> None:
    world = world_of(1, nodes=3)
    [engine] = world.leaders("prefill")
    began = world.now
    for node, moment in ((1, TIMEOUT - 10), (0, 0)):
        pod = world.pods[engine.pod(node)]
        pod["spec"]["nodeName"] = "node"
        pod["status"]["conditions"] = [
            {
                "type": "PodScheduled",
                "status": "True",
                "lastTransitionTime": timestamp(began + moment),
            }
        ]
    step(world, TIMEOUT - 5)
    assert sizes(world) == [3]
    step(world, 10)
    assert sizes(world) == [0]
