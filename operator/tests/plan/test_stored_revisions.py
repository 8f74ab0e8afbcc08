"""A stored revision is not rendered again: only what a user changes replaces engines."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from simulated_cluster import SimulatedCluster, brought_up, manifest, render_other_pods
from valid_specs import manifests

from pdcluster_connector.protocol.launcher_documents import EngineReport, EngineState
from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.api.object_names import (
    ENGINE_LABEL,
    PAIRING_LABEL,
    RELEASED_ANNOTATION,
    RELEASED_BECAUSE_ANNOTATION,
    REVISION_LABEL,
    ROLE_LABEL,
    EngineName,
    pairing_key_of,
)
from pdcluster_operator.api.rules import variables
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.connectors import shared_connectors_of
from pdcluster_operator.plan.rollout import revisions, targets
from pdcluster_operator.plan.rollout.revisions import (
    Revision,
    build_revision,
    changed_fields,
    in_words,
    revisions_in,
    spec_of_engines,
    stored_revisions,
    with_spec_of_engines,
)
from pdcluster_operator.plan.types import Apply, ConnectorBundle, Delete, TryOut

NEWER = ConnectorBundle("d" * 64, b"newer")
OLD_CONNECTOR = "pdcluster-connector-c0ffee0000000000"
NEW_CONNECTOR = "pdcluster-connector-dddddddddddddddd"
ONE_VARIABLE = {"engine": {"env": [{"name": "A", "value": "1"}]}}


def named(world: SimulatedCluster, kind: str) -> set[str]:
    return {name for found, name in world.children if found == kind}


def of_role(world: SimulatedCluster, kind: str, role: str) -> set[str]:
    return {name for name in named(world, kind) if f"-{role}-" in name}


def up(**spec: Any) -> SimulatedCluster:
    return brought_up(**spec)


def roll(world: SimulatedCluster) -> None:
    """Let a replacement end: it is tried out, new pods run and link, old ones go."""
    for _ in range(8):
        world.step()
        world.others_act()
    world.settle()


@pytest.fixture
def other_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an upgraded operator render another pod."""
    render_other_pods(monkeypatch)


def test_another_connector_changes_nothing() -> None:
    world = up(router={"apiKeySecretRef": {"name": "api"}})
    world.connector = NEWER
    assert world.plan().steps == ()
    assert world.condition("Ready")["reason"] == "Ready"


def test_a_spec_with_true_is_not_the_stored_one_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes them for equal. Kubernetes refuses the first, which admission once let in."""

    def spec(optional: object) -> dict[str, Any]:
        source = {"secretKeyRef": {"name": "hub", "key": "token", "optional": optional}}
        return {"engine": {"env": [{"name": "TOKEN", "valueFrom": source}]}}

    monkeypatch.setattr(variables, "env_source_errors", lambda *_: ())
    world = SimulatedCluster(manifest(**spec(1)))
    for step in world.plan().steps:
        if not isinstance(step, Apply) or step.manifest["kind"] != "StatefulSet":
            world.perform(step)
    assert len(named(world, "ControllerRevision")) == 2
    world.edit(**spec(True))
    made = [
        json.dumps(step.manifest)
        for step in world.plan().steps
        if isinstance(step, Apply) and step.manifest["kind"] == "StatefulSet"
    ]
    assert [text.count('"optional": true') for text in made] == [1, 1]


def test_another_way_to_make_pairing_keys_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = up()
    monkeypatch.setattr(revisions, "pairing_key", lambda _: "zzzzz")
    assert world.plan().steps == ()
    world.edit(router={"replicas": 2, "apiKeySecretRef": None})
    engines = named(world, "StatefulSet")
    world.settle()
    assert named(world, "StatefulSet") == engines


def test_another_builder_changes_nothing(request: pytest.FixtureRequest) -> None:
    world = up()
    request.getfixturevalue("other_builder")
    assert world.plan().steps == ()
    # Nor does a change that no engine sees, which is judged by rendering.
    world.edit(router={"replicas": 2, "apiKeySecretRef": None})
    engines = named(world, "StatefulSet")
    world.settle()
    assert named(world, "StatefulSet") == engines


def test_the_next_change_brings_the_builder_and_the_connector_for_its_role(
    request: pytest.FixtureRequest,
) -> None:
    world = up()
    request.getfixturevalue("other_builder")
    world.connector = NEWER
    prefill = of_role(world, "StatefulSet", "prefill")
    world.edit(decode=ONE_VARIABLE)
    roll(world)
    assert of_role(world, "StatefulSet", "prefill") == prefill
    (decode,) = (
        child
        for (kind, name), child in world.children.items()
        if kind == "StatefulSet" and "-decode-" in name
    )
    pod = decode["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][0] == "--of-a-later-version"
    mounted = {v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v}
    assert mounted == {NEW_CONNECTOR}
    # Prefill mounts the older one still. The two roles pair: the key is the same.
    assert world.shared.keys() == {OLD_CONNECTOR, NEW_CONNECTOR}
    keys = {
        child["metadata"]["labels"]["pdcluster.dev/pairing-key"]
        for (kind, _), child in world.children.items()
        if kind == "StatefulSet"
    }
    assert len(keys) == 1


def test_roles_still_pair_where_a_later_operator_computes_other_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = up()
    monkeypatch.setattr(revisions, "pairing_key", lambda cluster: "later")
    world.edit(decode=ONE_VARIABLE)
    roll(world)
    keys = {
        child["metadata"]["labels"]["pdcluster.dev/pairing-key"]
        for (kind, _), child in world.children.items()
        if kind == "StatefulSet"
    }
    assert len(keys) == 1
    assert "later" not in keys


def test_replicas_make_no_revision() -> None:
    world = up()
    before = named(world, "ControllerRevision")
    assert len(before) == 2
    world.edit(prefill={"replicas": 3}, decode={"replicas": 2})
    roll(world)
    assert named(world, "ControllerRevision") == before
    assert len(named(world, "StatefulSet")) == 5


def test_renew_brings_what_is_new_once_and_taking_it_away_brings_nothing_back() -> None:
    world = up()
    old = named(world, "StatefulSet")
    world.connector = NEWER
    world.edit(rollout={"renew": "1"})
    roll(world)
    new = named(world, "StatefulSet")
    assert not new & old
    world.connector = ConnectorBundle("e" * 64, b"newest")
    assert world.settle().steps == ()
    world.edit(rollout={})
    assert world.settle().steps == ()
    assert named(world, "StatefulSet") == new


def test_a_spec_that_goes_back_finds_the_revision_that_it_had() -> None:
    world = up()
    first, stored = named(world, "StatefulSet"), named(world, "ControllerRevision")
    world.edit(engine={"maxModelLen": 512})
    roll(world)
    world.connector = NEWER
    world.edit(engine={})
    roll(world)
    assert named(world, "StatefulSet") == first
    assert named(world, "ControllerRevision") > stored
    numbers = {name: world.children["ControllerRevision", name]["revision"] for name in stored}
    assert set(numbers.values()) == {3}


def test_a_connector_that_somebody_deleted_makes_its_idle_revision_useless() -> None:
    world = up()
    world.connector = NEWER
    world.edit(engine={"maxModelLen": 512})
    roll(world)
    del world.shared[OLD_CONNECTOR]
    world.edit(engine={})
    roll(world)
    assert world.shared.keys() == {NEW_CONNECTOR}
    engines = [child for (kind, _), child in world.children.items() if kind == "StatefulSet"]
    assert len(engines) == 2
    assert [shared_connectors_of(engine) for engine in engines] == [{NEW_CONNECTOR}] * 2


def test_a_connector_that_somebody_deleted_replaces_no_engine_that_runs() -> None:
    """Its processes have read the file long ago."""
    world = up()
    engines = named(world, "StatefulSet")
    world.connector = NEWER
    world.edit(decode=ONE_VARIABLE)
    roll(world)
    of_prefill = of_role(world, "StatefulSet", "prefill")
    assert of_prefill < engines, "only decode engines have changed"
    del world.shared[OLD_CONNECTOR]
    world.settle()
    assert of_role(world, "StatefulSet", "prefill") == of_prefill


def test_history_is_pruned_and_mounts_no_connector_then() -> None:
    world = up(rollout={"revisionHistoryLimit": 1})
    for number in range(4):
        world.connector = ConnectorBundle(f"{number}" * 64, b"another")
        world.edit(engine={"maxModelLen": 512 + number})
        roll(world)
    world.settle()
    assert len(named(world, "ControllerRevision")) == 4  # of each role: the one that runs, one more
    assert {name for child in world.children.values() for name in shared_connectors_of(child)} == {
        f"pdcluster-connector-{n * 16}" for n in ("2", "3")
    }


def test_a_revision_that_somebody_deleted_is_made_again_from_its_engines() -> None:
    """The operator was upgraded since. What it renders today would replace them."""
    world = up()
    for name in named(world, "ControllerRevision"):
        del world.children["ControllerRevision", name]
    engines = copy.deepcopy({k: v for k, v in world.children.items() if k[0] == "StatefulSet"})
    for engine in engines.values():
        # An API server says all defaults.
        engine["spec"]["template"]["spec"]["restartPolicy"] = "Always"
        engine["spec"]["template"]["metadata"]["creationTimestamp"] = None
    world.children |= copy.deepcopy(engines)
    world.connector = NEWER
    plan = world.settle()
    assert not [step for step in plan.steps if isinstance(step, Delete)]
    assert named(world, "ControllerRevision") == {
        name.rpartition("-")[0] for name in named(world, "StatefulSet")
    }
    for key, engine in engines.items():
        now = world.children[key]["spec"]["template"]["spec"]
        assert now == engine["spec"]["template"]["spec"]
    world.edit(decode=ONE_VARIABLE)  # stored again, it is like any other
    roll(world)
    assert world.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("both", [True, False])
def test_only_the_wanted_revision_is_deleted_after_an_upgrade(
    both: bool, request: pytest.FixtureRequest
) -> None:
    """An older one is still stored. What today's operator renders would replace the engines."""
    world = up()
    world.edit(engine={"env": [{"name": "A", "value": "1"}]})
    roll(world)
    request.getfixturevalue("other_builder")
    engines = named(world, "StatefulSet")
    for role in ("prefill", "decode") if both else ("decode",):
        (engine,) = of_role(world, "StatefulSet", role)
        assert len(of_role(world, "ControllerRevision", role)) == 2
        del world.children["ControllerRevision", engine.rpartition("-")[0]]
    roll(world)
    assert named(world, "StatefulSet") == engines
    assert {name.rpartition("-")[0] for name in engines} <= named(world, "ControllerRevision")
    assert world.plan().steps == ()


def test_a_revision_from_engines_says_what_they_were_made_from() -> None:
    """Further engines of it have as many pods, the same connector and the same partners."""
    world = up(prefill={"parallelism": {"tensor": 2, "nodes": 2}})
    before = {one.role: one for one in stored_revisions(world.observed())}
    for name in named(world, "ControllerRevision"):
        del world.children["ControllerRevision", name]
    world.connector = NEWER
    steps = world.step().steps
    assert {step.manifest["kind"] for step in steps} == {"ControllerRevision"}
    after = {one.role: one for one in stored_revisions(world.observed())}
    for role, one in before.items():
        assert replace(one, connector=one.connector[:16]) == after[role]


@pytest.mark.parametrize(
    ("status", "reason", "ready", "again"),
    [
        ("False", "Complete", "True", True),
        ("False", "InternalError", "True", True),
        ("True", "EngineFailed", "False", True),
        ("False", "Paused", "False", False),
        ("True", "Replacing", "False", False),
        ("False", "TemplateRefused", "False", False),
        ("False", "ProgressDeadlineExceeded", "False", False),
    ],
)
def test_engines_that_were_to_be_replaced_were_made_of_another_spec(
    status: str, reason: str, ready: str, again: bool, request: pytest.FixtureRequest
) -> None:
    """If another builder made them, nothing then says what the engines were made from."""
    world = up()
    request.getfixturevalue("other_builder")
    for name in named(world, "ControllerRevision"):
        del world.children["ControllerRevision", name]
    world.connector = NEWER
    world.condition("Progressing").update(status=status, reason=reason)
    world.condition("Ready").update(status=ready)
    tried_out = [step for step in world.plan().steps if isinstance(step, TryOut)]
    assert bool(tried_out) is not again


def test_engines_of_a_spec_that_the_operator_had_not_seen_are_replaced() -> None:
    world = up()
    for name in named(world, "ControllerRevision"):
        del world.children["ControllerRevision", name]
    old = named(world, "StatefulSet")
    world.edit(engine={"maxModelLen": 512})
    roll(world)
    assert not named(world, "StatefulSet") & old


def test_the_status_names_the_field_that_replaces_engines() -> None:
    world = up(decode=ONE_VARIABLE)
    world.edit(decode={"engine": {"env": [{"name": "A", "value": "secret"}]}})
    world.step()
    for kind in ("Ready", "Progressing"):
        said = world.condition(kind)["message"]
        assert "decode.engine.env[0].value changed" in said or "decode" in said
        assert "secret" not in said
    assert "decode.engine.env[0].value changed" in world.condition("Progressing")["message"]


def test_a_pause_keeps_the_revision_its_router_and_its_address_and_scales() -> None:
    world = up()
    router = named(world, "Deployment")
    before = named(world, "StatefulSet")
    world.edit(engine={"blockSize": 32}, rollout={"paused": True}, decode={"replicas": 2})
    roll(world)
    assert named(world, "Deployment") == router
    assert named(world, "StatefulSet") > before
    assert len(of_role(world, "StatefulSet", "decode")) == 2
    assert world.condition("Ready")["reason"] == "Paused"
    assert "engine.blockSize changed" in world.condition("Ready")["message"]
    world.edit(rollout={})
    roll(world)
    assert not named(world, "StatefulSet") & before


def test_while_a_change_waits_paused_engines_keep_their_connector() -> None:
    """An upgrade of the operator comes meanwhile, and both roles are scaled."""
    world = up()
    before = named(world, "StatefulSet")
    world.edit(engine={"blockSize": 32}, rollout={"paused": True})
    roll(world)
    world.connector = NEWER
    world.edit(prefill={"replicas": 2}, decode={"replicas": 2})
    roll(world)
    engines = [child for (kind, _), child in world.children.items() if kind == "StatefulSet"]
    assert named(world, "StatefulSet") > before
    assert [shared_connectors_of(engine) for engine in engines] == [{OLD_CONNECTOR}] * 4
    assert OLD_CONNECTOR in world.shared
    assert world.condition("Ready")["reason"] == "Paused"
    world.edit(rollout={})
    roll(world)
    engines = [child for (kind, _), child in world.children.items() if kind == "StatefulSet"]
    assert not named(world, "StatefulSet") & before
    assert [shared_connectors_of(engine) for engine in engines] == [{NEW_CONNECTOR}] * 4


def test_a_pause_does_not_hold_back_what_is_no_change() -> None:
    world = up(rollout={"paused": True})
    world.connector = NEWER
    assert world.plan().steps == ()
    assert world.condition("Ready")["reason"] == "Ready"


@settings(max_examples=settings().max_examples * 3 // 5)
@given(cluster=manifests())
def test_whatever_the_spec_an_upgrade_is_no_change(cluster: dict[str, Any]) -> None:
    world = SimulatedCluster(cluster)
    for _ in range(3):
        world.step()
    world.connector = NEWER
    assert world.plan().steps == ()


def test_what_counts_as_a_change_of_an_engine() -> None:
    before = spec_of_engines(manifest(decode={"replicas": 2}, rollout={"paused": True}))
    after = spec_of_engines(manifest(decode=ONE_VARIABLE, router={"replicas": 3}))
    assert "rollout" not in before
    assert "decode" not in before
    for role, fields in ((Role.DECODE, {"decode.engine.env"}), (Role.PREFILL, set())):
        old = revision("old", role=role, spec=before)
        assert why_replaced([old], revision("new", role=role), after) == fields
    assert in_words(["b", "a", "d", "c", "a"]) == "a, b, c and 1 more changed"
    assert in_words([]) == ""
    assert in_words(["a"]) == "a changed"
    assert in_words(["c", "b", "a"]) == "a, b, c changed"
    assert in_words("abcde") == "a, b, c and 2 more changed"


def why_replaced(older, wanted, spec):
    """Return why engines of these revisions are replaced; None stands for one that is not known."""
    names = [one.name if one else "gone" for one in older]
    engines = [EngineName("default", "llama", wanted.role, name, 0) for name in names]
    known = targets.Targets({wanted.role: wanted}, tuple(one for one in older if one))
    return known.causes(wanted.role, engines, spec)


def revision(name, **changes):
    base = {"role": Role.PREFILL, "pairing_key": "key", "connector": "", "nodes": 1,
            "template": {}, "spec": {}, "renew": ""}  # fmt: skip
    return Revision(name=name, **base | changes)


OLD = revision("old", spec={"prefill": {"engine": {"env": 1}}, "decode": {"engine": {"env": 1}}})


@pytest.mark.parametrize("before", [[], [None], [revision("new")]], ids=["none", "unknown", "same"])
@pytest.mark.parametrize("behind", [[], [None], [revision("new")]], ids=["none", "unknown", "same"])
def test_each_older_revision_says_why_it_is_replaced(before, behind):
    """An engine of a revision that is not known, or of the wanted one, hides no other's cause."""
    wanted, spec = revision("new"), {"decode": {"engine": {"env": 1}}}
    older = [*before, OLD, *behind]
    assert why_replaced(older, wanted, spec) == {"prefill.engine.env"}
    renewed = [*older, revision("renewed", spec=spec, renew="x")]
    assert why_replaced(renewed, wanted, spec) == {"prefill.engine.env", "rollout.renew"}


def test_the_other_roles_fields_count_only_if_the_pairing_key_changed():
    spec = {"prefill": {"engine": {"env": 1}}, "decode": {"engine": {"env": 2}}}
    assert why_replaced([OLD], revision("new"), spec) == set()
    rekeyed = revision("new", pairing_key="other")
    assert why_replaced([OLD], rekeyed, spec) == {"decode.engine.env"}


def test_a_paused_rollout_without_stored_revisions_makes_the_same_router_again() -> None:
    """Nothing says any more what the engines that run were made from."""
    world = up(router={"apiKeySecretRef": {"name": "api"}})
    [router] = [key for key in world.children if key[0] == "Deployment"]
    for key in [key for key in world.children if key[0] == "ControllerRevision"]:
        del world.children[key]
    world.edit(rollout={"paused": True}, **ONE_VARIABLE)
    assert world.plan().steps == ()
    before = world.children.pop(router)["spec"]["template"]
    [step] = world.plan().steps
    assert step.manifest["metadata"]["name"] == router[1]
    assert step.manifest["spec"]["template"] == before


@pytest.mark.parametrize("held", ["paused", "refused"])
def test_a_change_that_is_held_is_not_forgotten_with_the_stored_revisions(held: str) -> None:
    """Prefill starts again meanwhile, and that is then the reason of Ready."""
    world = up()
    old = of_role(world, "StatefulSet", "decode")
    world.refused = "the server says no" if held == "refused" else ""
    world.edit(decode=ONE_VARIABLE, rollout={"paused": held == "paused"})
    world.step()
    [prefill] = world.leaders("prefill")
    world.engines[prefill.logical] = EngineReport(
        ready=False, engine=prefill.logical, state=EngineState.STARTING
    )
    world.step()
    assert world.condition("Ready")["reason"] == "Starting"
    for key in [key for key in world.children if key[0] == "ControllerRevision"]:
        del world.children[key]
    for _ in range(4):
        world.step()
        world.others_act()
        assert world.condition("Ready")["status"] == "False"
        assert world.condition("Progressing")["reason"] != "Complete"
    assert of_role(world, "StatefulSet", "decode") == old
    world.refused = ""
    world.edit(rollout={})
    roll(world)
    assert world.condition("Ready")["status"] == "True"
    [decode] = of_role(world, "StatefulSet", "decode")
    assert decode not in old


def test_a_role_that_lost_its_last_engine_gets_those_that_pair_while_a_change_is_held() -> None:
    world = up()
    [key] = {pairing_key_of(one) for one in world.children.values() if one["kind"] == "Deployment"}
    world.edit(engine={"blockSize": 32}, rollout={"paused": True})
    world.edit(prefill={"replicas": 0})
    roll(world)
    assert world.leaders("prefill") == []
    world.edit(prefill={"replicas": 1})
    roll(world)
    sets = [one for one in world.children.values() if one["kind"] == "StatefulSet"]
    assert [pairing_key_of(one) for one in sets] == [key, key]
    assert world.condition("Available")["status"] == "True"
    world.edit(rollout={})
    roll(world)
    assert world.condition("Ready")["status"] == "True"
    assert key not in {
        pairing_key_of(one) for one in world.children.values() if one["kind"] == "StatefulSet"
    }


def test_a_revision_from_a_released_engine_has_all_its_pods() -> None:
    """A StatefulSet has none while its engine is released."""
    world = up(decode={"replicas": 2, "parallelism": {"tensor": 2, "nodes": 2}})
    world.edit(engine={"blockSize": 32}, rollout={"paused": True})
    world.step()
    first, second = sorted(of_role(world, "StatefulSet", "decode"))
    released = world.children["StatefulSet", first]
    released["spec"]["replicas"] = 0
    marks = {RELEASED_ANNOTATION: timestamp(world.now), RELEASED_BECAUSE_ANNOTATION: "no room"}
    released["metadata"]["annotations"] |= marks
    for name in [name for name in world.pods if name.startswith(f"{first}-")]:
        del world.pods[name]
    for name in named(world, "ControllerRevision"):
        del world.children["ControllerRevision", name]
    for _ in range(3):
        world.step()
        assert world.children["StatefulSet", second]["spec"]["replicas"] == 2


@pytest.mark.parametrize("label", [ROLE_LABEL, ENGINE_LABEL, PAIRING_LABEL, REVISION_LABEL])
def test_a_label_that_somebody_changes_on_a_stateful_set_ends_no_engine(label: str) -> None:
    world = up()
    before = named(world, "StatefulSet")
    for name in sorted(before):
        world.children["StatefulSet", name]["metadata"]["labels"][label] = "other"
        plan = world.step()
        assert not [step for step in plan.steps if isinstance(step, Delete)]
        labels = world.children["StatefulSet", name]["metadata"]["labels"]
        assert labels[label] != "other"
        assert world.condition("Available")["status"] == "True"
    roll(world)
    assert named(world, "StatefulSet") == before


@pytest.mark.parametrize("label", [PAIRING_LABEL, REVISION_LABEL])
def test_a_label_that_somebody_changes_on_a_stored_revision_replaces_no_engine(label: str) -> None:
    world = up()
    before = named(world, "StatefulSet")
    for name in named(world, "ControllerRevision"):
        world.children["ControllerRevision", name]["metadata"]["labels"][label] = "other"
        roll(world)
        assert named(world, "StatefulSet") == before
        assert world.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("how", ["Surge", "Recreate"])
def test_a_stored_revision_with_the_label_of_the_other_role_ends_no_engine(how: str) -> None:
    world = up(rollout={"type": how})
    world.edit(prefill=ONE_VARIABLE)
    roll(world)
    before = named(world, "StatefulSet")
    name = f"llama-prefill-{world.leaders('prefill')[0].revision}"
    world.children["ControllerRevision", name]["metadata"]["labels"][ROLE_LABEL] = "decode"
    for _ in range(4):
        assert not [one for one in world.step().steps if isinstance(one, Delete)]
        assert named(world, "StatefulSet") == before
    assert world.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("label", [ENGINE_LABEL, PAIRING_LABEL, REVISION_LABEL, ROLE_LABEL])
@pytest.mark.parametrize("gone", [True, False])
def test_a_label_of_an_engines_service_ends_neither_it_nor_the_routers(
    label: str, gone: bool
) -> None:
    """Half-way through a rollout, also that of an old engine that serves."""
    world = up()
    world.edit(engine={"blockSize": 32})
    for old in (False, True):
        if old:
            world.step()
            world.step()
            world.make_pods()
        order = sorted(world.children.items(), key=lambda item: item[0][0] == "Service")
        world.children = dict(order)  # an operator that starts may list them last
        for name in [one.stateful_set for one in world.leaders("decode")]:
            labels = world.children["Service", name]["metadata"]["labels"]
            labels[label] = "other"
            if gone:
                del labels[label]
            for _ in range(3):
                assert not [one for one in world.step().steps if isinstance(one, Delete)]
                assert world.condition("Available")["status"] == "True"
                world.route()


def test_a_revision_that_is_made_again_from_its_engines_keeps_renew() -> None:
    world = up(rollout={"type": "Recreate", "renew": "2026-10"})
    before = named(world, "StatefulSet")
    world.connector = NEWER
    world.settle()
    for name in named(world, "ControllerRevision"):
        del world.children["ControllerRevision", name]
    roll(world)
    assert named(world, "StatefulSet") == before
    assert world.condition("Ready")["status"] == "True"


@pytest.fixture(scope="module")
def running() -> SimulatedCluster:
    return up()


@pytest.mark.sampled
@pytest.mark.parametrize("value", [None, 7, [7], {}], ids=str)
@pytest.mark.parametrize(
    "path",
    [
        "data",
        "data.spec",
        "data.nodes",
        "data.connector",
        "data.template",
        "data.template.metadata",
        "data.template.spec",
        "data.template.spec.containers",
        "data.template.spec.volumes",
    ],
)
def test_a_revision_in_which_somebody_wrote_fails_no_plan(
    running: SimulatedCluster, path: str, value: Any
) -> None:
    world = copy.deepcopy(running)
    (stored,) = (world.children[kind, name] for kind, name in world.children
                 if kind == "ControllerRevision" and "-decode-" in name)  # fmt: skip
    strange = copy.deepcopy(stored)
    strange["metadata"] |= {"name": "of-somebody", "uid": "uid-of-somebody"}
    *parents, last = path.split(".")
    target = strange
    for parent in parents:
        target = target[parent]
    target[last] = value
    world.children["ControllerRevision", "of-somebody"] = strange
    world.plan()
    world.edit(decode=ONE_VARIABLE)
    world.plan()


def test_revisions_that_would_not_pair_are_passed_over_for_older_ones_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both roles were renewed, and somebody deleted what was stored of one of them."""
    world = up()
    first = named(world, "ControllerRevision")
    monkeypatch.setattr(revisions, "pairing_key", lambda cluster: "later")
    world.edit(engine={"maxModelLen": 512})
    roll(world)
    world.edit(engine={}, rollout={"renew": "1"})
    roll(world)
    (newest,) = of_role(world, "StatefulSet", "decode")
    del world.children["ControllerRevision", newest.rpartition("-")[0]]
    world.edit(rollout={})
    roll(world)
    assert {name.rpartition("-")[0] for name in named(world, "StatefulSet")} == first


@pytest.mark.parametrize(
    "labels",
    [
        None,
        {},
        {"pdcluster.dev/revision": "abcde"},
        {"pdcluster.dev/role": "router", "pdcluster.dev/revision": "abcde"},
        {"pdcluster.dev/role": "decode"},
        {"pdcluster.dev/role": "decode", "pdcluster.dev/revision": ""},
    ],
    ids=str,
)
def test_a_controller_revision_without_our_labels_is_none_of_ours(
    running: SimulatedCluster, labels: dict[str, str] | None
) -> None:
    world = copy.deepcopy(running)
    strange = copy.deepcopy(next(c for (kind, _), c in world.children.items()
                                 if kind == "ControllerRevision"))  # fmt: skip
    strange["metadata"] |= {"name": "of-somebody", "uid": "uid-of-somebody", "labels": labels}
    strange["revision"] = 9
    world.children["ControllerRevision", "of-somebody"] = strange
    assert world.plan().steps == ()
    assert {one.number for one in stored_revisions(world.observed())} == {1}


def tried(world: SimulatedCluster) -> dict[str, Any]:
    """Return the revision that the plan tries out, as it would be stored."""
    [step] = [step for step in world.plan().steps if isinstance(step, TryOut)]
    return copy.deepcopy(dict(step.manifest))


@pytest.mark.parametrize("other", ["template", "renew"])
def test_no_two_revisions_have_one_name(running: SimulatedCluster, other: str) -> None:
    """A name is a short hash. What has the same one and is something else is not used instead."""
    world = copy.deepcopy(running)
    world.edit(decode=ONE_VARIABLE)
    names = []
    for number in range(3):
        wanted = tried(world)
        names.append(wanted["metadata"]["name"])
        wanted["metadata"] |= {"uid": f"taken-{number}", "resourceVersion": "1"}
        wanted["data"]["spec"] = {**wanted["data"]["spec"], "engine": {"maxModelLen": 99}}
        if other == "template":
            wanted["data"]["template"]["spec"]["containers"][0]["args"].append("--of-somebody")
        else:
            wanted["data"]["renew"] = "earlier"
        world.children["ControllerRevision", names[-1]] = wanted
    assert len(set(names)) == 3


def test_a_stored_revision_of_the_same_content_is_used_whatever_spec_it_came_from(
    running: SimulatedCluster,
) -> None:
    """This version cannot read that spec, but what it would render is stored already."""
    world = copy.deepcopy(running)
    world.edit(decode=ONE_VARIABLE)
    stored = tried(world)
    name = stored["metadata"]["name"]
    stored["metadata"] |= {"uid": "stored", "resourceVersion": "1"}
    stored["data"]["spec"] = {"engine": {"pageSize": 16}}
    world.children["ControllerRevision", name] = stored
    roll(world)
    [decode] = of_role(world, "StatefulSet", "decode")
    assert decode.rpartition("-")[0] == name


@pytest.mark.parametrize("replicas", [0, 1])
def test_taking_renew_away_with_another_change_brings_no_older_revision_back(
    replicas: int,
) -> None:
    """Where the other role has no engines, nothing is tried out and nothing holds a change."""
    world = up(decode={"replicas": replicas})
    world.connector = NEWER
    world.edit(rollout={"renew": "1"})
    roll(world)
    renewed = of_role(world, "StatefulSet", "prefill")
    world.edit(rollout={}, decode={"replicas": replicas, **ONE_VARIABLE})
    roll(world)
    assert of_role(world, "StatefulSet", "prefill") == renewed


def test_without_a_history_what_is_wanted_stays_although_no_engine_has_it() -> None:
    world = up(decode={"replicas": 0}, rollout={"revisionHistoryLimit": 0})
    stored = named(world, "ControllerRevision")
    assert len(stored) == 2
    world.edit(prefill=ONE_VARIABLE)
    roll(world)
    now = named(world, "ControllerRevision")
    assert len(now) == 2, "that of prefill is another one, and the old one is gone"
    assert len(now & stored) == 1
    assert world.plan().steps == ()


def test_without_a_history_what_engines_have_stays_although_it_is_not_wanted() -> None:
    """While a change is held, an engine that is evicted comes back as it was."""
    none = {"revisionHistoryLimit": 0}
    world = up(rollout=none)
    stored = named(world, "ControllerRevision")
    world.edit(prefill=ONE_VARIABLE, rollout={**none, "paused": True})
    world.settle()
    assert stored <= named(world, "ControllerRevision")


@pytest.mark.parametrize(
    ("before", "after", "paths"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, []),
        ({"b": 1, "a": 1}, {"b": 2, "a": 2}, ["a", "b"]),
        ({"a": {"b": 1}}, {}, ["a.b"]),
        ({}, {"a": {"b": 1}}, ["a.b"]),
        ({"a": {"b": 1}}, {"a": 3}, ["a"]),
        ({"a": 0}, {"a": None}, ["a"]),
        ({"a": 0}, {}, ["a"]),
        ({"a": [1, 2, 3]}, {"a": [1, 5, 6]}, ["a[1]", "a[2]"]),
        ({"a": [1]}, {"a": [1, 2]}, ["a"]),
        ({"a": [1, 2]}, {"a": [1]}, ["a"]),
        ({"a": [{"b": {"c": 1}}]}, {"a": [{"b": {"c": 2}}]}, ["a[0].b.c"]),
        ({"a": [1]}, {"a": "1"}, ["a"]),
        (None, {"a": 1}, ["a"]),
        ({"a": 1}, None, ["a"]),
        (None, None, []),
    ],
)
def test_each_field_that_differs_is_named_as_deep_as_possible(
    before: Any, after: Any, paths: list[str]
) -> None:
    assert list(changed_fields(before, after)) == paths


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"rollout": {"maxSurge": 2}},
        {"monitoring": {"scrapeFrom": []}},
        {"verification": {"maxLocalShare": 7}},
        {"operatorClass": "blue"},
        {"scheduling": {"queueName": "team-a"}},
        {"router": {"policy": "Random"}},
        {"prefill": {"replicas": 4}, "decode": {"replicas": 5}},
    ],
    ids=lambda spec: next(iter(spec)),
)
def test_what_is_no_part_of_an_engine_is_no_change_of_it(elsewhere: dict[str, Any]) -> None:
    """It is not named as the cause of a rollout, and a step back leaves it as it is."""
    before, after = manifest()["spec"], {**manifest(**elsewhere)["spec"], **ONE_VARIABLE}
    old, new = spec_of_engines({"spec": before}), spec_of_engines({"spec": after})
    assert list(changed_fields(old, new)) == ["engine.env"]
    assert with_spec_of_engines(after, old) == {**before, **elsewhere}


def stored_as(one: Revision) -> dict[str, Any]:
    return build_revision(parse_cluster(manifest()).cluster, one)


def test_a_revision_is_read_as_it_was_stored() -> None:
    world = up()
    whole, _ = stored_revisions(world.observed())
    template = copy.deepcopy(dict(whole.template))
    template["metadata"]["labels"][PAIRING_LABEL] = "key"
    one = replace(
        whole, pairing_key="key", connector="c0ffee", nodes=3, renew="today", number=7,
        spec={"engine": {"blockSize": 8}}, template=template,
    )  # fmt: skip
    assert list(revisions_in([stored_as(one)])) == [one]
    old = stored_as(one)
    old["data"] = {"template": old["data"]["template"]}
    assert list(revisions_in([old])) == [
        replace(one, connector="", nodes=1, renew="", spec={}),
    ], "what an older operator did not store"
