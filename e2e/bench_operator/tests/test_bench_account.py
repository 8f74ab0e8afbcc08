"""What the benchmark reads from the audit log, and when its gate refuses a run."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bench_operator import account
from bench_operator.thresholds import (
    BOUNDS,
    QUIET,
    REFUSING,
    Bound,
    Expected,
    missed,
    missed_on,
)

GOOD = {
    "pdclusters": 1000,
    "share_of_raw_objects": 0.8,
    "reads_of_one": 1.5,
    "writes_of_one": 16.5,
    "rest": {"core": 0.06, "writes": {"leases": 12}},
    "restart": {"writes": {"leases": 3}, "rss_peak_megabytes": 399},
    "reaction_seconds": {"p99": 0.9},
    "plan_at_rest": {"milliseconds_1p1d": {"min": 0.4}, "milliseconds_64p64d": {"min": 0.9}},
    "rss_peak_megabytes": 299,
}


def line(
    resource: str, *, user: str = "operator", second: int = 0, query: str = "", part: str = ""
):
    return {
        "user": {"username": user},
        "requestURI": f"/apis/x/v1/namespaces/bench/{resource}/one?fieldManager=x{query}",
        "objectRef": {
            "resource": resource,
            "namespace": "bench",
            "name": "one",
            **({"subresource": part} if part else {}),
        },
        "stageTimestamp": f"2026-01-01T00:00:{second:02}.500000Z",
    }


def test_requests_are_counted_by_resource_and_dry_runs_apart() -> None:
    lines = [
        line("services"),
        line("services", query="&dryRun=All"),
        line("pdclusters", part="status"),
        line("services", user="admin"),
    ]
    ours = account.of_operator(lines, "bench")
    assert account.by_resource(ours) == {
        "services": 1,
        "services (dry run)": 1,
        "pdclusters/status": 1,
    }
    assert account.of_operator(lines, "raw") == []


@pytest.mark.parametrize("resource", ["pdclusters", "events", "leases"])
def test_what_a_cluster_does_not_own_is_no_child(resource: str) -> None:
    assert not account.is_child(line(resource))
    assert account.is_child(line("secrets"))


def test_an_object_without_a_name_in_its_path_has_one_in_its_body() -> None:
    posted = line("secrets")
    del posted["objectRef"]["name"]
    posted["requestObject"] = {"metadata": {"name": "two"}}
    assert account.name_of(posted) == ("secrets", "two")


def test_the_span_ends_with_the_last_answer() -> None:
    first, last = account.span([line("services", second=9), line("services", second=2)])
    assert last - first == 7.0


def test_a_good_run_passes() -> None:
    assert missed(GOOD) == []


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("share_of_raw_objects",), 0.6),
        (("reads_of_one",), 1.7),
        (("writes_of_one",), 18.0),
        (("rest", "core"), 0.11),
        (("rest", "writes"), {"leases": 12, "pdclusters/status": 1}),
        (("restart", "writes"), {"statefulsets": 1}),
        (("reaction_seconds", "p99"), 1.01),
        (("plan_at_rest", "milliseconds_1p1d"), {"min": 0.6}),
        (("plan_at_rest", "milliseconds_64p64d"), {"min": 1.1}),
        (("rss_peak_megabytes",), 301),
        (("restart", "rss_peak_megabytes"), 401),
    ],
    ids=[bound.what for bound in BOUNDS],
)
def test_each_bound_can_be_missed(where: tuple[str, ...], value: object) -> None:
    found = copy.deepcopy(GOOD)
    place = found
    for name in where[:-1]:
        place = place[name]
    place[where[-1]] = value
    [said] = missed(found)
    assert said.startswith(".".join(where))


def test_a_bound_is_that_of_the_next_smaller_number_of_pdclusters() -> None:
    bound = Bound("x", {100: Expected(1.0, 0.5), 1000: Expected(2.0, 0.5)})
    assert [bound.of(count) for count in (1, 100, 999, 1000, 5000)] == [1.5, 1.5, 1.5, 2.5, 2.5]
    assert bound.misses(1.6, 100)
    assert not bound.misses(1.6, 1000)
    assert bound._replace(more_is_better=True).misses(1.4, 1000)


DAYS = {
    QUIET: {"changed": 10, "writes": 50, "seconds": 20.0, "refused": {}},
    "broken": {
        "changed": 20,
        "writes": 300,
        "seconds": 240.0,
        "refused": {"429": 100, "500": 100},
        "reaction_seconds": {"most": 2.0},
    },
    REFUSING: {"changed": 10, "writes": 50, "seconds": 180.0, "refused": {"429": 1}},
    "silent": {"changed": 10, "writes": 210, "seconds": 20.0, "refused": {}, "silent": 5},
    "deleted": {
        "changed": 10,
        "writes": 50,
        "seconds": 185.0,
        "refused": {},
        "deleted": 5,
        "writes_there": {"leases": 9},
    },
}


def test_bad_days_pass() -> None:
    assert missed_on(DAYS) == []


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("broken", {"writes": 301}),
        ("broken", {"seconds": 241.0}),
        ("broken", {"refused": {"500": 201}}),
        (REFUSING, {"refused": {}}),
        ("deleted", {"seconds": 186.0}),
        ("broken", {"reaction_seconds": {"most": 2.1}}),
        ("silent", {"writes": 211}),
        ("deleted", {"writes_there": {"services": 6}}),
    ],
)
def test_each_bound_on_a_bad_day_can_be_missed(name: str, more: dict[str, Any]) -> None:
    [said] = missed_on({**DAYS, name: {**DAYS[name], **more}})
    assert said.startswith(f"{name}: ")


def test_a_quiet_day_may_not_be_a_storm() -> None:
    day = DAYS[QUIET]
    [said] = missed_on({QUIET: {**day, "writes": 30 * day["changed"] + 1}})
    assert said.startswith(f"{QUIET}: ")
