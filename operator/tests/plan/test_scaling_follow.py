"""What becomes of the advice in a plan: the status, its writes, and the numbers that are set."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace
from simulated_cluster import SimulatedCluster, manifest
from test_prefill_scaler import scaler

from pdcluster_connector.protocol.launcher_documents import EngineState
from pdcluster_connector.protocol.load_report import LoadReport
from pdcluster_operator.api.conditions import own_status
from pdcluster_operator.api.schema.crd import crd
from pdcluster_operator.plan.scaling import follow
from pdcluster_operator.plan.scaling.follow import role_load
from pdcluster_operator.plan.types import Plan

SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
Loads = Callable[[str], LoadReport]  # by role
TARGETS_MET = "ScalingTargetsMet"


def idle(_: str) -> LoadReport:
    return LoadReport(60)


def busy(role: str, gap: float = 0.02, share: float = 0.3, **more: float) -> LoadReport:
    """An engine that answers a request a second; decode has four requests in work."""
    given = {
        "busy_seconds": 60 * share, "requests": 60, "first_token_seconds": 60 * 0.3, "kv": 0.1,
        "running": 4, "receives": 60, "receive_seconds": 1.2, "received_bytes": 60e8,
    } | ({"tokens": 60_000} if role == "prefill" else {"tokens": 6000, "gaps": 6000})  # fmt: skip
    if role == "decode":
        given |= {"gap_seconds": 6000 * gap}
    return LoadReport(60, **(given | more))


def slow(role: str) -> LoadReport:
    return busy(role, gap=0.09)


def world(mode: str = "Apply", **spec: Any) -> SimulatedCluster:
    bounds = {"prefill": {"max": 4}, "decode": {"max": 6}, "ttftMs": 2000, "itlMs": 40}
    spec.setdefault("decode", {"replicas": 1})
    made = SimulatedCluster(manifest(autoscaling={**bounds, "mode": mode}, **spec))
    made.bring_up()
    return made


def minutes(
    made: SimulatedCluster, number: int, loads: Loads | None, *, come: bool = True
) -> list[Plan]:
    """Let so many minutes pass, in which each engine that serves does this."""
    plans = []
    for _ in range(number):
        made.now += 60
        serving = {one: report.engine for one, report in made.engines.items() if report.ready}
        made.loads = {one: loads(one.split(".")[2]) for one in serving} if loads else {}
        plans.append(made.step())
        if come:
            made.others_act()
            made.settle()
            made.others_act()
    return plans


def is_(made: SimulatedCluster, kind: str, status: str, reason: str) -> None:
    found = made.condition(kind)
    assert (found["status"], found["reason"]) == (status, reason), found
    assert found["observedGeneration"] == made.cluster["metadata"]["generation"]


def counts(made: SimulatedCluster) -> tuple[int, int]:
    return len(made.leaders("prefill")), len(made.leaders("decode"))


def test_with_apply_the_operator_sets_the_numbers_as_an_autoscaler_does() -> None:
    made = world()
    is_(made, "ScalingTargetsMet", "Unknown", "NotMeasured")
    minutes(made, 3, busy)
    is_(made, "ScalingTargetsMet", "True", "TargetsMet")
    assert made.cluster["status"]["scaling"]["limit"] == "None"
    minutes(made, 1, slow)
    assert made.cluster["spec"]["decode"]["replicas"] == 2, "at most twice as many at once"
    minutes(made, 1, slow)
    is_(made, "ScalingTargetsMet", "False", "MoreEnginesNeeded")
    minutes(made, 1, busy)
    assert counts(made) == (1, 4)
    assert made.cluster["status"]["scaling"]["decode"] == 4
    jsonschema.validate(json.loads(json.dumps(made.cluster)), SCHEMA)
    assert made.cluster["spec"].get("prefill") in (None, {}), "only decode was the limit"
    minutes(made, 40, idle)
    assert counts(made) == (1, 1)


def test_prefill_is_set_in_its_scaler() -> None:
    made = world()

    def loaded(role: str) -> LoadReport:
        return busy(role, share=0.95, waiting=5) if role == "prefill" else busy(role)

    minutes(made, 3, loaded)
    assert counts(made) == (1, 1)
    found = made.condition(TARGETS_MET)
    assert "there is no PrefillScaler with the name of this PDCluster" in found["message"]
    made.scaler = scaler(1)
    minutes(made, 1, loaded)
    assert made.scaler["spec"]["replicas"] == 2
    made.scaler["spec"]["maxPercentOfDecode"] = 200
    minutes(made, 5, loaded)
    assert counts(made) == (2, 1), "its own bounds hold"


def test_a_scaler_that_is_being_deleted_is_not_written() -> None:
    made = world()
    made.scaler = scaler(1)
    made.scaler["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    plans = minutes(made, 3, lambda role: busy(role, share=0.95, waiting=5))
    assert not any(scale.kind == "PrefillScaler" for plan in plans for scale in plan.scales)


def test_the_least_share_of_a_scaler_is_not_fought() -> None:
    made = world()
    bounds = made.cluster["spec"]["autoscaling"]
    made.edit(autoscaling={**bounds, "decode": {"min": 3, "max": 6}})
    made.scaler = scaler(1)
    made.scaler["spec"]["minPercentOfDecode"] = 100
    minutes(made, 4, idle)
    plans = minutes(made, 12, idle)
    assert made.cluster["status"]["scaling"]["prefill"] == 3
    assert counts(made) == (3, 3)
    assert not any(plan.scales for plan in plans)


def test_the_time_to_the_first_token_counts_in_both_engines() -> None:
    """Each engine takes 0.3 s for its part."""
    for target, outcome in ((1500, "True"), (550, "False")):
        made = world()
        made.edit(autoscaling={**made.cluster["spec"]["autoscaling"], "ttftMs": target})
        minutes(made, 3, busy)
        assert made.condition(TARGETS_MET)["status"] == outcome


def test_with_advise_it_only_says_so() -> None:
    made = world("Advise")
    plans = minutes(made, 4, slow)
    assert all(not plan.scales for plan in plans)
    assert counts(made) == (1, 1)
    assert made.cluster["status"]["scaling"]["decode"] == 2
    # An autoscaler that follows the advice is no stranger to it.
    made.edit(decode={"replicas": 2})
    minutes(made, 3, slow)
    assert made.cluster["status"]["scaling"]["decode"] == 4


def test_a_number_that_somebody_else_sets_stays_for_a_while() -> None:
    made = world()
    minutes(made, 8, busy)
    made.edit(decode={"replicas": 5})
    minutes(made, 13, busy)
    assert counts(made) == (1, 5)
    found = made.condition(TARGETS_MET)
    assert "somebody else has set the number of decode engines" in found["message"]
    minutes(made, 40, busy)
    assert counts(made) == (1, 2)


def test_engines_that_never_come_are_given_up_and_said() -> None:
    made = world()
    minutes(made, 30, slow, come=False)
    is_(made, "ScalingTargetsMet", "False", "EnginesDidNotCome")
    assert made.cluster["spec"]["decode"]["replicas"] == 1


@pytest.mark.parametrize("mode", ["Apply", "Advise"])
def test_engines_whose_launchers_cannot_be_reached_have_come(mode: str) -> None:
    made = world(mode, decode={"replicas": 6})
    minutes(made, 5, lambda role: busy(role, gap=0.035))
    made.engines.clear()
    made.links.clear()
    plans = minutes(made, 30, None, come=False)
    assert not any(plan.scales for plan in plans)
    assert made.cluster["status"]["scaling"]["decode"] == 6
    is_(made, TARGETS_MET, "Unknown", "NotMeasured")


def test_engines_that_cannot_be_measured_take_their_part_of_the_load() -> None:
    made = world(decode={"replicas": 6})
    minutes(made, 1, busy)
    for name in [one for one in made.engines if ".decode." in one][:4]:
        del made.engines[name]
    minutes(made, 1, lambda role: busy(role, gap=0.035), come=False)
    assert made.moments[-1].ready == (1, 6)
    minutes(made, 20, lambda role: busy(role, gap=0.035), come=False)
    assert made.cluster["spec"]["decode"]["replicas"] == 6


@pytest.mark.parametrize(("replicas", "gap"), [(2, 0.024), (6, 0.035)])
def test_an_engine_that_died_for_good_takes_no_other_one_with_it(replicas: int, gap: float) -> None:
    """The one that goes is the last one, which may serve."""
    made = world(decode={"replicas": replicas})
    dead = min(one for one in made.engines if ".decode." in one)
    number = next(n for n in made.leaders("decode") if n.logical == dead)

    def die() -> None:
        del made.engines[dead]
        pod = made.pods[number.pod()]
        pod["status"] = {"phase": "Pending"}

    minutes(made, 5, lambda role: busy(role, gap=0.035))
    die()
    minutes(made, 40, lambda role: busy(role, gap=gap), come=False)
    assert made.cluster["spec"]["decode"]["replicas"] == replicas
    is_(made, TARGETS_MET, "False", "EnginesDidNotCome")


def test_engines_that_load_large_weights_are_waited_for() -> None:
    made = world(decode={"replicas": 4})
    for name, report in made.engines.items():
        made.engines[name] = replace(report, ready=False, state=EngineState.LOADING_WEIGHTS)
    minutes(made, 60, busy, come=False)
    assert made.cluster["spec"]["decode"]["replicas"] == 4
    is_(made, TARGETS_MET, "Unknown", "NotMeasured")


def test_the_bounds_and_what_no_number_of_engines_changes_are_said() -> None:
    made = world(decode={"replicas": 6})
    minutes(made, 3, slow)
    is_(made, "ScalingTargetsMet", "False", "ScalingBounded")
    assert made.cluster["spec"]["decode"]["replicas"] == 6
    alone = world()
    minutes(alone, 3, lambda role: busy(role, gap=0.09, running=0.5))
    is_(alone, "ScalingTargetsMet", "False", "TargetsUnreachable")


def test_a_number_outside_of_the_bounds_is_corrected_without_measurements() -> None:
    made = world(decode={"replicas": 9})
    minutes(made, 2, None)
    assert made.cluster["spec"]["decode"]["replicas"] == 6


def test_only_engines_that_are_wanted_and_ready_are_measured() -> None:
    """llm-d-router #2529: the last metric of a pod that was gone kept its load for ever."""
    made = world()
    minutes(made, 2, busy)
    made.now += 60
    gone = "default.llama.decode.zzzzz.7"
    made.loads[gone] = slow("decode")
    plan = made.plan()
    assert plan.moments[-1].decode.engines == 1
    assert plan.status["scaling"]["limit"] == "None"
    decode = next(one for one in made.engines if ".decode." in one)
    del made.engines[decode]  # unreachable: the monitor may still hold its load
    assert made.plan().moments[-1].decode.engines == 0


def test_during_a_rollout_more_engines_may_come_and_none_goes() -> None:
    made = world(decode={"replicas": 3})
    minutes(made, 4, busy)
    made.edit(engine={"env": [{"name": "A", "value": "1"}]})
    plans = minutes(made, 10, busy, come=False)
    assert plans[-1].moments[-1].rolling
    assert not any(plan.scales for plan in plans)
    minutes(made, 1, slow, come=False)
    assert made.cluster["spec"]["decode"]["replicas"] == 6
    minutes(made, 60, busy)
    assert counts(made) == (1, 2), "and it ends, with fewer engines at last"


def test_a_spec_that_is_not_accepted_is_not_scaled() -> None:
    made = world()
    minutes(made, 2, busy)
    made.edit(autoscaling={"prefill": {"max": 2}, "decode": {"max": 2}})
    assert made.condition("Accepted")["status"] == "True"
    plans = minutes(made, 3, slow)
    is_(made, "Accepted", "False", "NoTarget")
    assert not any(plan.scales or plan.moments for plan in plans)


def test_without_autoscaling_there_is_nothing_of_it() -> None:
    made = SimulatedCluster(manifest())
    made.bring_up()
    plans = minutes(made, 2, slow)
    assert not any(plan.moments or plan.scales for plan in plans)
    assert "scaling" not in made.cluster["status"]
    assert TARGETS_MET not in {one["type"] for one in made.cluster["status"]["conditions"]}
    asked = world("Advise")
    minutes(asked, 3, busy)
    del asked.cluster["spec"]["autoscaling"]
    minutes(asked, 1, busy)
    assert "scaling" not in asked.cluster["status"]
    assert TARGETS_MET not in {one["type"] for one in asked.cluster["status"]["conditions"]}


def writes(made: SimulatedCluster, number: int, loads: Loads) -> int:
    """How many statuses of so many minutes differ from the one before."""
    changed = 0
    for _ in range(number):
        before = own_status(made.cluster["status"])
        minutes(made, 1, loads, come=False)
        changed += own_status(made.cluster["status"]) != before
    return changed


@pytest.mark.parametrize("loads", [idle, busy])
def test_rest_is_silent(loads: Loads) -> None:
    made = world()
    minutes(made, 20, loads)
    assert writes(made, 240, loads) == 0


def test_a_load_that_trembles_causes_no_writes() -> None:
    made, source = world(), random.Random(7)

    def trembling(role: str) -> LoadReport:
        around = source.uniform(0.93, 1.07)
        return busy(role, gap=0.02 * around, share=0.3 * around)

    minutes(made, 20, trembling)
    assert writes(made, 240, trembling) == 0


def test_a_load_that_goes_up_and_down_causes_few_writes() -> None:
    """Ten minutes lie between two writes of measured values, if the advice is the same."""
    made, source = world(), random.Random(7)

    def wild(role: str) -> LoadReport:
        return busy(role, gap=source.uniform(0.002, 0.035), share=source.uniform(0, 0.5))

    minutes(made, 20, wild)
    assert writes(made, 240, wild) <= 24


def test_near_a_limit_the_advice_is_as_steady_as_the_condition() -> None:
    made = world("Advise", decode={"replicas": 2})
    minutes(made, 5, busy)
    said = set()
    for minute in range(20):
        gap = 0.041 if minute % 2 else 0.039
        assert writes(made, 1, lambda role, gap=gap: busy(role, gap=gap)) == 0 or minute < 2
        said.add(made.cluster["status"]["scaling"]["decode"])
    assert said == {2}
    is_(made, TARGETS_MET, "True", "TargetsMet")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("amounts", [
    {"requests": 1e-320, "busy_seconds": 60}, {"running": 1e-320, "waiting": 1e18},
    {"receives": 1e-320, "receive_seconds": 1e18, "gaps": 1e-320, "gap_seconds": 1e18},
])  # fmt: skip
def test_no_load_stops_a_plan(role: str, amounts: dict[str, float]) -> None:
    made = world()
    odd = LoadReport(1, **amounts)
    minutes(made, 8, lambda one: odd if one == role else busy(one), come=False)
    jsonschema.validate(json.loads(json.dumps(made.cluster)), SCHEMA)


def test_what_is_remembered_is_bounded() -> None:
    made = world()
    for _ in range(120):
        made.now += 60
        made.step()
    assert len(made.moments) <= 46


def test_an_engine_does_not_work_for_longer_than_the_time_is() -> None:
    assert role_load([LoadReport(60, busy_seconds=61), LoadReport(60, busy_seconds=30)]).busy == 1.5


def test_other_bounds_are_judged_at_once() -> None:
    made = world()
    minutes(made, 3, busy)
    made.edit(autoscaling={**made.cluster["spec"]["autoscaling"], "decode": {"min": 3, "max": 6}})
    made.step()
    assert made.cluster["spec"]["decode"]["replicas"] == 3


def test_a_bug_of_the_advice_stops_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world()
    minutes(made, 3, busy)
    said = made.cluster["status"]["scaling"]
    made.edit(decode={"replicas": 2})
    with monkeypatch.context() as broken:
        broken.setattr(follow, "advise", lambda *_: list[int]().pop())
        [plan, again] = minutes(made, 2, slow)
        assert isinstance(plan.fault, IndexError)
        assert (again.scales, again.moments) == ((), ())
        is_(made, TARGETS_MET, "Unknown", "AdviceFailed")
        words = made.condition(TARGETS_MET)["message"]
        assert words == "the number of engines stays as it is: IndexError: pop from empty list"
        assert counts(made) == (1, 2), "the change of the spec is carried out"
        is_(made, "Ready", "True", "Ready")
        assert made.cluster["status"]["scaling"] == said
        jsonschema.validate(json.loads(json.dumps(made.cluster)), SCHEMA)
    [plan] = minutes(made, 1, busy)
    assert plan.fault is None
    assert made.condition(TARGETS_MET)["reason"] != "AdviceFailed"


def test_between_two_looks_nothing_is_judged() -> None:
    made = world()
    minutes(made, 3, busy)
    made.loads = {one: slow(one.split(".")[2]) for one in made.engines}
    plan = made.plan()
    assert not plan.scales
    assert len(plan.moments) == len(made.moments)
    assert plan.requeue_after is not None
    assert plan.requeue_after <= 60
