"""`pdcluster rollout` on a real API server, with the operator as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from operator_runs import CHILDREN, Operator, cluster, condition, create, edit, get, until
from played_nodes import PlayedNodes
from real_api import TOKEN, RealApi

pytestmark = pytest.mark.cluster


class Command:
    """Runs ``pdcluster rollout VERB tiny`` as an administrator would."""

    def __init__(self, real: RealApi, namespace: str) -> None:
        self._namespace = namespace
        self._environment = {
            **os.environ,
            "KUBECONFIG": str(real.kubeconfig("admin", TOKEN)),
            "PYTHONPATH": os.pathsep.join(one for one in sys.path if one.endswith("/src")),
        }

    def start(self, verb: str, *words: str, name: str = "tiny") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "pdcluster_operator", "rollout", verb, name),
                *("-n", self._namespace, *words),
            ],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __call__(self, verb: str, *words: str, name: str = "tiny") -> tuple[int, str]:
        process = self.start(verb, *words, name=name)
        said, _ = process.communicate(timeout=300)
        return process.returncode, said


def variable(value: str) -> dict[str, Any]:
    return {"decode": {"engine": {"env": [{"name": "A", "value": value}]}}}


def decodes(real: RealApi, namespace: str) -> set[str]:
    items = real.call("GET", CHILDREN["StatefulSet"].format(namespace))[1]["items"]
    names = (one["metadata"]["name"] for one in items)
    return {name.rpartition("-")[0] for name in names if "-decode-" in name}


@pytest.mark.timeout(900)
def test_a_rollout_is_followed_held_back_and_undone(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    rollout = Command(real, namespace)
    code, said = rollout("status")
    assert code == 4
    assert said.startswith(f'error: there is no PDCluster "tiny" in namespace "{namespace}"')
    operator.start()
    create(real, namespace, cluster())
    following = rollout.start("status", "--timeout", "240s")
    assert following.stdout is not None
    assert "complete" not in following.stdout.readline(), "there are no nodes yet"
    with PlayedNodes(real, namespace):
        said, _ = following.communicate(timeout=300)
        assert following.returncode == 0, said
        last = said.splitlines()[-1]
        assert last.endswith("complete: prefill 1/1 ready, decode 1/1 ready, links 1/1")
        first = decodes(real, namespace)
        code, said = rollout("undo")
        assert (code, "nothing to go back to" in said) == (4, True), said

        # Held back, the change waits for somebody, and `status` says so by its exit code.
        assert rollout("pause") == (0, "pdcluster.pdcluster.dev/tiny paused\n")
        assert rollout("pause")[0] == 4
        assert edit(real, namespace, variable("1"))[0] == 200
        code, said = rollout("status")
        assert code == 3, said
        assert "Paused" in said
        assert decodes(real, namespace) == first
        assert rollout("resume") == (0, "pdcluster.pdcluster.dev/tiny resumed\n")
        code, said = rollout("status", "--timeout=240s")
        assert code == 0, said
        second = decodes(real, namespace)
        assert len(second) == 1
        assert second != first

        code, said = rollout("undo", "--dry-run")
        assert code == 0, said
        assert "nothing was written" in said
        assert get(real, namespace)["spec"]["decode"]["engine"]["env"][0]["value"] == "1"
        code, said = rollout("undo")
        assert code == 0, said
        assert "changed: decode.engine.env" in said
        assert rollout("status", "--timeout=240s")[0] == 0
        assert decodes(real, namespace) == first
        assert "env" not in get(real, namespace)["spec"]["decode"].get("engine", {})


@pytest.mark.timeout(600)
def test_a_rollout_that_does_not_come_to_an_end_is_no_success(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    """There are no nodes at all."""
    rollout = Command(real, namespace)
    operator.start()
    create(real, namespace, cluster())
    code, said = rollout("status", "--timeout=2s")
    assert code == 3, said
    assert "not complete after 2 s" in said
    assert edit(real, namespace, {"rollout": {"progressDeadlineSeconds": 10}})[0] == 200
    code, said = rollout("status", "--timeout=240s")
    assert code == 3, said
    assert "ProgressDeadlineExceeded" in said
    until(
        lambda: condition(real, namespace, "Progressing")["reason"] == "ProgressDeadlineExceeded",
        60,
        operator.said,
    )
    code, said = rollout("status", "--no-watch")
    assert code == 3, said
    assert len(said.splitlines()) == 1
