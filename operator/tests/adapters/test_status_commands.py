"""`pdcluster status`, `links` and `logs` on a real API server, with an operator of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from operator_runs import CHILDREN, Operator, cluster, create, get, until
from played_nodes import PlayedNodes
from real_api import TOKEN, RealApi

pytestmark = pytest.mark.cluster


class Commands:
    """Runs commands about the PDCluster as an administrator would."""

    def __init__(self, real: RealApi, namespace: str) -> None:
        self._namespace = namespace
        self._environment = {
            **os.environ,
            "KUBECONFIG": str(real.kubeconfig("admin", TOKEN)),
            "PYTHONPATH": os.pathsep.join(one for one in sys.path if one.endswith("/src")),
        }

    def __call__(self, *words: str, name: str = "tiny") -> tuple[int, str, str]:
        ended = subprocess.run(  # noqa: PLW1510 - exit codes are asserted
            [
                *(sys.executable, "-m", "pdcluster_operator", words[0], name),
                *("-n", self._namespace, *words[1:]),
            ],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return ended.returncode, ended.stdout, ended.stderr

    def document(self, *words: str) -> dict[str, Any]:
        _, said, errors = self(*words, "-o", "json")
        assert errors == ""
        found: dict[str, Any] = json.loads(said)
        return found


OUT_OF_MEMORY = {"exitCode": 137, "reason": "OOMKilled", "message": "INFO: GET /health"}
NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: not helpful."
SICK = {
    "prefill": {
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": NO_GPU,
            }
        ]
    },
    "decode": {
        "containerStatuses": [
            {
                "name": "engine",
                "image": "",
                "imageID": "",
                "ready": False,
                "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
                "lastState": {"terminated": OUT_OF_MEMORY},
            }
        ]
    },
    "router": {
        "containerStatuses": [
            {
                "name": "router",
                "image": "",
                "imageID": "",
                "ready": False,
                "restartCount": 0,
                "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            }
        ]
    },
}
"""What a scheduler and a kubelet write of a pod without a GPU, and of an engine that is killed.

The router runs, and is not ready without an engine.
"""


def pod_of(real: RealApi, namespace: str, role: str) -> str:
    pods = CHILDREN["Pod"].format(namespace)
    found = real.call("GET", f"{pods}?labelSelector=app.kubernetes.io/component={role}")[1]["items"]
    return str(found[0]["metadata"]["name"])


def report(real: RealApi, namespace: str, role: str, status: dict[str, Any]) -> None:
    path = f"{CHILDREN['Pod'].format(namespace)}/{pod_of(real, namespace, role)}/status"
    code, said = real.call("PATCH", path, {"status": status}, "application/merge-patch+json")
    assert code == 200, said


def sick(code: int, said: str, _: str) -> str:
    """What is printed, once it has both steps."""
    steps = re.findall(r"^(\w+): ", said, re.MULTILINE)
    return said if code == 3 and {"OutOfMemory", "GpuMissing"} <= set(steps) else ""


@pytest.mark.timeout(600)
def test_a_cluster_is_seen_from_its_first_minute_to_an_operator_that_is_gone(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    run = Commands(real, namespace)
    create(real, namespace, cluster())
    code, said, _ = run("status")
    assert code == 3
    assert said.startswith("no operator works on tiny")
    assert run("status", name="tyni")[::2] == (
        4,
        f'error: there is no PDCluster "tyni" in namespace "{namespace}"; there are: tiny\n',
    )

    operator.start()
    until(lambda: run.document("status")["engines"], 120, operator.said)
    waits = run.document("status")
    assert waits["operator"]["works"]
    assert not waits["serves"]
    assert {one["state"] for one in waits["engines"]} <= {"PodsMissing", "ContainerCreating"}
    code, said, errors = run("logs")
    assert (code, said) == (4, "")
    assert errors.startswith('error: no container of PDCluster "tiny" has begun to write a log')

    for role, status in SICK.items():
        report(real, namespace, role, status)
    said = until(lambda: sick(*run("status")), 120, operator.said)
    assert re.search(
        r"^tiny does not serve: EngineFailed: .*the engine died: out of memory: ", said
    )
    assert re.findall(r"^  next: (.+)$", said, re.MULTILINE)[:2] == [
        f"kubectl describe pods {pod_of(real, namespace, 'decode')} -n {namespace}",
        f"pdcluster doctor -n {namespace}",
    ]

    with PlayedNodes(real, namespace):
        code, said, _ = run("status", "--watch", "--until-ready", "--timeout", "240s")
        assert code == 0, said
        assert said.splitlines()[-1].startswith("tiny serves: ")
        ready = run.document("status")
        assert "renewed its Lease" in ready["operator"]["message"]
        assert (ready["next"], ready["links"]) == ([], "1/1")
        code, said, _ = run("links")
        assert code == 0, said
        assert "1 of 1 link verified" in said
        [state] = get(real, namespace)["status"]["linkStates"]
        assert (state["state"], state["canary"]) == ("Established", "Passed")
        # There is no kubelet that has a log: each pod says so, and nothing else comes.
        code, said, errors = run("logs")
        assert (code, said) == (4, "")
        assert errors.count("tiny-") >= 3

        operator.stop()
        code, said, _ = run("status")
        assert said.startswith("no operator works on tiny, so this may be old: tiny serves: ")
        assert code == 3
        assert "OperatorDown" in said
