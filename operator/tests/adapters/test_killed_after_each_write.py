"""A rollout whose operator is killed after each single write ends as one that nothing disturbs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from operator_runs import CHILDREN, Operator, at_rest, cluster, condition, create, edit, get, until
from played_nodes import PlayedNodes
from real_api import RealApi

from pdcluster_operator.api.labels import PAIRING_LABEL, engine_of, router_name

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(3600)]

TWO = {"replicas": 2}
CHANGES = {
    "Surge": {"engine": {"blockSize": 32}},
    "Replace": {"decode": {**TWO, "engine": {"env": [{"name": "A", "value": "1"}]}}},
    "Recreate": {"engine": {"blockSize": 32}},
}
DIES = "dies after "


class Dying(Operator):
    """An operator that is started again after each write, as the kubelet does."""

    def __init__(self, real: RealApi, *arguments: str) -> None:
        super().__init__(real, *arguments)
        self._command[2] = "dying_operator"
        folders = (str(Path(__file__).parent), self._environment["PYTHONPATH"])
        self._environment["PYTHONPATH"] = os.pathsep.join(folders)

    @property
    def deaths(self) -> list[str]:
        lines = self.log.read_text().splitlines()
        return [line.removeprefix(DIES) for line in lines if line.startswith(DIES)]


@pytest.mark.parametrize("how", CHANGES)
def test_a_rollout_ends_although_its_operator_is_killed_after_each_write(
    real: RealApi, namespace: str, how: str
) -> None:
    spec = {"prefill": TWO, "decode": TWO, "rollout": {"type": how}}
    arguments = (
        "run",
        f"--authority-secret={namespace}/authority",
        f"--namespace={namespace}",
        "--allow-host-path-models",
    )
    whole, dying = Operator(real, *arguments), Dying(real, *arguments)
    with PlayedNodes(real, namespace):
        try:
            whole.start()
            create(real, namespace, cluster(**spec))
            until(lambda: done(real, namespace), 120, whole.said)
            at_rest(real, whole)
            whole.kill()
            served = 0
            edit(real, namespace, CHANGES[how])
            dying.start(ready=False)

            def ends() -> bool:
                nonlocal served
                served += how != "Recreate" and serves(real, namespace)
                dying.start_if_ended()
                return done(real, namespace)

            until(ends, 900, lambda: (get(real, namespace), dying.said()))
            dying.kill()
            print(how, len(dying.deaths), "deaths", *sorted(set(dying.deaths)), sep="\n")
            assert len(dying.deaths) >= 8  # what is written side by side counts once
            assert how == "Recreate" or served
            whole.start()
            until(lambda: done(real, namespace), 120, whole.said)
            at_rest(real, whole)
            engines = [engine_of(one) for one in found(real, namespace, "StatefulSet")]
            assert len(engines) == 4
            assert len({(one.role, one.revision) for one in engines if one}) == 2
        finally:
            whole.stop()
            dying.stop()


def done(real: RealApi, namespace: str) -> bool:
    live = get(real, namespace)
    seen = live["status"]["observedGeneration"] == live["metadata"]["generation"]
    ready = condition(real, namespace, "Ready")["status"] == "True"
    return seen and ready and condition(real, namespace, "Progressing")["reason"] == "Complete"


def serves(real: RealApi, namespace: str) -> bool:
    """Whether the routers behind the Service know an engine of each role that does not end.

    False if these routers changed while the pods were read.
    """
    words = routed(real, namespace)
    pods = [one["metadata"] for one in found(real, namespace, "Pod")]
    if words != routed(real, namespace):
        return False
    known = [pod for pod in pods if any(f"//{pod['name']}." in word for word in words)]
    roles = {pod["labels"]["pdcluster.dev/role"] for pod in known if "deletionTimestamp" not in pod}
    assert roles == {"prefill", "decode"}, (words, pods)
    return True


def routed(real: RealApi, namespace: str) -> set[str]:
    """Return the words on the command line of the routers that the Service selects."""
    keys = {
        one["spec"]["selector"].get(PAIRING_LABEL)
        for one in found(real, namespace, "Service")
        if one["metadata"]["name"] == router_name("tiny")
    }
    return {
        word
        for one in found(real, namespace, "Deployment")
        if one["metadata"]["labels"][PAIRING_LABEL] in keys
        for word in one["spec"]["template"]["spec"]["containers"][0]["args"]
    }


def found(real: RealApi, namespace: str, kind: str) -> list[dict[str, Any]]:
    query = "?labelSelector=pdcluster.dev/cluster"
    return list(real.call("GET", CHILDREN[kind].format(namespace) + query)[1]["items"])
