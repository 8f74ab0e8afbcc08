"""Why a pod does not run, from a status of any shape."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.api.conditions import StatusReason, no
from pdcluster_operator.plan.observed.pods import (
    describe_end,
    is_pod_ready,
    pod_trouble,
    previous_end,
    started_again,
)

NOT_CREATED = no(StatusReason.CONTAINER_CREATING, "the container is not created yet")


def waiting(reason: str = "", message: str = "", name: str = "engine", **last: Any) -> Any:
    """Return a pod whose container waits, and whose process before ended as in ``last``."""
    given = {"reason": reason, "message": message}
    state = {"waiting": {key: text for key, text in given.items() if text}}
    container = {"name": name, "state": state, "lastState": {"terminated": last} if last else {}}
    return {"metadata": {"name": "p"}, "status": {"containerStatuses": [container]}}


@pytest.mark.parametrize(
    "pod",
    [
        {},
        {"metadata": None, "spec": None, "status": None},
        {"metadata": "text", "status": "text"},
        {"metadata": {"labels": None}, "spec": {"schedulingGates": None, "schedulingGroup": None}},
        {"status": {"conditions": None, "containerStatuses": None}},
        {"status": {"containerStatuses": [{}, {"name": "somebody-elses"}]}},
    ],
)
def test_a_pod_of_which_nothing_is_known_waits_for_its_container(pod: dict[str, Any]) -> None:
    assert pod_trouble(pod) == NOT_CREATED
    assert not is_pod_ready(pod)
    assert previous_end(pod) == ""


def test_a_container_without_a_state_is_in_no_trouble() -> None:
    """The kubelet leaves out what it does not know."""
    for state in ({}, {"state": None, "lastState": None}, {"state": {"running": {}}}):
        pod = {"status": {"containerStatuses": [{"name": "engine", **state}]}}
        assert pod_trouble(pod) is None
        assert previous_end(pod) == ""
    assert pod_trouble(waiting()) == no(StatusReason.CONTAINER_CREATING, "")


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("ImagePullBackOff", StatusReason.IMAGE_UNAVAILABLE),
        ("ErrImagePull", StatusReason.IMAGE_UNAVAILABLE),
        ("InvalidImageName", StatusReason.IMAGE_UNAVAILABLE),
        ("ErrImageNeverPull", StatusReason.IMAGE_UNAVAILABLE),
        ("CreateContainerConfigError", StatusReason.POD_CONFIG_ERROR),
        ("CreateContainerError", StatusReason.POD_CONFIG_ERROR),
        ("RunContainerError", StatusReason.POD_CONFIG_ERROR),
        ("StartError", StatusReason.POD_CONFIG_ERROR),
        ("ContainerCreating", StatusReason.CONTAINER_CREATING),
        ("PodInitializing", StatusReason.CONTAINER_CREATING),
    ],
)
def test_what_the_kubelet_calls_it_has_a_reason_of_ours(reason: str, shown: StatusReason) -> None:
    assert pod_trouble(waiting(reason, "why")) == no(shown, f"{reason}: why")
    assert pod_trouble(waiting(reason)) == no(shown, reason)


@pytest.mark.parametrize("name", ["engine", "router"])
def test_a_container_that_is_held_back_after_its_end_says_how_it_ended(name: str) -> None:
    """Without that, the kubelet's message is told, and without a message its reason."""
    back_off, message = "CrashLoopBackOff", "back-off 40s restarting failed container"
    for pod, words in (
        (waiting(back_off, message, name, exitCode=3), f"the {name} died: exit code 3"),
        (waiting(back_off, message, name), message),
        (waiting(back_off, name=name), back_off),
    ):
        assert pod_trouble(pod) == no(StatusReason.ENGINE_FAILED, words)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"exitCode": 1, "reason": "Error"}, "exit code 1"),
        ({"exitCode": 0, "reason": "Completed"}, "exit code 0"),
        ({"exitCode": 1}, "exit code 1"),
        ({"exitCode": 137, "reason": "ContainerStatusUnknown", "message": None},
         "exit code 137, ContainerStatusUnknown"),
        ({"exitCode": 1, "message": "ValueError: no parameter 'morm'; there are " + 600 * "a"},
         f"ValueError: no parameter 'morm'; there are {468 * 'a'}… (exit code 1)"),
        ({"exitCode": 1, "message": 600 * "b" + "\nINFO\nno port"}, "INFO\nno port (exit code 1)"),
        ({"exitCode": 137, "reason": "Error"}, "killed by SIGKILL (exit code 137)"),
        ({"exitCode": 137, "reason": "Error", "message": "INFO: GET /metrics\n"},
         "killed by SIGKILL: its log ends with INFO: GET /metrics (exit code 137)"),
        ({"exitCode": 137, "message": "vLLM's API server was killed by SIGKILL"},
         "vLLM's API server was killed by SIGKILL (exit code 137)"),
        ({"exitCode": 137, "message": "out of memory: the kernel killed vLLM's API server"},
         "out of memory: the kernel killed vLLM's API server (exit code 137)"),
        ({"exitCode": 1, "reason": "Error", "message": "\nno such model \n"},
         "no such model (exit code 1)"),
    ],
)  # fmt: skip
def test_how_a_process_ended_is_told_with_its_last_words(end: dict[str, Any], words: str) -> None:
    """Its reason is told where it says more than that the process ended."""
    assert describe_end(end) == words


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("", "starting again; its last process ended: exit code 3"),
        ("starting vLLM", "starting again; its last process ended: exit code 3"),
        ("shard 1 of 2", "shard 1 of 2; started again; its last process ended: exit code 3"),
    ],
)
def test_a_start_after_an_end_is_told_as_one(message: str, words: str) -> None:
    assert started_again(waiting(exitCode=3), message) == words
    assert started_again(waiting(), message) == message


@pytest.mark.parametrize(
    ("conditions", "ready"),
    [
        ([("Ready", "True")], True),
        ([("Initialized", "True"), ("Ready", "False")], False),
        ([("PodScheduled", "True"), ("ContainersReady", "True")], False),
        ([("Ready", "Unknown")], False),
        ([("DisruptionTarget", "False"), ("Ready", "True")], True),
    ],
)
def test_a_pod_is_ready_if_its_condition_of_that_name_is_true(
    conditions: list[tuple[str, str]], ready: bool
) -> None:
    found = [{"type": kind, "status": status} for kind, status in conditions]
    assert is_pod_ready({"status": {"conditions": found}}) is ready


@pytest.mark.parametrize(
    ("conditions", "refused"),
    [
        ([("PodScheduled", "False")], True),
        ([("PodScheduled", "True")], False),
        ([("Initialized", "False")], False),
        ([("Initialized", "False"), ("PodScheduled", "False")], True),
    ],
)
def test_only_the_scheduler_says_that_a_pod_fits_nowhere(
    conditions: list[tuple[str, str]], refused: bool
) -> None:
    found = [{"type": kind, "status": said, "message": kind} for kind, said in conditions]
    told = no(StatusReason.UNSCHEDULABLE, "PodScheduled") if refused else NOT_CREATED
    assert pod_trouble({"status": {"conditions": found}}) == told


def test_a_pod_that_has_its_node_waits_for_no_gang() -> None:
    spec = {"schedulingGroup": {"podGroupName": "llama-start-x"}}
    waits = "waits for nodes together with the other pods of PodGroup llama-start-x"
    assert pod_trouble({"spec": spec}) == no(StatusReason.CONTAINER_CREATING, waits)
    assert pod_trouble({"spec": {**spec, "nodeName": "node"}}) == NOT_CREATED


def test_one_gate_of_kueue_is_enough_to_name_its_queue() -> None:
    ours, theirs = {"name": "kueue.x-k8s.io/admission"}, {"name": "example.com/license"}
    labels = {"kueue.x-k8s.io/queue-name": "team-a", "kueue.x-k8s.io/pod-group-name": "w"}
    for gates in ([ours], [ours, theirs], [theirs, ours]):
        pod = {"metadata": {"labels": labels}, "spec": {"schedulingGates": gates}}
        found = pod_trouble(pod)
        assert found is not None
        assert found.reason is StatusReason.SCHEDULING_GATED
        assert "LocalQueue team-a; kubectl describe workloads.kueue.x-k8s.io w " in found.message
    unlabelled = pod_trouble({"metadata": {"labels": None}, "spec": {"schedulingGates": [ours]}})
    assert unlabelled is not None
    assert "waits until Kueue admits it" in unlabelled.message
    pod = {"spec": {"schedulingGates": [theirs, {"name": "example.com/quota"}]}}
    words = f"waits until somebody removes its scheduling gate {theirs['name']}, example.com/quota"
    assert pod_trouble(pod) == no(StatusReason.SCHEDULING_GATED, words)


def test_a_pod_that_is_being_deleted_drains_whatever_else_is_wrong() -> None:
    pod = waiting("ImagePullBackOff", "no such image")
    pod["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    assert pod_trouble(pod) == no(StatusReason.DRAINING, "is being deleted")
