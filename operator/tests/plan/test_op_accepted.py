"""Accepted, and the warnings that nobody may have seen."""

from __future__ import annotations

from simulated_cluster import SimulatedCluster, manifest

from pdcluster_operator.api.conditions import yes
from pdcluster_operator.api.findings import FieldError, Findings
from pdcluster_operator.plan.status.engine_conditions import with_warnings


def test_accepted_names_the_warnings():
    world = SimulatedCluster(manifest(decode={"replicas": 0}))
    world.step()
    accepted = world.condition("Accepted")
    assert accepted["status"] == "True"
    assert "Not checked yet: " in accepted["message"]
    assert "the block size of the KV cache (engine.blockSize)" in accepted["message"]
    assert "spec.decode.replicas [NothingToPair]" in accepted["message"]


def test_an_error_is_not_drowned_in_warnings():
    world = SimulatedCluster(manifest(decode={"replicas": 0}, engine={"blockSize": 0}))
    world.step()
    accepted = world.condition("Accepted")
    assert accepted["status"] == "False"
    assert "NothingToPair" not in accepted["message"]


def test_without_a_warning_nothing_is_added():
    assert with_warnings(yes("PartiallyChecked", "x"), Findings()) == yes("PartiallyChecked", "x")
    warning = FieldError("spec.engine.image", "x", "ImageNotPinned", "moves", "Name a release.")
    said = with_warnings(yes("PartiallyChecked"), Findings(warnings=(warning,)))
    assert said.message == "Warnings: spec.engine.image [ImageNotPinned]."
