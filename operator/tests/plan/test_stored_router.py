"""A router's template is not rendered again: only what a user changes replaces routers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from simulated_cluster import SimulatedCluster, brought_up, manifest
from valid_specs import manifests

from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.plan.builders import router
from pdcluster_operator.plan.rollout import routing
from pdcluster_operator.plan.types import Apply, ConnectorBundle

RENDERED = "pdcluster.dev/rendered"
NEWER = ConnectorBundle("d" * 64, b"newer")
DEFAULT = "RoundRobin"
KEY = {"apiKeySecretRef": {"name": "api"}}


def up(**spec: Any) -> SimulatedCluster:
    return brought_up(**spec)


def deployment(world: SimulatedCluster) -> dict[str, Any]:
    (found,) = (child for (kind, _), child in world.children.items() if kind == "Deployment")
    return found


def template(world: SimulatedCluster) -> dict[str, Any]:
    found: dict[str, Any] = deployment(world)["spec"]["template"]
    return found


def period(world: SimulatedCluster) -> int:
    seconds: int = template(world)["spec"]["containers"][0]["readinessProbe"]["periodSeconds"]
    return seconds


def engines(world: SimulatedCluster) -> list[str]:
    words = template(world)["spec"]["containers"][0]["args"]
    return [word for word in words if "://" in word]


def roll(world: SimulatedCluster) -> None:
    for _ in range(8):
        world.step()
        world.others_act()
    world.settle()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Lets an upgraded operator render another pod, when it is told to."""
    with monkeypatch.context() as patch:
        yield patch


def upgrade(later: pytest.MonkeyPatch) -> None:
    later.setattr(router, "PROBE_SECONDS", 9)


@pytest.mark.parametrize("router", [{}, KEY], ids=["plain", "key"])
def test_another_builder_replaces_no_router(later: pytest.MonkeyPatch, router: Any) -> None:
    world = up(router=router)
    before = template(world)
    upgrade(later)
    world.connector = NEWER
    assert world.plan().steps == ()
    # Nor does a change that no router's pod sees: this is judged by rendering both specs.
    world.edit(router={**router, "replicas": 3})
    world.settle()
    assert deployment(world)["spec"]["replicas"] == 3
    assert template(world) == before


@pytest.mark.parametrize(
    "change",
    [{"router": {"policy": "Random"}}, {"requestTimeoutSeconds": 77}],
    ids=["policy", "timeout"],
)
def test_a_change_of_the_router_brings_the_new_builder(
    later: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    world = up()
    assert period(world) == 1
    upgrade(later)
    world.edit(**change)
    roll(world)
    assert period(world) == 9


def test_another_type_of_the_service_replaces_no_router() -> None:
    world = up(router={"replicas": 1})
    before = template(world)
    world.edit(router={"replicas": 1, "service": {"type": "NodePort"}})
    world.settle()
    assert template(world) == before
    (service,) = (
        child
        for (kind, name), child in world.children.items()
        if kind == "Service" and name.endswith("-router")
    )
    assert service["spec"]["type"] == "NodePort"


def test_a_change_back_to_what_was_rendered_is_rendered_anew(later: pytest.MonkeyPatch) -> None:
    """The annotation follows each rendering: an older template never comes back."""
    world = up(router={"policy": "RoundRobin"})
    upgrade(later)
    world.edit(router={"policy": "Random"})
    roll(world)
    world.edit(router={"policy": "RoundRobin"})
    roll(world)
    assert period(world) == 9


def test_another_connector_of_the_engines_brings_the_new_builder(
    later: pytest.MonkeyPatch,
) -> None:
    world = up(router=KEY)
    upgrade(later)
    world.connector = NEWER
    world.edit(rollout={"renew": "1"})
    roll(world)
    assert period(world) == 9
    names = [one["configMap"]["name"] for one in template(world)["spec"]["volumes"]]
    assert names == ["pdcluster-connector-dddddddddddddddd"]


def test_an_older_template_gets_the_engines_of_today(later: pytest.MonkeyPatch) -> None:
    world = up()
    assert len(engines(world)) == 2
    upgrade(later)
    world.edit(decode={"replicas": 2})
    roll(world)
    assert len(engines(world)) == 3
    assert period(world) == 1


def test_a_field_that_a_later_version_adds_with_a_default_replaces_no_router(
    later: pytest.MonkeyPatch,
) -> None:
    world = up(router={"replicas": 1})
    upgrade(later)
    world.edit(router={"replicas": 1, "policy": DEFAULT})  # as by a default of the CRD
    world.settle()
    default = period(world)
    world.edit(router={"replicas": 1})
    world.settle()
    assert default == period(world) == 1


def test_what_somebody_changes_by_hand_is_set_to_the_older_template(
    later: pytest.MonkeyPatch,
) -> None:
    world = up()
    upgrade(later)
    template(world)["spec"]["containers"][0]["readinessProbe"]["periodSeconds"] = 5
    world.settle()
    assert period(world) == 1


def test_a_router_of_an_operator_that_stored_no_template_is_not_replaced() -> None:
    world = up(router=KEY)
    del deployment(world)["metadata"]["annotations"][RENDERED]
    before = template(world)
    (step,) = world.step().steps
    assert isinstance(step, Apply)
    assert step.manifest["kind"] == "Deployment"
    assert template(world) == before
    assert world.plan().steps == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"spec": {}, "template": {}}',
        '{"spec": {}, "template": {"metadata": {"labels": []}, "spec": {}}}',
    ],
    ids=["empty", "broken", "list", "deep", "nothing", "wrong types"],
)
def test_an_annotation_that_cannot_be_read_is_written_anew(text: str) -> None:
    world = up()
    whole = deployment(world)["metadata"]["annotations"][RENDERED]
    deployment(world)["metadata"]["annotations"][RENDERED] = text
    world.settle()
    assert deployment(world)["metadata"]["annotations"][RENDERED] == whole


@pytest.mark.parametrize("bent", ["labels", "containers", "arguments", "spec"])
def test_a_stored_template_that_cannot_be_used_is_rendered_anew(
    later: pytest.MonkeyPatch, bent: str
) -> None:
    """Somebody wrote into it. The API server would refuse the first, and no pod is of the rest."""
    world = up()
    annotations = deployment(world)["metadata"]["annotations"]
    stored = json.loads(annotations[RENDERED])
    if bent == "labels":
        stored["template"]["metadata"]["labels"] = {"of": "somebody else"}
    elif bent == "containers":
        stored["template"]["spec"]["containers"] = ["router"]
    elif bent == "arguments":
        stored["template"]["spec"]["containers"][0]["args"] = [["--prefill"]]
    else:
        stored["spec"] = {"router": {"replicas": "many"}}
    annotations[RENDERED] = json.dumps(stored)
    upgrade(later)
    world.settle()
    assert period(world) == 9


@given(manifests())
def test_routers_are_made_from_nothing_but_the_parts_that_are_compared(
    drawn: dict[str, Any],
) -> None:
    """A change of another field that the builder reads would never reach a router."""
    source = {"source": {"hostPath": {"path": "/models/tiny"}}}
    parts = {part: drawn["spec"][part] for part in routing.PARTS if part in drawn["spec"]}
    alone = {**drawn, "spec": {"model": source, **parts}}
    whole, few = parse_cluster(drawn).cluster, parse_cluster(alone).cluster
    assert router.build_router_template(whole, "key", "connector") == router.build_router_template(
        few, "key", "connector"
    )


def test_routers_stay_with_the_connector_of_prefill_when_decode_alone_gets_another() -> None:
    """Two roles may mount two connectors. The gate needs one, and prefill's stays."""
    world = up(router=KEY)
    mounted = [one["configMap"]["name"] for one in template(world)["spec"]["volumes"]]
    world.connector = NEWER
    world.edit(decode={"engine": {"env": [{"name": "A", "value": "1"}]}})
    roll(world)
    assert [one["configMap"]["name"] for one in template(world)["spec"]["volumes"]] == mounted


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_engines_of_a_role_there_is_no_router_to_send_to_the_others(role: str) -> None:
    world = SimulatedCluster(manifest(**{role: {"replicas": 0}}))
    for _ in range(3):
        world.step()
        assert not [name for kind, name in world.children if kind == "Deployment"]
        world.others_act()
