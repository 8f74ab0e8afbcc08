from __future__ import annotations

from pdcluster_operator.runtime.control_loop import RESYNC_SECONDS
from pdcluster_operator.runtime.reconcile import BELIEVED_SECONDS, EndedNamespaces


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_was_there_goes_with_its_namespace_and_what_comes_later_does_not() -> None:
    there = {"ns": ["a", "b"], "other": ["c"]}
    ended = EndedNamespaces(there.__getitem__, Time())
    assert not ended.had("ns", "a")
    ended.add("ns", "a")
    there["ns"].append("d")
    assert [ended.had("ns", uid) for uid in "abd"] == [True, True, False]
    assert not ended.had("other", "c")


def test_a_refusal_that_came_too_late_leaves_no_cluster_alone_for_ever() -> None:
    """The clusters are those of a new namespace, into which something can be written again."""
    time = Time()
    ended = EndedNamespaces(lambda _: ["new"], time)
    ended.add("ns", "new")
    time.now += BELIEVED_SECONDS - 1
    ended.add("other", "new")
    assert ended.had("ns", "new")
    time.now += 1
    assert not ended.had("ns", "new")
    assert ended.had("other", "new")
    assert BELIEVED_SECONDS < RESYNC_SECONDS, "the next look at all of them finds it"


def test_namespaces_that_ended_long_ago_are_forgotten() -> None:
    time = Time()
    ended = EndedNamespaces(lambda _: ["a"], time)
    for number in range(1000):
        ended.add(str(number), "a")
        time.now += 1
    assert len(ended._ended) <= BELIEVED_SECONDS


def test_what_was_refused_for_a_cluster_that_is_gone_says_nothing_of_its_successor() -> None:
    """A call may hang for half a minute before it is refused. The namespace may be another then."""
    there = {"ns": ["new"]}
    ended = EndedNamespaces(there.__getitem__, Time())
    ended.add("ns", "old")
    assert not ended.had("ns", "new")
    ended.add("ns", "new")
    ended.add("ns", "old")
    assert ended.had("ns", "new"), "that was refused, too"
