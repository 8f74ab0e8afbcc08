"""What is remembered of a cluster's rewritten children ends with the cluster."""

from __future__ import annotations

import copy
from typing import Any

from pdcluster_operator.plan.objects.drift import stamped
from pdcluster_operator.runtime.executor import RewriteNotes
from pdcluster_operator.runtime.interfaces import Key

KEY, OTHER = Key("ns", "llama"), Key("ns", "other")


def test_a_cluster_of_the_same_name_is_told_of_its_rewrites_again() -> None:
    desired: Any = stamped(
        {"kind": "Service", "metadata": {"name": "llama"}, "spec": {"type": "ClusterIP"}}
    )
    answer = copy.deepcopy(desired)
    answer["spec"]["type"] = "NodePort"
    notes = RewriteNotes()
    assert notes.note(KEY, desired, answer) is not None
    assert notes.note(OTHER, desired, answer) is not None
    assert notes.note(KEY, desired, answer) is None, "it is no news"
    notes.forget(KEY)
    notes.forget(KEY)
    assert (len(notes.of(KEY)), len(notes.of(OTHER))) == (0, 1)
    assert notes.note(KEY, desired, answer) is not None
