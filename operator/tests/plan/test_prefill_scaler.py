"""A PrefillScaler decides how many prefill engines there are."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from simulated_cluster import SimulatedCluster, brought_up, manifest

from pdcluster_operator.api.schema.scaler_crd import scaler_crd
from pdcluster_operator.plan.prefill_scaler import as_scaled

SCHEMA = scaler_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def scaler(replicas: Any) -> dict[str, Any]:
    return {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PrefillScaler",
        "metadata": {"name": "llama", "namespace": "default", "uid": "scaler"},
        "spec": {"replicas": replicas},
    }


def counts(world: SimulatedCluster) -> tuple[int, int]:
    return len(world.leaders("prefill")), len(world.leaders("decode"))


def test_it_decides_while_it_exists_and_says_what_exists() -> None:
    world = SimulatedCluster(manifest(prefill={"replicas": 2}))
    world.scaler = scaler(3)
    world.bring_up()
    assert counts(world) == (3, 1)
    assert world.scaler["status"] == {
        "replicas": 3,
        "selector": "pdcluster.dev/cluster=llama,pdcluster.dev/role=prefill,"
        "apps.kubernetes.io/pod-index=0",
    }
    jsonschema.validate(world.scaler, SCHEMA)
    assert world.cluster["status"]["prefill"] == "3/3"
    assert world.plan().scaler is None, "nothing is written at rest"
    world.scaler["spec"]["replicas"] = 1
    world.step()
    world.reap()
    world.settle()
    assert counts(world) == (1, 1)
    assert world.scaler["status"]["replicas"] == 1
    assert world.cluster["spec"]["prefill"] == {"replicas": 2}, "the user's own words stay"
    world.scaler = None
    world.reap()
    world.settle()
    assert counts(world) == (2, 1)


def test_all_else_of_the_prefill_engines_stays() -> None:
    spec = {"prefill": {"replicas": 1, "podTemplate": {"metadata": {}}},
            "decode": {"replicas": 4, "parallelism": {"tensor": 2}}}  # fmt: skip
    found = as_scaled(manifest(**spec), scaler(3))["spec"]
    assert found["prefill"] == {"replicas": 3, "podTemplate": {"metadata": {}}}
    assert found["decode"] == spec["decode"]


@pytest.mark.parametrize("spec", [None, [], "text", 7, {"prefill": [1]}, {"decode": "text"}])
def test_a_spec_of_another_shape_is_left_to_the_rules(spec: Any) -> None:
    cluster = {**manifest(), "spec": spec}
    assert as_scaled(cluster, scaler(3)) is cluster


def test_scaling_prefill_replaces_no_engine() -> None:
    world = brought_up()
    before = {name: child["metadata"]["uid"] for (_, name), child in world.children.items()}
    world.scaler = scaler(2)
    world.settle()
    assert counts(world) == (2, 1)
    after = {name: child["metadata"]["uid"] for (_, name), child in world.children.items()}
    engines = {name for name in before if "-prefill-" in name or "-decode-" in name}
    assert all(after[name] == before[name] for name in engines)


def test_rules_hold_for_its_number_too() -> None:
    world = brought_up()
    world.scaler = scaler(1001)
    world.step()
    condition = world.condition("Accepted")
    assert condition["status"] == "False"
    assert "spec.prefill.replicas" in condition["message"]
    assert counts(world) == (1, 1)


def test_one_that_is_being_deleted_decides_nothing() -> None:
    world = SimulatedCluster(manifest())
    world.scaler = scaler(3)
    world.scaler["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    world.step()
    assert counts(world) == (1, 1)
    assert world.plan().scaler is None


@pytest.mark.parametrize("spec", [{"prefill": 3}, {"decode": "two"}, {"prefill": None}, {}])
def test_a_spec_of_any_shape_can_be_scaled(spec: dict[str, Any]) -> None:
    world = SimulatedCluster(manifest(**spec))
    world.scaler = scaler(2)
    world.step()
    unreadable = spec.get("prefill") == 3 or "decode" in spec
    assert counts(world)[0] == (0 if unreadable else 2)


def test_zero_is_a_state() -> None:
    world = SimulatedCluster(manifest())
    world.scaler = scaler(0)
    world.settle()
    assert counts(world) == (0, 1)
    assert world.condition("PrefillReady")["reason"] == "ScaledToZero"


@pytest.mark.parametrize(
    ("asked", "least", "most", "decode", "engines"),
    [
        (9, None, 200, 2, 4),
        (4, None, 200, 2, 4),
        (9, None, 50, 1, 1),
        (0, 50, None, 3, 2),
        (2, 50, 100, 3, 2),
        (5, 25, 100, 0, 0),
    ],
)
def test_its_bounds_follow_the_decode_engines(
    asked: int, least: int | None, most: int | None, decode: int, engines: int
) -> None:
    world = SimulatedCluster(manifest(decode={"replicas": decode}))
    world.scaler = scaler(asked)
    bounds = {"minPercentOfDecode": least, "maxPercentOfDecode": most}
    world.scaler["spec"] |= {name: share for name, share in bounds.items() if share is not None}
    jsonschema.validate(world.scaler, SCHEMA)
    world.step()
    assert counts(world)[0] == engines
    said = world.condition("PrefillReady")["message"]
    assert "PrefillScaler llama decides how many" in said
    assert (f"it asks for {asked}" in said) is (engines != asked)
    # More decode engines allow, and ask for, more prefill engines.
    world.edit(decode={"replicas": 2 * decode})
    world.step()
    assert counts(world)[0] >= engines


@pytest.mark.parametrize(
    ("bound", "asked", "decode", "prefill"),
    [
        ({"maxPercentOfDecode": 100}, 900, 300, 300),
        ({"minPercentOfDecode": 30}, 1, 200, 60),
        ({"minPercentOfDecode": 30}, 1, 201, 61),
        ({"minPercentOfDecode": 1}, 0, 1, 1),
        ({"maxPercentOfDecode": 10_000}, 900, 3, 300),
    ],
)
def test_a_bound_is_a_percentage_rounded_up(
    bound: dict[str, int], asked: int, decode: int, prefill: int
) -> None:
    one = scaler(asked)
    one["spec"] |= bound
    scaled = as_scaled(manifest(decode={"replicas": decode}), one)
    assert scaled["spec"]["prefill"]["replicas"] == prefill


def test_without_a_scaler_nobody_says_that_it_decides() -> None:
    world = SimulatedCluster(manifest())
    world.step()
    assert "PrefillScaler" not in world.condition("PrefillReady")["message"]


@pytest.mark.parametrize("replicas", ["2", 1.5, [1], {}])
@pytest.mark.parametrize("bounds", [{}, {"minPercentOfDecode": 50}, {"maxPercentOfDecode": 50}])
def test_without_a_number_of_decode_engines_the_rules_say_what_is_wrong(
    replicas: Any, bounds: dict[str, int]
) -> None:
    world = SimulatedCluster(manifest(decode={"replicas": replicas}))
    world.scaler = scaler(2)
    world.scaler["spec"] |= bounds
    world.step()
    assert world.condition("Accepted")["reason"] == "WrongType"
    assert "spec.decode.replicas" in world.condition("Accepted")["message"]
    assert "PrefillScaler" not in world.condition("PrefillReady")["message"]


@pytest.mark.parametrize(("prefill", "decode"), [(3, 1), (1, 3), (2, 2)])
def test_its_status_counts_prefill_engines_alone(prefill: int, decode: int) -> None:
    world = SimulatedCluster(manifest(decode={"replicas": decode}))
    world.scaler = scaler(prefill)
    world.settle()
    assert world.scaler["status"]["replicas"] == prefill
    assert "role=prefill" in world.scaler["status"]["selector"]


def test_a_spec_that_says_no_number_of_decode_engines_has_one() -> None:
    world = SimulatedCluster(manifest())
    world.scaler = scaler(9)
    world.scaler["spec"]["maxPercentOfDecode"] = 300
    world.step()
    assert counts(world) == (3, 1)


@pytest.mark.parametrize("field", ["minPercentOfDecode", "maxPercentOfDecode"])
def test_a_share_is_at_least_one_percent_and_at_most_a_hundredfold(field: str) -> None:
    def is_taken(percent: int) -> bool:
        wanted = scaler(1)
        wanted["spec"][field] = percent
        return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(wanted))

    taken = {percent: is_taken(percent) for percent in (0, 1, 10_000, 10_001)}
    assert taken == {0: False, 1: True, 10_000: True, 10_001: False}


def test_its_only_version_is_served_stored_and_can_be_scaled() -> None:
    (version,) = scaler_crd()["spec"]["versions"]
    assert (version["name"], version["served"], version["storage"]) == ("v1alpha1", True, True)
    paths = version["subresources"]["scale"]
    world = SimulatedCluster(manifest())
    world.scaler = scaler(2)
    world.settle()
    for field, value in (("specReplicasPath", 2), ("statusReplicasPath", 2)):
        _, part, name = paths[field].split(".")
        assert world.scaler[part][name] == value


@pytest.mark.parametrize("spec", [None, {}, {"maxPercentOfDecode": 50}, {"replicas": None}])
def test_a_scaler_that_asks_for_no_number_decides_nothing(spec: Any) -> None:
    world = SimulatedCluster(manifest(prefill={"replicas": 2}))
    world.scaler = {**scaler(1), "spec": spec}
    world.step()
    assert counts(world) == (2, 1)
    assert "PrefillScaler" not in world.condition("PrefillReady")["message"]


def test_a_number_of_decode_engines_that_cannot_be_is_the_only_thing_that_is_wrong() -> None:
    """Its share would be below zero, too, and a second error would name another field."""
    world = SimulatedCluster(manifest(decode={"replicas": -2}))
    world.scaler = scaler(3)
    world.scaler["spec"]["maxPercentOfDecode"] = 100
    world.step()
    said = world.condition("Accepted")["message"]
    assert "spec.decode.replicas" in said
    assert "spec.prefill.replicas" not in said


def test_its_status_is_for_the_scaler_that_was_seen() -> None:
    """One that is made again meanwhile has another UID, and gets its own status."""
    world = SimulatedCluster(manifest())
    world.scaler = scaler(2)
    written = world.plan().scaler
    assert written is not None
    assert written.uid == "scaler"
