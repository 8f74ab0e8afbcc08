"""`Replace` with one engine of each role holds on a real API server, and the status says why."""

from __future__ import annotations

import pytest
from operator_runs import Operator, at_rest, cluster, condition, create, edit, get, owned, until
from played_nodes import PlayedNodes
from real_api import RealApi

pytestmark = pytest.mark.cluster

CHANGES = {
    "decode alone": {"decode": {"engine": {"env": [{"name": "A", "value": "1"}]}}},
    "another pairing key": {"engine": {"blockSize": 64}},
}


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", CHANGES)
def test_replace_holds_until_there_may_be_more_engines(
    real: RealApi, operator: Operator, namespace: str, what: str
) -> None:
    def explain() -> object:
        return get(real, namespace), operator.said()

    def progress() -> dict:
        found = condition(real, namespace, "Progressing")
        generation = get(real, namespace)["metadata"]["generation"]
        return found if found.get("observedGeneration") == generation else {}

    operator.start()
    with PlayedNodes(real, namespace):
        create(real, namespace, cluster(rollout={"type": "Replace"}))
        until(lambda: progress().get("reason") == "Complete", 120, explain)
        before = children(real, namespace)
        assert edit(real, namespace, CHANGES[what])[0] == 200
        until(lambda: progress().get("reason") == "InsufficientCapacity", 120, explain)
        held = condition(real, namespace, "Progressing")
        assert held["status"] == "False"
        assert "engine can make room, because no verified pair would be left" in held["message"]
        at_rest(real, operator)
        assert children(real, namespace) == before, "no engine was taken away, and none was added"
        assert condition(real, namespace, "Available")["status"] == "True"
        # The message names a way on.
        assert edit(real, namespace, {"rollout": {"type": "Surge"}})[0] == 200
        until(lambda: progress().get("reason") == "Complete", 180, explain)
        assert not set(engines(before, "decode")) & set(children(real, namespace))


def children(real: RealApi, namespace: str) -> list[str]:
    kinds = ("StatefulSet", "Deployment", "Service", "Pod")
    return [name for kind in kinds for name in owned(real, namespace, kind)]


def engines(names: list[str], role: str) -> list[str]:
    return [name for name in names if name.startswith("StatefulSet/") and f"-{role}-" in name]
