"""A rollout whose operator is killed after each single write ends as one that nothing disturbs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from operator_runs import Operator, at_rest, cluster, create, edit, get, until
from played_nodes import PlayedNodes
from real_api import RealApi
from watched_rollout import done, found, serves

from pdcluster_operator.api.object_names import engine_of

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
