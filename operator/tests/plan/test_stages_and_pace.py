"""In which order steps are carried out, and when a status is written."""

from __future__ import annotations

import random

import pytest
from simulated_cluster import START, SimulatedCluster, manifest

from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.plan.planner import BUSY_SECONDS, make_plan
from pdcluster_operator.plan.renewals import DAY
from pdcluster_operator.plan.status.pace import (
    CROWD,
    LONGEST_SECONDS,
    QUIET_SECONDS,
    wait_before_writing,
)
from pdcluster_operator.plan.types import (
    Apply,
    Delete,
    Step,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
    stages,
)


def what(step: Step) -> str:
    if isinstance(step, Apply | WriteTicketKey | WriteCertificates):
        return str(step.manifest["kind"])
    return type(step).__name__


def test_what_makes_pods_comes_after_all_that_pods_need() -> None:
    secured = manifest(transfer={"device": "CPU", "tls": "Enabled"})
    steps = list(SimulatedCluster(secured).plan().steps)
    assert any(isinstance(step, WriteCertificates) for step in steps)
    gone = Delete("Service", "ns", "old", "u", "1", "a test")
    random.Random(7).shuffle(steps)
    trial = TryOut((), {"kind": "ControllerRevision"}, beside=False, why="a test")
    staged = stages([gone, trial, *steps])
    kinds = [{what(step) for step in stage} for stage in staged]
    assert kinds[0] == {
        "ConfigMap",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Secret",
        "Service",
        "ServiceAccount",
    }
    assert kinds[1:] == [{"TryOut"}, {"StatefulSet", "Deployment"}, {"Delete"}]
    assert sorted(map(id, (step for stage in staged for step in stage))) == sorted(
        map(id, [gone, trial, *steps])
    )


def test_no_steps_are_no_stages() -> None:
    assert stages([]) == []


def test_a_step_knows_whether_it_creates() -> None:
    world = SimulatedCluster(manifest())
    assert {step.uid for step in world.step().steps if isinstance(step, Apply)} == {""}
    name, service = next(item for item in world.children.items() if item[0][0] == "Service")
    service["spec"]["ports"][0]["port"] = 1
    [step] = world.plan().steps
    assert isinstance(step, Apply)
    assert (step.manifest["metadata"]["name"], step.uid) == (name[1], service["metadata"]["uid"])
    service["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    [step] = world.plan().steps
    assert isinstance(step, Apply)
    assert step.uid == "", "it must be looked at: it may be gone, or kept from going"


def status(
    ready: str = "False", message: str = "", generation: int = 1, reason: str = "Starting"
) -> dict[str, object]:
    conditions = [{"type": "Ready", "status": ready, "message": message, "reason": reason}]
    return {"observedGeneration": generation, "conditions": conditions}


@pytest.mark.parametrize(
    ("before", "after", "since_last", "wait"),
    [
        (None, status(), 0.0, 0.0),
        ({}, status(), 0.0, 0.0),
        (status(), status("True"), 0.0, 0.0),
        (status(), status(generation=2), 0.0, 0.0),
        (status(), status(reason="ImageUnavailable"), 0.0, 0.0),
        (status(reason="Forbidden"), status(reason="NameConflict"), 0.0, 0.0),
        (status(), status(reason="LoadingWeights"), 0.0, QUIET_SECONDS),
        (status(), status(message="1 of 2 pods"), 0.25, QUIET_SECONDS - 0.25),
        (status(), status(message="1 of 2 pods"), QUIET_SECONDS, 0.0),
        (status(), status(message="1 of 2 pods"), float("inf"), 0.0),
    ],
)
def test_a_flip_is_written_at_once_and_a_burst_once(
    before: object, after: dict[str, object], since_last: float, wait: float
) -> None:
    assert wait_before_writing(before, after, since_last) == wait


def conditions(reason: str = "Starting", **statuses: str) -> dict[str, object]:
    """Of a new cluster, but for these."""
    of_new = {"Accepted": "True", "PrefillReady": "False", "KVLinksEstablished": "Unknown"}
    of_new |= {"Available": "False", "Progressing": "True", "Ready": "False"}
    found = [
        {"type": kind, "status": value, "reason": reason}
        for kind, value in (of_new | statuses).items()
    ]
    return {"observedGeneration": 1, "conditions": found}


@pytest.mark.parametrize(
    ("after", "news"),
    [
        (conditions(PrefillReady="True"), False),
        (conditions(PrefillReady="Unknown"), False),
        (conditions(KVLinksEstablished="True"), False),
        (conditions(Ready="Unknown", Available="Unknown"), False),
        (conditions(KVLinksEstablished="False"), True),
        (conditions(Available="True"), True),
        (conditions(Ready="True"), True),
        (conditions(Progressing="False"), True),
        (conditions(Accepted="False"), True),
        (conditions("ImageUnavailable"), True),
    ],
)
def test_what_nobody_waits_for_waits_longer_in_a_crowd(
    after: dict[str, object], news: bool
) -> None:
    for before in (conditions(), None, {}):
        wait = wait_before_writing(before, after, 1.0, 30)
        assert wait == (0.0 if news else 29.0), before
        assert wait_before_writing(before, after, 0.0, 1000) == (0.0 if news else LONGEST_SECONDS)
    assert wait_before_writing(conditions(), after, 0.0, 2) == (0.0 if news else QUIET_SECONDS)


def test_the_first_status_of_a_cluster_waits_only_in_a_crowd() -> None:
    assert wait_before_writing(None, conditions(), 0.0, CROWD - 1) == 0.0
    assert wait_before_writing(None, conditions(), 0.0, CROWD) > 0.0
    assert wait_before_writing(None, conditions(), LONGEST_SECONDS, 1000) == 0.0


def test_a_cluster_on_its_way_is_looked_at_when_its_deadline_comes() -> None:
    world = SimulatedCluster(manifest(rollout={"progressDeadlineSeconds": 60}))
    assert world.step().requeue_after == BUSY_SECONDS
    world.now = START + 57
    after = make_plan(world.observed(), world.now).requeue_after
    assert after is not None
    assert 3.0 <= after <= 5.0
    world.now = START + 100
    assert world.plan().requeue_after == BUSY_SECONDS


@pytest.mark.parametrize("after", [51, 57, 60])
@pytest.mark.parametrize("created", [0, 30])
def test_the_look_at_a_deadline_is_within_a_second_of_it(after: int, created: int) -> None:
    """Nothing else would tell that it is over. It counts from the newest engine."""
    world = SimulatedCluster(manifest(rollout={"progressDeadlineSeconds": 60}))
    world.step()
    for (kind, _), child in world.children.items():
        if kind == "StatefulSet":
            child["metadata"]["creationTimestamp"] = timestamp(START + created)
    world.now = START + created + after
    wait = world.plan().requeue_after
    assert wait is not None
    world.now += wait
    world.step()
    assert world.now - 1 <= START + created + 61
    assert world.condition("Progressing")["reason"] == "ProgressDeadlineExceeded"


def test_a_spec_that_is_refused_is_not_looked_at_again_and_again() -> None:
    """It changes only when somebody changes it. Certificates are due one day."""
    world = SimulatedCluster(manifest(decode={"replicas": -1}))
    wait = world.plan().requeue_after
    assert wait is None or wait > DAY
    accepted = SimulatedCluster(manifest()).plan().requeue_after
    assert accepted is not None
    assert accepted < DAY
