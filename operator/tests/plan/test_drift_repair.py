"""The patch that repairs an object which an apply alone cannot set right."""

from __future__ import annotations

import copy

import pytest

from pdcluster_operator.plan.objects.drift import (
    covers,
    differences,
    repair,
    stamped,
    without_manager,
)

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


def test_a_field_manager_is_taken_off_an_object() -> None:
    entries = [{"manager": "ours"}, {"manager": "ours-repair"}, {"manager": "kubectl"}]
    live = {"metadata": {"resourceVersion": "7", "managedFields": entries}}
    assert without_manager(live, "ours-repair") == {
        "metadata": {"resourceVersion": "7", "managedFields": [entries[0], entries[2]]}
    }
    assert without_manager(live, "another") is None
    assert without_manager({"metadata": {"resourceVersion": "7"}}, "ours") is None


def test_the_order_of_fields_is_no_change() -> None:
    """A user's pod template may have them in another order, and is applied as it is written."""
    one = {"metadata": {"name": "tiny"}, "spec": {"a": 1, "b": {"c": 2, "d": 3}}}
    other = {"spec": {"b": {"d": 3, "c": 2}, "a": 1}, "metadata": {"name": "tiny"}}
    assert stamped(one) == stamped(other)
    assert stamped(one) != stamped({**one, "spec": {"a": 1}})


@pytest.mark.parametrize(
    ("field", "path"),
    [("selector", "spec.selector"), ("podSelector", "spec.podSelector.matchLabels")],
)
def test_a_label_more_in_a_selector_selects_other_objects(field: str, path: str) -> None:
    labels = {"a": "1"}
    ours = {"spec": {field: {"matchLabels": labels} if field == "podSelector" else labels}}
    theirs = copy.deepcopy(ours)
    (theirs["spec"][field].get("matchLabels") or theirs["spec"][field])["b"] = "2"
    assert [one for one, _ in differences(theirs, ours)] == [path]
    assert covers(ours, ours)
