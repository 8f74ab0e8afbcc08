"""What is remembered of a cluster's rewritten children ends with the cluster."""

from __future__ import annotations

import copy
from typing import Any

from pdcluster_operator.plan.objects.drift import stamped
from pdcluster_operator.runtime.executor import Executor
from pdcluster_operator.runtime.interfaces import Key

KEY, OTHER = Key("ns", "llama"), Key("ns", "other")


def test_a_cluster_of_the_same_name_is_told_of_its_rewrites_again() -> None:
    desired: Any = stamped(
        {"kind": "Service", "metadata": {"name": "llama"}, "spec": {"type": "ClusterIP"}}
    )
    answer = copy.deepcopy(desired)
    answer["spec"]["type"] = "NodePort"
    unused: Any = object()
    executor = Executor(unused, unused, lambda _: True)

    def events(key: Key) -> int:
        return len(list(executor._note(key, desired, answer)))

    assert (events(KEY), events(OTHER)) == (1, 1)
    assert events(KEY) == 0, "it is no news"
    executor.forget(KEY)
    executor.forget(KEY)
    assert (len(executor.rewrites(KEY)), len(executor.rewrites(OTHER))) == (0, 1)
    assert events(KEY) == 1
