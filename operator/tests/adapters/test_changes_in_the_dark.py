"""A sample of changes on a real API server, while the operator is cut off and killed.

In the end the cluster is what a fresh one of the last spec is. ``test_rollout_fixpoint.py`` makes
thousands of such changes in the simulated cluster.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from api_gate import Gate
from operator_runs import (
    CHILDREN,
    Operator,
    at_rest,
    cluster,
    create,
    delete,
    edit,
    get,
    owned,
    until as wait,
)
from played_nodes import PlayedNodes
from real_api import RealApi

pytestmark = pytest.mark.cluster

SPECS = (
    {"rollout": {"type": "Surge"}, "decode": {"replicas": 2}},
    {"rollout": {"type": "Recreate"}, "engine": {"blockSize": 32}},
    {"rollout": {"type": "Surge"}, "decode": {"engine": {"env": [{"name": "A", "value": "1"}]}}},
    {"rollout": {"type": "Replace"}, "prefill": {"replicas": 2}},
)
WRONG = {"prefill": {"replicas": 1001}}, {"engine": {"kvCacheDtype": "int3"}}
ASSIGNED = ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy")
WHOLE = ("engine", "prefill", "decode", "rollout")


@pytest.fixture
def gate(real: RealApi) -> Iterator[Gate]:
    gate = Gate(real)
    yield gate
    gate.close()


def content(real: RealApi, namespace: str) -> dict[str, Any]:
    """Return the spec of every child by kind and name, but of stored revisions and pods."""
    found = {}
    for kind, path in CHILDREN.items():
        if kind in ("ControllerRevision", "Pod"):
            continue
        query = "?labelSelector=pdcluster.dev/cluster"
        for item in real.call("GET", path.format(namespace) + query)[1]["items"]:
            spec = {k: v for k, v in (item.get("spec") or {}).items() if k not in ASSIGNED}
            found[f"{kind}/{item['metadata']['name']}"] = spec
    return found


def is_ready(real: RealApi, namespace: str) -> bool:
    """Whether all is done: Ready may be True while old engines still go."""
    live = get(real, namespace)
    new = live["status"]["observedGeneration"] == live["metadata"]["generation"]
    said = {one["type"]: one for one in live["status"]["conditions"]}
    return new and said["Ready"]["status"] == "True" and said["Progressing"]["reason"] == "Complete"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_end_is_what_a_fresh_cluster_is(
    real: RealApi, gate: Gate, namespace: str, seed: int
) -> None:
    chance = random.Random(seed)
    operator = Operator(
        real,
        "run",
        f"--namespace={namespace}",
        f"--authority-secret={namespace}/authority",
        "--allow-host-path-models",
        "--sweep-seconds=5",
    )
    operator._environment["KUBECONFIG"] = str(gate.kubeconfig(real))
    operator.start()
    first, last = chance.sample(SPECS, 2)
    try:
        with PlayedNodes(real, namespace):
            create(real, namespace, cluster(**first))
            wait(lambda: is_ready(real, namespace), 120, operator.said)
            edit(real, namespace, chance.choice(WRONG))
            time.sleep(chance.random())
            edit(real, namespace, dict.fromkeys(WHOLE) | last)
            for _ in range(4):
                time.sleep(2 * chance.random())
                if chance.random() < 0.5:
                    gate.shut()
                    time.sleep(2 * chance.random())
                    gate.open()
                else:
                    operator.kill()
                operator.start_if_ended()

            def back() -> bool:
                operator.start_if_ended()
                return is_ready(real, namespace)

            def rest() -> None:
                operator.start_if_ended()
                at_rest(real, operator)

            wait(back, 180, lambda: (get(real, namespace), operator.said()))
            rest()
            changed = content(real, namespace)
            delete(real, namespace)
            wait(lambda: not owned(real, namespace), 60, lambda: owned(real, namespace))
            create(real, namespace, cluster(**last))
            wait(lambda: is_ready(real, namespace), 120, operator.said)
            at_rest(real, operator)
            assert changed == content(real, namespace)
    finally:
        operator.stop()
