"""Every scenario's first plan, against the files in ``golden/``.

To regenerate after a change that is meant, and read the difference before committing it:

    PDCLUSTER_REGENERATE=1 python -m pytest operator/tests/plan/test_op_golden.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from simulated_cluster import CONNECTOR, START

from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.types import (
    Apply,
    Observed,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
)

HERE = Path(__file__).parent
SCENARIOS = sorted(path.stem for path in (HERE / "scenarios").glob("*.yaml"))
REGENERATE = "PDCLUSTER_REGENERATE"


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data):
        return True


def rendered(scenario: str) -> str:
    cluster = yaml.safe_load((HERE / "scenarios" / f"{scenario}.yaml").read_text())
    plan = make_plan(Observed(cluster, (), (), {}, {}, CONNECTOR), START)
    documents = []
    for step in plan.steps:
        assert isinstance(step, Apply | TryOut | WriteTicketKey | WriteCertificates)
        verb = "apply" if isinstance(step, Apply | TryOut) else "write"
        documents.append({"why": step.why, verb: step.manifest})
    documents.append({"status": plan.status})
    return yaml.dump_all(
        documents, Dumper=_NoAliases, sort_keys=False, width=10_000, explicit_start=True
    )


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_plan_is_as_it_was_agreed(scenario):
    golden = HERE / "golden" / f"{scenario}.yaml"
    text = rendered(scenario)
    if os.environ.get(REGENERATE):
        golden.write_text(text)
    assert text == golden.read_text(), f"differs; if it is meant, run with {REGENERATE}=1"


def test_no_golden_file_without_a_scenario():
    assert sorted(path.stem for path in (HERE / "golden").glob("*.yaml")) == SCENARIOS
