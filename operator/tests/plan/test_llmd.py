"""Engines behind llm-d's router: labels, the sidecar and ports, and a change of the type."""

from __future__ import annotations

import json
from typing import Any

import pytest
from simulated_cluster import SimulatedCluster, brought_up, manifest

from pdcluster_connector.vllm.config import parse_options
from pdcluster_operator.api.object_names import EngineName, engine_of
from pdcluster_operator.api.spec import resolve
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.builders.engine_objects import build_engine_pod

LLMD = {"type": "LLMD"}


def pod(role: Role, **spec: Any) -> dict[str, Any]:
    parsed = parse_cluster(manifest(**spec))
    assert not parsed.errors
    cluster = parsed.cluster
    name = EngineName(cluster.namespace, cluster.name, role, "aaaaa", 0)
    return build_engine_pod(cluster, resolve.resolve_engine(cluster, role), name, "key", "d" * 64)


def words(template: dict[str, Any]) -> list[str]:
    args: list[str] = template["spec"]["containers"][0]["args"]
    return args[args.index("--") + 1 :]


def value(template: dict[str, Any], flag: str) -> str:
    found = words(template)
    return found[found.index(flag) + 1]


def connector_options(template: dict[str, Any]) -> dict[str, Any]:
    config = json.loads(value(template, "--kv-transfer-config"))
    options: dict[str, Any] = config["kv_connector_extra_config"]
    return options


def test_the_sidecar_takes_the_port_of_decode_and_its_engine_listens_on_loopback_behind_it() -> (
    None
):
    decode = pod(Role.DECODE, router=LLMD)
    (sidecar,) = decode["spec"]["initContainers"]
    assert sidecar["args"] == ["--port=8000", "--kv-connector=nixlv2", "--secure-proxy=false"]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["securityContext"]["runAsNonRoot"] is True
    assert (value(decode, "--host"), value(decode, "--port")) == ("127.0.0.1", "8200")
    assert parse_options(connector_options(decode)).router_may_skip_prefill


def test_prefill_has_no_sidecar_and_listens_where_the_header_says() -> None:
    prefill = pod(Role.PREFILL, router=LLMD)
    assert "initContainers" not in prefill["spec"]
    assert (value(prefill, "--host"), value(prefill, "--port")) == ("0.0.0.0", "8000")
    assert "router_may_skip_prefill" not in connector_options(prefill)


@pytest.mark.parametrize("role", Role)
def test_pods_have_the_labels_that_llmd_filters_by_and_no_template_takes_them(role: Role) -> None:
    others = {"llm-d.ai/role": "both", "llm-d.ai/model": "mine"}
    template = {"metadata": {"labels": others}}
    labels = pod(role, router=LLMD, **{role.value: {"podTemplate": template}})["metadata"]["labels"]
    assert labels["llm-d.ai/role"] == role.value
    assert labels["llm-d.ai/inference-serving"] == "true"
    assert labels["llm-d.ai/model"] == "mine"
    assert labels["pdcluster.dev/pairing-key"] == "key"


def test_a_template_can_change_the_sidecar_by_its_name() -> None:
    overlay = {"name": "routing-proxy", "resources": {"requests": {"cpu": "1"}}}
    template = {"spec": {"initContainers": [overlay]}}
    decode = pod(Role.DECODE, router=LLMD, decode={"podTemplate": template})
    (sidecar,) = decode["spec"]["initContainers"]
    assert sidecar["resources"] == overlay["resources"]
    assert sidecar["args"][0] == "--port=8000"


@pytest.mark.parametrize("router", [{}, {"type": "None"}, {"replicas": 0}], ids=str)
def test_with_another_router_nothing_of_llmd_is_there(router: dict[str, Any]) -> None:
    for role in Role:
        text = json.dumps(pod(role, router=router))
        assert "llm-d" not in text
        assert "router_may_skip_prefill" not in text


def stateful_sets(world: SimulatedCluster) -> dict[str, dict[str, Any]]:
    return {
        name: child["spec"]["template"]
        for (kind, name), child in world.children.items()
        if kind == "StatefulSet" and engine_of(child)
    }


def kinds(world: SimulatedCluster) -> set[str]:
    return {kind for kind, _ in world.children}


def roll(world: SimulatedCluster) -> None:
    for _ in range(8):
        world.step()
        world.others_act()
    world.settle()


@pytest.mark.parametrize("router", [LLMD, {"type": "None"}], ids=["llmd", "none"])
def test_without_a_router_of_ours_there_is_none_and_the_cluster_is_ready(
    router: dict[str, Any],
) -> None:
    world = brought_up(router=router)
    assert "Deployment" not in kinds(world)
    assert ("Service", "llama-router") not in world.children
    assert world.condition("Ready")["status"] == "True"


def test_type_none_is_what_no_replicas_are() -> None:
    one, other = brought_up(router={"type": "None"}), brought_up(router={"replicas": 0})
    assert one.children.keys() == other.children.keys()


def test_a_router_that_is_taken_away_replaces_no_engine() -> None:
    world = brought_up()
    before = stateful_sets(world)
    world.edit(router={"type": "None"})
    roll(world)
    assert stateful_sets(world) == before
    assert "Deployment" not in kinds(world)


def test_a_change_to_llmd_replaces_the_engines_of_both_roles() -> None:
    world = brought_up()
    before = stateful_sets(world)
    world.edit(router=LLMD)
    roll(world)
    after = stateful_sets(world)
    assert not before.keys() & after.keys()
    assert all("llm-d.ai/role" in one["metadata"]["labels"] for one in after.values())
    world.edit(router={**LLMD, "sidecarImage": "registry.example/sidecar:v1"})
    roll(world)
    last = stateful_sets(world)
    changed = {name.split("-")[-3] for name in last.keys() - after.keys()}
    assert changed == {"decode"}, "prefill has no sidecar"
