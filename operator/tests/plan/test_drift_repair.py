"""The patch that repairs an object which an apply alone cannot set right."""

from __future__ import annotations

from pdcluster_operator.plan.drift import repair

LIVE = {
    "metadata": {"name": "tiny", "resourceVersion": "7"},
    "spec": {"ports": [{"name": "http", "port": 9}], "clusterIP": "10.0.0.1"},
}


def test_the_whole_spec_is_merged_into_the_version_that_was_seen() -> None:
    desired = {"metadata": {"name": "tiny"}, "spec": {"ports": [{"name": "http", "port": 8000}]}}
    assert repair(LIVE, desired) == {
        "metadata": {"resourceVersion": "7"},
        "spec": {"ports": [{"name": "http", "port": 8000}]},
    }


def test_an_object_without_a_spec_has_no_repair() -> None:
    assert repair(LIVE, {"metadata": {"name": "tiny"}, "data": {"a": "1"}}) is None
