"""The Secret with the ticket keys, as the planner sees it: never a key."""

from __future__ import annotations

import json
from typing import Any

import pytest
from simulated_cluster import SimulatedCluster, manifest as cluster

from pdcluster_operator.api.object_names import ROTATE_TICKET_KEY_ANNOTATION
from pdcluster_operator.plan.builders.secrets import TICKET_KEY_VOLUME
from pdcluster_operator.plan.types import WriteTicketKey


def key_steps(world: SimulatedCluster) -> list[WriteTicketKey]:
    return [step for step in world.plan().steps if isinstance(step, WriteTicketKey)]


def engines(world: SimulatedCluster) -> list[dict[str, Any]]:
    return [child for child in world.children.values() if child["kind"] == "StatefulSet"]


def transfer_config(engine: dict[str, Any]) -> dict[str, Any]:
    args = engine["spec"]["template"]["spec"]["containers"][0]["args"]
    return json.loads(args[args.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]


def test_the_secret_comes_first_and_once() -> None:
    world = SimulatedCluster(cluster())
    first = world.plan().steps[0]
    assert isinstance(first, WriteTicketKey)
    assert not first.rotate
    name = world.cluster["metadata"]["name"]
    assert first.manifest["metadata"]["name"] == f"{name}-ticket-key"
    [owner] = first.manifest["metadata"]["ownerReferences"]
    assert owner["uid"] == world.cluster["metadata"]["uid"]
    assert not {"data", "stringData", "immutable"} & first.manifest.keys()
    world.settle()
    assert key_steps(world) == []


def test_a_secret_that_was_deleted_is_made_again() -> None:
    world = SimulatedCluster(cluster())
    world.settle()
    world.ticket_key = None
    [step] = key_steps(world)
    assert not step.rotate


@pytest.mark.parametrize("value", ["1", "2026-11-22", "x y"])
def test_each_new_value_of_the_annotation_asks_for_one_rotation(value: str) -> None:
    world = SimulatedCluster(cluster())
    world.settle()
    templates = [engine["spec"]["template"] for engine in engines(world)]
    world.cluster["metadata"]["annotations"] = {ROTATE_TICKET_KEY_ANNOTATION: value}
    [step] = world.plan().steps
    assert isinstance(step, WriteTicketKey)
    assert step.rotate
    world.settle()
    assert [engine["spec"]["template"] for engine in engines(world)] == templates
    del world.cluster["metadata"]["annotations"]
    assert world.plan().steps == ()


def test_engines_mount_the_keys_as_files_and_routers_do_not() -> None:
    world = SimulatedCluster(cluster())
    world.settle()
    for engine in engines(world):
        pod = engine["spec"]["template"]["spec"]
        [volume] = [one for one in pod["volumes"] if one["name"] == TICKET_KEY_VOLUME]
        [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == volume["name"]]
        assert mount["readOnly"]
        assert "subPath" not in mount, "the kubelet updates no subPath"
        file = transfer_config(engine)["ticket_key_file"]
        assert file.startswith(f"{mount['mountPath']}/")
    for child in world.children.values():
        if child["kind"] == "Deployment":
            assert "ticket-key" not in json.dumps(child)


def test_tickets_are_for_engines_of_one_cluster_and_one_pairing_key() -> None:
    def audience(**changes: Any) -> str:
        document = cluster()
        document["metadata"] |= {k: v for k, v in changes.items() if k != "block_size"}
        if "block_size" in changes:
            document["spec"].setdefault("engine", {})["blockSize"] = changes["block_size"]
        world = SimulatedCluster(document)
        world.settle()
        found = {transfer_config(engine)["ticket_audience"] for engine in engines(world)}
        assert len(found) == 1, "prefill and decode agree"
        return found.pop()

    others = [audience(name="other"), audience(namespace="other"), audience(block_size=64)]
    assert len({audience(), *others}) == 4
