"""A forecast: the planner's own steps, what they replace, and what they need."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from simulated_cluster import SimulatedCluster, brought_up, manifest

from pdcluster_connector.protocol.launcher_documents import CanaryState, LinkState
from pdcluster_operator.api.object_names import (
    PAIRING_LABEL,
    ROTATE_TICKET_KEY_ANNOTATION,
    engine_of,
)
from pdcluster_operator.plan.builders.secrets import entry_of
from pdcluster_operator.plan.forecast.course import Course, forecast, with_rewrites
from pdcluster_operator.plan.forecast.world import (
    GONE,
    LAST_APPLIED,
    ROUTED,
    VERIFIED,
    World,
    merge_patch,
    reports_in,
    server_side_manager,
)
from pdcluster_operator.plan.objects.ownership import identity
from pdcluster_operator.plan.observed.pods import is_pod_ready
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.renewals import certificates_as_due
from pdcluster_operator.plan.types import Apply, Delete, Observed

GPUS = {"transfer": {"device": "CUDA"}, "engine": {"blockSize": 16}}


def running(**spec: Any) -> SimulatedCluster:
    return brought_up(**spec)


def seen(world: SimulatedCluster) -> Observed:
    """As somebody sees it who does not reach the launchers."""
    observed = world.observed()
    engines, links = reports_in(observed.cluster, observed.children)
    return replace(observed, engines=engines, links=links)


def after(world: SimulatedCluster, **spec: Any) -> Course:
    """Forecast an edit without making it."""
    edited = copy.deepcopy(world.cluster)
    edited["spec"].update(spec)
    edited["metadata"]["generation"] += 1
    return forecast(replace(seen(world), cluster=edited), world.now)


def kinds(course: Course) -> list[str]:
    return [type(step).__name__ for one in course.rounds for step in one.steps]


def env(value: str) -> dict[str, Any]:
    return {"engine": {"env": [{"name": "A", "value": value}]}}


def test_what_does_not_change_has_no_steps() -> None:
    world = running()
    course = after(world)
    assert course.rounds == ()
    assert course.replaced == ()
    assert course.complete
    assert not course.interrupted


def test_the_status_stands_for_what_launchers_say() -> None:
    """A forecast from the status is the forecast from the launchers' own reports."""
    world = running(rollout={"type": "Surge"}, decode={"replicas": 2})
    edited = copy.deepcopy(world.cluster)
    edited["spec"]["decode"] = {"replicas": 2, **env("1")}
    told = forecast(replace(world.observed(), cluster=edited), world.now)
    assert forecast(replace(seen(world), cluster=edited), world.now) == told
    assert len(told.rounds) > 2


def test_only_links_that_the_status_does_not_call_failed_count_as_established() -> None:
    world = running(prefill={"replicas": 3})
    prefill, decode = world.leaders("prefill"), world.leaders("decode")[0]
    status = world.cluster["status"]
    failed = {"prefill": prefill[1].stateful_set, "decode": decode.stateful_set}
    status["failedLinks"] = [failed]
    template = world.children["StatefulSet", prefill[2].stateful_set]["spec"]["template"]
    template["metadata"]["labels"][PAIRING_LABEL] = "another"
    engines, links = reports_in(world.cluster, world.children.values())
    assert set(engines) == {one.logical for one in (*prefill, decode)}
    assert set(links) == {decode.logical}, "decode engines have links, prefill engines none"
    [link] = links[decode.logical].links
    assert link.prefill == prefill[0].logical
    assert link.prefill_engine_id == engines[link.prefill].engine_id


@pytest.mark.parametrize(
    ("how", "peak", "interrupted"), [("Recreate", 2, True), ("Surge", 4, False)]
)
def test_gpus_at_the_peak_and_whether_it_serves(how: str, peak: int, interrupted: bool) -> None:
    world = running(rollout={"type": how}, **copy.deepcopy(GPUS))
    course = after(world, engine={**GPUS["engine"], "blockSize": 32})
    assert course.gpus[:2] == (2, peak)
    assert course.interrupted is interrupted
    assert course.complete
    assert [(one.role.value, one.fields) for one in course.replaced] == [
        ("prefill", ("engine.blockSize",)),
        ("decode", ("engine.blockSize",)),
    ]


def test_engines_and_gpus_are_counted_apart() -> None:
    world = running(rollout={"type": "Surge"}, prefill={"parallelism": {"tensor": 2}}, **GPUS)
    course = after(world, prefill={"parallelism": {"tensor": 2}, **env("1")})
    assert (course.engines, course.gpus) == ((2, 3, 2), (3, 5, 3))
    fewer = after(world, prefill={"replicas": 0, "parallelism": {"tensor": 2}})
    assert (fewer.engines, fewer.gpus) == ((2, 2, 1), (3, 3, 1)), "the peak is before the change"


def test_each_round_says_what_was_waited_for() -> None:
    for how, waited in (("Recreate", ["", GONE]), ("Surge", ["", VERIFIED, ROUTED, GONE])):
        course = after(running(rollout={"type": how}), decode=env("1"))
        assert [one.after for one in course.rounds] == waited


def test_a_forecast_ends_as_soon_as_nobody_has_anything_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, plans = running(), []

    def counted(*seen: Any) -> Any:
        plans.append(seen)
        return make_plan(*seen)

    monkeypatch.setattr("pdcluster_operator.plan.planner.make_plan", counted)
    assert after(world).complete
    assert len(plans) < 5


def test_a_change_that_stops_says_why() -> None:
    world = running(rollout={"type": "Replace"})
    course = after(world, decode=env("1"))
    assert not course.complete
    assert course.end.startswith("InsufficientCapacity")
    assert "Delete" not in kinds(course)
    paused = after(world, decode=env("1"), rollout={"paused": True})
    assert paused.rounds == ()
    assert not paused.complete
    assert paused.end.startswith("Paused")


def test_renew_is_the_field_that_forces_it() -> None:
    world = running()
    course = after(world, rollout={"renew": "today"})
    assert {one.fields for one in course.replaced} == {("rollout.renew",)}
    world.edit(rollout={"renew": "today"})
    world.step()
    assert "rollout.renew changed" in world.condition("Ready")["message"], "the status says it too"


def test_the_forecast_ends_as_the_cluster_does() -> None:
    """Its steps are taken in the simulated cluster, which reacts in steps of its own."""
    world = running(rollout={"type": "Surge"})
    course = after(world, engine={"blockSize": 32})
    world.edit(engine={"blockSize": 32})
    taken = []
    for _ in range(30):
        plan = world.step()
        taken += plan.steps
        if not plan.steps:
            world.others_act()

    def named(steps: Any) -> list[tuple[str, str]]:
        stored = [getattr(one, "stored", None) or getattr(one, "manifest", None) for one in steps]
        return sorted(
            (m["kind"], m["metadata"]["name"]) if m else (one.kind, one.name)
            for one, m in zip(steps, stored, strict=True)
        )

    assert named(taken) == named([step for one in course.rounds for step in one.steps])
    assert world.condition("Ready")["status"] == "True"


def test_a_child_that_a_webhook_rewrites_is_left_as_it_is() -> None:
    world = running()
    deployment = next(c for (kind, _), c in world.children.items() if kind == "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = "mirror/router"
    observed, left = with_rewrites(seen(world), world.now)
    assert left == ()
    assert forecast(observed, world.now).rounds == ()
    deployment["metadata"]["annotations"]["pdcluster.dev/applied"] = "something else"
    _, left = with_rewrites(seen(world), world.now)
    assert len(left) == 1, "it was not applied as it is wanted now"


def test_an_engine_that_is_applied_again_keeps_its_pods() -> None:
    """Its StatefulSet has all defaults, and an image that somebody wrote."""
    world = running(decode={"replicas": 2})
    for (kind, _), child in world.children.items():
        if kind == "StatefulSet":
            child["spec"]["template"]["spec"]["restartPolicy"] = "Always"
            child["spec"]["template"]["spec"]["containers"][0]["image"] = "example.com/patched:1"
            child["metadata"]["labels"].pop("app.kubernetes.io/managed-by")
    course = after(world)
    assert set(kinds(course)) == {"Apply"}
    assert len(course.rounds) == 1
    assert course.complete


def test_an_object_keeps_its_uid_when_it_is_applied_again_and_a_new_one_gets_its_own() -> None:
    """A deletion names the object by its uid."""
    cluster = running()
    world = World(seen(cluster))
    before = {identity(one): one["metadata"]["uid"] for one in world.observed().children}
    for child in list(world.observed().children):
        world.perform(Apply({**child, "metadata": _as_written(child)}, ""), cluster.now)
    assert {identity(one): one["metadata"]["uid"] for one in world.observed().children} == before
    new = next(child for child in world.observed().children if child["kind"] == "Service")
    for name in ("one", "other"):
        world.perform(Apply({**new, "metadata": _as_written(new, name)}, ""), cluster.now)
    uids = [one["metadata"]["uid"] for one in world.observed().children]
    assert len(uids) == len(before) + 2
    assert len(set(uids)) == len(uids)


def _as_written(child: Any, name: str = "") -> dict[str, Any]:
    metadata = {key: child["metadata"][key] for key in ("name", "namespace", "labels")}
    return {**metadata, "name": name or metadata["name"]}


def test_a_child_that_is_gone_is_a_step_that_is_left() -> None:
    world = running()
    gone = next(key for key in world.children if key[0] == "Service")
    del world.children[gone]
    _, (step,) = with_rewrites(seen(world), world.now)
    assert isinstance(step, Apply)
    assert (step.manifest["kind"], step.manifest["metadata"]["name"]) == gone


def test_an_engine_whose_pods_are_gone_is_not_heard_any_more() -> None:
    cluster = running()
    world = World(seen(cluster))
    (kind, name), child = next(c for c in cluster.children.items() if c[0][0] == "StatefulSet")
    engine = engine_of(child)
    assert engine is not None
    assert engine.logical in world.observed().engines
    world.perform(Delete(kind, "default", name, "", "", "not wanted"), cluster.now)
    assert world.others_act() == GONE
    assert engine.logical not in world.observed().engines
    assert engine.logical not in world.observed().links
    world.perform(Apply(child, "wanted again"), cluster.now)
    assert world.others_act() == VERIFIED, "its pod runs"
    assert world.others_act() == VERIFIED, "its launcher speaks"
    observed = world.observed()
    assert observed.engines[engine.logical].ready
    assert [engine_of(one) for one in observed.pods].count(engine) == 1


def test_apply_removes_what_the_last_manifest_had_and_keeps_what_others_set() -> None:
    live = {
        "metadata": {
            "annotations": {
                LAST_APPLIED: '{"metadata":{"name":"x","namespace":"y","labels":{"a":"1"}},'
                '"spec":{"decode":{"engine":{"env":[]}},"engine":{"blockSize":32}}}'
            }
        },
        "spec": {"decode": {"replicas": 7}},
    }
    wanted = {"metadata": {"name": "x"}, "spec": {"decode": {}, "model": {"name": "m"}}}
    assert merge_patch(live, wanted) == {
        "metadata": {"labels": None},
        "spec": {"decode": {"engine": None}, "engine": None, "model": {"name": "m"}},
    }
    assert merge_patch({"metadata": {}}, wanted)["spec"] == wanted["spec"]
    no_object = {"metadata": {"annotations": {LAST_APPLIED: "[1]"}}}
    assert merge_patch(no_object, wanted)["spec"] == wanted["spec"]
    labelled = {"metadata": {"name": "x", "uid": "7", "labels": {"b": "2"}}, "spec": {}}
    patch = merge_patch(live, labelled)
    assert patch["metadata"] == {"labels": {"a": None, "b": "2"}}
    assert merge_patch({"metadata": {"annotations": {LAST_APPLIED: "no JSON"}}}, wanted)


def test_who_applied_the_spec_on_the_server_side() -> None:
    ours = {"operation": "Apply", "manager": "operator", "fieldsV1": {"f:status": {}}}
    theirs = {"operation": "Apply", "manager": "flux", "fieldsV1": {"f:spec": {}}}
    by_hand = {"operation": "Update", "manager": "edit", "fieldsV1": {"f:spec": {}}}
    live = {"metadata": {"managedFields": [ours, by_hand]}}
    assert server_side_manager(live) is None
    live["metadata"]["managedFields"].append(theirs)
    assert server_side_manager(live) == "flux"


def test_a_ticket_key_is_written_once_and_once_for_each_rotation() -> None:
    new = SimulatedCluster(manifest())
    course = forecast(new.observed(), new.now)
    assert kinds(course).count("WriteTicketKey") == 1
    assert course.complete
    world = running()
    edited = copy.deepcopy(world.cluster)
    edited["metadata"]["annotations"] = {ROTATE_TICKET_KEY_ANNOTATION: "today"}
    course = forecast(replace(seen(world), cluster=edited), world.now)
    assert kinds(course) == ["WriteTicketKey"]
    assert course.complete


def test_certificates_are_made_for_new_engines_and_left_alone_otherwise() -> None:
    world = running(transfer={"device": "CPU", "tls": "Enabled"}, rollout={"type": "Surge"})
    # Few people may read Secrets; then those of the engines that exist are taken for made.
    due = certificates_as_due(world.observed().children, world.now)
    assert forecast(replace(seen(world), certificates=due), world.now).rounds == ()
    course = after(world, decode=env("1"))
    assert kinds(course).count("WriteCertificates") == 2, "for the new engine, and without the old"
    assert course.complete


def test_a_forecast_begins_with_all_that_was_seen() -> None:
    """Its first plan is the operator's own: nothing of what was seen is forgotten."""
    world = running(decode={"replicas": 2})
    seen_now = seen(world)
    assert seen_now.cluster["status"]
    begun = World(seen_now).observed()
    pods = tuple(pod for pod in seen_now.pods if engine_of(pod) is not None)
    assert begun == replace(seen_now, pods=pods)


def test_certificates_that_are_due_are_those_of_engines_that_exist() -> None:
    """The Service of an engine stays a while longer than the engine."""
    world = running(decode={"replicas": 2})
    (gone, kept) = world.leaders("decode")
    del world.children["StatefulSet", kept.stateful_set]
    due = certificates_as_due(world.observed().children, world.now)
    assert entry_of(gone) in due.engines
    assert entry_of(kept) not in due.engines
    assert len(due.engines) == 2


def test_an_engine_that_is_not_ready_becomes_so() -> None:
    world = running(decode={"replicas": 2})
    for name in world.leaders("decode"):
        world.engines[name.logical] = structs.replace(
            world.engines[name.logical], ready=False, state="LoadingWeights"
        )
    begun = World(world.observed())
    while begun.others_act():
        pass
    found = begun.observed().engines
    assert {name for name, one in found.items() if one.ready} == set(world.engines)


def test_a_pod_that_is_not_ready_becomes_so() -> None:
    world = running()
    for pod in world.pods.values():
        pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    begun = World(world.observed())
    assert begun.others_act() == VERIFIED
    pods = [pod for pod in begun.observed().pods if engine_of(pod) is not None]
    assert len(pods) == 2
    assert all(map(is_pod_ready, pods))


def applied_again(child: Any, **spec: Any) -> Apply:
    wanted = {**child, "spec": {**child["spec"], **spec}, "metadata": _as_written(child)}
    wanted.pop("status", None)
    return Apply(wanted, "")


def test_what_is_applied_with_the_same_values_gives_others_nothing_to_do() -> None:
    """The API server has added defaults, which the operator does not write."""
    cluster = running()
    world = World(seen(cluster))
    while world.others_act():
        pass
    router = next(one for one in world.observed().children if one["kind"] == "Deployment")
    router["spec"]["progressDeadlineSeconds"] = 600
    wanted = applied_again({**router, "spec": {**router["spec"]}})
    del wanted.manifest["spec"]["progressDeadlineSeconds"]
    world.perform(wanted, cluster.now)
    assert world.others_act() == ""
    world.perform(applied_again(router, replicas=3), cluster.now)
    assert world.others_act() == ROUTED, "a change has to be carried out"


def test_pods_that_end_hold_their_gpus_until_they_are_gone() -> None:
    parallelism = {"tensor": 4, "nodes": 2}
    cluster = running(prefill={"parallelism": parallelism}, **copy.deepcopy(GPUS))
    world = World(seen(cluster))
    assert world.engines() == (2, 5)
    (engine,) = cluster.leaders("prefill")
    gone = Delete("StatefulSet", "default", engine.stateful_set, "", "", "not wanted")
    world.perform(gone, cluster.now)
    assert world.engines() == (2, 5)
    assert world.others_act() == GONE
    assert world.engines() == (1, 1)


def said(world: SimulatedCluster, **statuses: str) -> None:
    for kind, status in statuses.items():
        world.condition(kind)["status"] = status


@pytest.mark.parametrize(
    ("verified", "available", "moved"),
    [("True", "True", True), ("False", "True", True), ("True", "False", True),
     ("Unknown", "Unknown", False), ("False", "False", False)],
)  # fmt: skip
def test_a_link_counts_as_verified_if_the_status_tells_that_kv_moved(
    verified: str, available: str, moved: bool
) -> None:
    """The router may be down while links work. Some links may work while others fail."""
    world = running()
    said(world, KVPathVerified=verified, Available=available)
    _, links = reports_in(world.cluster, world.children.values())
    [link] = [link for report in links.values() for link in report.links]
    assert (link.canary.state is CanaryState.PASSED) is moved
    assert link.state is LinkState.ESTABLISHED


def test_an_engine_that_the_status_does_not_call_ready_has_reported_nothing() -> None:
    world = running(decode={"replicas": 2})
    silent, ready = world.leaders("decode")
    for entry in world.cluster["status"]["engines"]:
        if entry["name"] == silent.stateful_set:
            entry["state"] = "Unknown"
    engines, links = reports_in(world.cluster, world.children.values())
    assert silent.logical not in {*engines, *links}
    assert ready.logical in engines
    assert ready.logical in links


@pytest.mark.parametrize("status", [None, {}, {"engines": None, "failedLinks": None}])
def test_a_cluster_without_a_status_has_reported_nothing(status: Any) -> None:
    world = running()
    cluster = {**world.cluster, "status": status}
    assert reports_in(cluster, world.children.values()) == ({}, {})


@pytest.mark.parametrize("spec", [{"decode": {"replicas": -1, **env("1")}}, {"decode": "two"}])
def test_a_spec_that_is_refused_changes_nothing_and_the_forecast_says_so(
    spec: dict[str, Any],
) -> None:
    course = after(running(), **spec)
    assert course.rounds == ()
    assert course.replaced == ()
    assert not course.complete
    assert course.end.startswith("NotAccepted: ")


def test_what_does_not_serve_yet_is_not_interrupted() -> None:
    new = SimulatedCluster(manifest())
    course = forecast(new.observed(), new.now)
    assert course.complete
    assert (course.served, course.interrupted) == (False, False)
    assert course.engines == (0, 2, 2)
    assert course.end.startswith("Ready: ")
    assert after(running(), decode={"replicas": 2}).served


def test_each_plan_of_a_forecast_sees_the_status_that_the_one_before_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the operator's do. Deadlines and what was known of engines stand in it."""
    world, seen_statuses, written = running(rollout={"type": "Surge"}), [], []

    def counted(observed: Observed, *rest: Any) -> Any:
        plan = make_plan(observed, *rest)
        seen_statuses.append(observed.cluster["status"])
        written.append(plan.status)
        return plan

    monkeypatch.setattr("pdcluster_operator.plan.planner.make_plan", counted)
    assert after(world, decode=env("1")).complete
    assert seen_statuses == [world.cluster["status"], *written[:-1]]
    assert len(written) > 5


WIDE = {"replicas": 2, "parallelism": {"tensor": 8, "nodes": 2}}
NARROW = {"replicas": 2, "parallelism": {"tensor": 4}}


def made_at_once(course: Course) -> list[int]:
    """How many engines each round makes, but for rounds that make none."""
    kind = "StatefulSet"
    counts = [
        sum(isinstance(step, Apply) and step.manifest["kind"] == kind for step in one.steps)
        for one in course.rounds
    ]
    return [count for count in counts if count]


def test_engines_of_several_pods_hold_the_gpus_of_all_of_them() -> None:
    """Where a wide engine has left, there is room for two narrow ones, once its pods are gone."""
    world = running(rollout={"type": "Replace"}, prefill=WIDE, **copy.deepcopy(GPUS))
    course = after(world, prefill=NARROW)
    assert course.complete, course.end
    assert course.gpus[:2] == (17, 17)
    assert made_at_once(course) == [2]


def test_the_budget_of_a_surge_is_that_of_the_dearest_engines_and_one_more() -> None:
    """Three wide engines and one more have 32 GPUs. Three narrow ones leave room for two."""
    world = running(
        rollout={"type": "Surge"}, prefill={**NARROW, "replicas": 3}, **copy.deepcopy(GPUS)
    )
    course = after(world, prefill={**WIDE, "replicas": 3})
    assert course.complete, course.end
    assert course.gpus[:2] == (13, 29)
    assert made_at_once(course) == [2, 1]
