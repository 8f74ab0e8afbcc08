from __future__ import annotations

from pdcluster_operator.runtime.control_loop import RESYNC_SECONDS
from pdcluster_operator.runtime.ended_namespaces import BELIEVED_SECONDS, EndedNamespaces


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_was_there_goes_with_its_namespace_and_what_comes_later_does_not() -> None:
    there = {"ns": ["a", "b"], "other": ["c"]}
    ended = EndedNamespaces(there.__getitem__, Time())
    assert not ended.had("ns", "a")
    ended.add("ns")
    there["ns"].append("d")
    assert [ended.had("ns", uid) for uid in "abd"] == [True, True, False]
    assert not ended.had("other", "c")


def test_a_refusal_that_came_too_late_leaves_no_cluster_alone_for_ever() -> None:
    """The clusters are those of a new namespace, into which something can be written again."""
    time = Time()
    ended = EndedNamespaces(lambda _: ["new"], time)
    ended.add("ns")
    time.now += BELIEVED_SECONDS - 1
    ended.add("other")
    assert ended.had("ns", "new")
    time.now += 1
    assert not ended.had("ns", "new")
    assert ended.had("other", "new")
    assert BELIEVED_SECONDS < RESYNC_SECONDS, "the next look at all of them finds it"


def test_namespaces_that_ended_long_ago_are_forgotten() -> None:
    time = Time()
    ended = EndedNamespaces(lambda _: ["a"], time)
    for number in range(1000):
        ended.add(str(number))
        time.now += 1
    assert len(ended._ended) <= BELIEVED_SECONDS
