"""The benchmark's plans at rest are at rest, and their numbers stand in the report."""

from __future__ import annotations

from bench_operator import plan_at_rest
from bench_operator.report import COLUMNS


def test_a_pdcluster_at_rest_is_ready() -> None:
    observed, _ = plan_at_rest.at_rest(2)
    ready = {one["type"]: one["status"] for one in observed.cluster["status"]["conditions"]}
    assert ready["Ready"] == "True"
    assert len(observed.engines) == 4


def test_each_number_is_a_row_of_the_report() -> None:
    found = {"plan_at_rest": plan_at_rest.measured()}
    rows = {name: read(found) for name, read in COLUMNS if name.startswith("a plan at rest")}
    assert len(rows) == len(plan_at_rest.PLANS)
    for row in rows.values():
        least, middle = map(float, str(row).split(", "))
        assert 0 < least <= middle
