"""What does not change is parsed, rendered and hashed once. Work is counted, time is not."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import simulated_cluster
from simulated_cluster import CheckedMemo, SimulatedCluster, manifest

from pdcluster_operator.plan import connectors, planner
from pdcluster_operator.plan.builders import engine_objects
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.objects import drift
from pdcluster_operator.plan.observed import links
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.rollout import revisions, targets, wanted_children
from pdcluster_operator.plan.types import Apply, TryOut


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of everything that is dear."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **named)

        return call

    for module, name in (
        (planner, "check_manifest"),
        (drift, "rewrite_of"),
        (revisions, "pairing_key"),
        (targets, "build_engine_pod"),
        (engine_objects, "build_engine_statefulset"),
        (connectors, "build_connector_configmap"),
        (wanted_children, "stamped"),
        (links, "_pair"),
        (json, "dumps"),
        (base64, "b64encode"),
    ):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    connectors._base64.cache_clear()
    return counts


def settled(prefill: int = 1, decode: int = 1) -> SimulatedCluster:
    world = SimulatedCluster(manifest(prefill={"replicas": prefill}, decode={"replicas": decode}))
    world.settle()
    world.run_pods()
    world.speak()
    world.link()
    world.settle()
    return world


def test_a_stored_revision_that_somebody_deleted_is_stored_again() -> None:
    """Nothing else has changed. A plan is compared with one that remembers nothing."""
    world = settled()
    [gone, _] = [key for key in world.children if key[0] == "ControllerRevision"]
    del world.children[gone]
    [step] = world.plan().steps
    assert (step.manifest["kind"], step.manifest["metadata"]["name"]) == gone


def test_a_plan_at_rest_renders_and_hashes_nothing(work: Counter[str]) -> None:
    world = settled(3, 3)
    memo = Memo()
    first = make_plan(world.observed(), world.now, memo)
    assert first.steps == ()
    for _ in range(5):
        work.clear()
        assert make_plan(world.observed(), world.now, memo) == first
        assert not work


def test_a_changed_spec_is_rendered_once(work: Counter[str]) -> None:
    world = settled()
    memo = Memo()
    make_plan(world.observed(), world.now, memo)
    world.cluster["spec"]["router"] = {"replicas": 2}
    world.cluster["metadata"]["generation"] += 1
    work.clear()
    for _ in range(3):
        steps = make_plan(world.observed(), world.now, memo).steps
        assert "Deployment" in {step.manifest["kind"] for step in steps}  # type: ignore[union-attr]
    assert work["check_manifest"] == 1
    assert work["build_engine_pod"] == work["pairing_key"] == 0, "engines are as they are stored"
    assert work["build_engine_statefulset"] == 2
    assert work["b64encode"] == 0, "the connector is the same"


def test_another_revision_is_rendered_once(work: Counter[str]) -> None:
    world = settled()
    memo = Memo()
    make_plan(world.observed(), world.now, memo)
    world.cluster["spec"]["engine"] = {"blockSize": 32}
    world.cluster["metadata"]["generation"] += 1
    work.clear()
    make_plan(world.observed(), world.now, memo)
    once = dict(work)
    assert once["build_engine_pod"] > 0
    for _ in range(3):
        make_plan(world.observed(), world.now, memo)
    assert work["build_engine_pod"] == once["build_engine_pod"]
    assert work["stamped"] == once.get("stamped", 0)


def test_a_new_cluster_is_hashed_once(work: Counter[str]) -> None:
    world = SimulatedCluster(manifest())
    memo = Memo()
    steps = make_plan(world.observed(), world.now, memo).steps
    children = [step for step in steps if isinstance(step, Apply | TryOut)]
    assert work["stamped"] == len(children) - 1, "all but the connector, which is shared"
    for step in steps:
        world.perform(step)
    work.clear()
    assert make_plan(world.observed(), world.now, memo).steps == ()
    assert work["build_engine_statefulset"] == 2, "now the revisions are stored"
    assert work["stamped"] == 0


def test_a_link_that_fails_renders_and_hashes_no_child(work: Counter[str]) -> None:
    world = settled(4, 4)
    memo = Memo()
    make_plan(world.observed(), world.now, memo)
    work.clear()
    world.links.pop(world.leaders("decode")[0].logical)
    plan = make_plan(world.observed(), world.now, memo)
    rendered = {"check_manifest", "build_engine_pod", "build_engine_statefulset", "stamped"}
    assert not work.keys() & rendered
    assert plan == make_plan(world.observed(), world.now)


def test_a_child_that_somebody_changed_is_applied_again_alone(work: Counter[str]) -> None:
    world = settled(2, 2)
    memo = Memo()
    make_plan(world.observed(), world.now, memo)
    name = next(key for key in world.children if key[0] == "Service")
    world.children[name]["spec"]["ports"][0]["port"] = 1
    work.clear()
    [step] = make_plan(world.observed(), world.now, memo).steps
    assert step.manifest["metadata"]["name"] == name[1]  # type: ignore[union-attr]
    assert work["stamped"] == 0


def test_a_memo_forgets_what_is_gone() -> None:
    memo = Memo()
    computed = []
    for _ in range(3):
        memo.get("a", (1,), computed.append)
        memo.forget_unused()
    memo.forget_unused()
    memo.get("a", (1,), computed.append)
    assert computed == [1, 1]


def test_what_depends_on_more_than_its_inputs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_cluster, "CHECKED", 100)
    memo, state = CheckedMemo(), [1]
    for _ in range(2):
        assert memo.get("a", (), lambda: state[0]) == 1
    state[0] = 2
    with pytest.raises(AssertionError, match="a depends on more than its inputs"):
        memo.get("a", (), lambda: state[0])


@pytest.mark.parametrize("checked", [25, 100])
def test_of_each_function_the_first_result_is_computed_again_and_a_share_of_the_others(
    monkeypatch: pytest.MonkeyPatch, checked: int
) -> None:
    monkeypatch.setattr(simulated_cluster, "CHECKED", checked)
    monkeypatch.setattr(CheckedMemo, "checked", set())
    memo, computed = CheckedMemo(), Counter[str]()
    for _ in range(2):
        for number in range(400):
            memo.get(("a", number), (), lambda: computed.update("a"))
    assert checked * 3 < computed["a"] - 400 <= checked * 5
    for _ in range(2):
        memo.get("b", (), lambda: computed.update("b"))
    assert computed["b"] == 2


def test_the_stamp_of_a_child_is_the_hash_of_what_is_wanted() -> None:
    world = settled()
    for child in world.children.values():
        bare = json.loads(json.dumps(child))
        stamp = bare["metadata"]["annotations"].pop("pdcluster.dev/applied")
        for field in ("uid", "resourceVersion", "managedFields"):
            bare["metadata"].pop(field)
        bare.pop("status")
        if not bare["metadata"]["annotations"]:
            del bare["metadata"]["annotations"]
        assert drift.stamped(bare)["metadata"]["annotations"]["pdcluster.dev/applied"] == stamp
