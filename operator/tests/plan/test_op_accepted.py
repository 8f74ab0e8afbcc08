"""Accepted, and the warnings that nobody may have seen."""

from __future__ import annotations

import pytest
from simulated_cluster import SimulatedCluster, manifest

from pdcluster_operator.api.conditions import yes
from pdcluster_operator.api.findings import FieldError, Findings
from pdcluster_operator.plan.status.conditions import accepted


def test_accepted_names_the_warnings():
    world = SimulatedCluster(manifest(decode={"replicas": 0}))
    world.step()
    said = world.condition("Accepted")
    assert said["status"] == "True"
    assert "Not checked yet: " in said["message"]
    assert "the block size of the KV cache (engine.blockSize)" in said["message"]
    assert "spec.decode.replicas [NothingToPair]" in said["message"]


def test_an_error_is_not_drowned_in_warnings():
    world = SimulatedCluster(manifest(decode={"replicas": 0}, engine={"blockSize": 0}))
    world.step()
    said = world.condition("Accepted")
    assert said["status"] == "False"
    assert "NothingToPair" not in said["message"]


@pytest.mark.parametrize(("count", "tail"), [(5, "4: bad"), (6, "and 1 more"), (9, "and 4 more")])
def test_five_errors_are_shown_and_the_others_counted(count, tail):
    errors = tuple(FieldError(f"spec.{n}", "", f"Rule{n}", "bad", "") for n in range(count))
    found = accepted(Findings(errors=errors))
    assert found.reason == "Rule0"
    shown = found.message.split("; ")
    assert len([part for part in shown if part.startswith("spec.")]) == 5
    assert tail in shown[-1]


def test_without_a_warning_nothing_is_added():
    assert accepted(Findings()) == yes("PartiallyChecked")
    assert accepted(Findings(model="Two layers.")) == yes("ModelChecked", "Two layers.")
    warning = FieldError("spec.engine.image", "x", "ImageNotPinned", "moves", "Name a release.")
    said = accepted(Findings(warnings=(warning,)))
    assert said.message == "Warnings: spec.engine.image [ImageNotPinned]."
