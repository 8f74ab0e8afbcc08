"""A watch that does not report what a list has is dead."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.adapters.api_server.watch_health import (
    LATE_SECONDS,
    LONGEST_LIST_SECONDS,
    WatchHealth,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def pod(name: str, version: int, uid: str = "u") -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"kind": "Pod", "metadata": metadata}


def watches() -> tuple[WatchHealth, Clock]:
    clock = Clock()
    return WatchHealth(clock), clock


def test_a_watch_that_reports_nothing_is_dead_after_a_while() -> None:
    health, clock = watches()
    health.listed("Pod", [pod("a", 5)], health.now())
    assert health.trouble() is None
    clock.now += 60
    assert health.trouble() is None
    clock.now += 1
    assert "the watch of Pod is dead: ns/a" in (health.trouble() or "")
    health.reported("MODIFIED", pod("a", 6))
    assert health.trouble() is None


def test_a_watch_that_stops_in_the_middle_is_noticed_by_the_next_list() -> None:
    health, clock = watches()
    health.reported("MODIFIED", pod("a", 5))
    health.listed("Pod", [pod("a", 5)], health.now())
    clock.now += 1000
    assert health.trouble() is None, "nothing happened, so nothing is owed"
    health.listed("Pod", [pod("a", 9)], health.now())
    clock.now += LATE_SECONDS + 1
    assert health.trouble()


def test_later_lists_do_not_begin_the_time_anew() -> None:
    health, clock = watches()
    for version in range(5, 15):
        health.listed("Pod", [pod("a", version)], health.now())
        clock.now += LATE_SECONDS / 5
    assert health.trouble()


def test_an_older_version_or_an_object_of_another_uid_is_no_report() -> None:
    health, clock = watches()
    health.listed("Pod", [pod("a", 5), pod("b", 5, "new")], health.now())
    health.reported("MODIFIED", pod("a", 4))
    health.reported("MODIFIED", pod("b", 4, "old"))
    clock.now += LATE_SECONDS + 1
    assert health.trouble()
    health.reported("MODIFIED", pod("a", 5))
    assert health.trouble()
    health.reported("ADDED", pod("b", 5, "new"))
    assert health.trouble() is None


def test_what_is_gone_is_not_owed() -> None:
    health, clock = watches()
    health.listed("Pod", [pod("a", 5), pod("b", 5)], health.now())
    health.reported("DELETED", pod("a", 6))
    health.listed("Pod", [], health.now())
    clock.now += LATE_SECONDS + 1
    assert health.trouble() is None


@pytest.mark.parametrize("made_again", [False, True])
def test_what_is_deleted_while_a_list_is_on_its_way_is_not_owed(made_again: bool) -> None:
    """A LIST of thousands comes in pages, for seconds, and shows what there was when it began."""
    health, clock = watches()
    health.reported("ADDED", pod("a", 5))
    clock.now += 1
    began = health.now()
    clock.now += 1
    health.reported("DELETED", pod("a", 6))
    if made_again:
        health.reported("ADDED", pod("a", 7, "new"))
    health.listed("Pod", [pod("a", 5)], began)
    clock.now += LATE_SECONDS + 1
    assert health.trouble() is None
    health.listed("Pod", [pod("a", 7, "new")] * made_again, health.now())
    clock.now += LATE_SECONDS + 1
    assert health.trouble() is None
    health.listed("Pod", [pod("a", 9, "newest")], health.now())
    clock.now += LATE_SECONDS + 1
    assert health.trouble()


def test_a_deletion_that_is_told_in_an_older_version_is_one_all_the_same() -> None:
    """A watch that had a gap tells of what its LIST lacks, as it was known before."""
    health, clock = watches()
    health.reported("ADDED", pod("a", 5))
    began = health.now()
    health.reported("DELETED", pod("a", 5))
    health.listed("Pod", [pod("a", 6)], began)
    clock.now += LATE_SECONDS + 1
    assert health.trouble() is None


def test_a_later_object_of_that_name_settles_what_was_owed() -> None:
    health, clock = watches()
    health.listed("Pod", [pod("a", 5)], health.now())
    health.reported("ADDED", pod("a", 7, "new"))
    clock.now += LATE_SECONDS + 1
    assert health.trouble() is None


def test_deletions_are_forgotten_even_if_no_list_of_the_kind_ends() -> None:
    health, clock = watches()
    for number in range(100):
        health.reported("DELETED", pod(f"a-{number}", number))
        clock.now += LONGEST_LIST_SECONDS / 10
    assert len(health._gone) <= 11
    health.listed("Pod", [], health.now())
    assert not health._gone


def test_a_list_of_one_namespace_says_nothing_of_another() -> None:
    health, clock = watches()
    elsewhere = {"kind": "Pod", "metadata": {**pod("a", 5)["metadata"], "namespace": "other"}}
    health.listed("Pod", [pod("a", 5)], health.now(), "ns")
    health.reported("ADDED", elsewhere)
    clock.now += 1
    health.listed("Pod", [], health.now(), "other")
    health.listed("Pod", [elsewhere], health.now(), "other")
    clock.now += LATE_SECONDS + 1
    assert "ns/a" in (health.trouble() or ""), "the list of the other namespace lacks it"
    health.listed("Pod", [], health.now(), "ns")
    assert "other/a" in (health.trouble() or "")


def test_an_object_that_is_reported_while_a_list_is_on_its_way_is_not_owed_later() -> None:
    health, clock = watches()
    began = health.now()
    clock.now += 1
    health.reported("ADDED", pod("new", 8))
    health.listed("Pod", [], began)
    clock.now += 300
    health.listed("Pod", [pod("new", 8)], health.now())
    clock.now += LATE_SECONDS + 1
    assert health.trouble() is None


def test_an_object_made_anew_under_its_name_is_owed_again() -> None:
    health, clock = watches()
    health.reported("ADDED", pod("a", 5))
    clock.now += 1
    health.listed("Pod", [], health.now())
    health.listed("Pod", [pod("a", 5)], health.now())
    clock.now += LATE_SECONDS + 1
    assert health.trouble()


def test_a_list_of_one_kind_says_nothing_of_another() -> None:
    health, clock = watches()
    health.listed("Pod", [pod("a", 5)], health.now())
    health.listed("Service", [], health.now())
    clock.now += LATE_SECONDS + 1
    assert "the watch of Pod is dead" in (health.trouble() or "")


def test_an_object_without_a_version_that_is_a_number_is_reported_by_any() -> None:
    odd = pod("a", 5)
    for version in ({"resourceVersion": "x"}, {}):
        health, clock = watches()
        del odd["metadata"]["resourceVersion"]
        odd["metadata"] |= version
        health.listed("Pod", [odd], health.now())
        clock.now += LATE_SECONDS + 1
        assert health.trouble()
        health.reported("ADDED", odd)
        assert health.trouble() is None
        odd["metadata"]["resourceVersion"] = ""
