"""`doctor --probe` on a real API server. The test plays the node: it runs what the Jobs say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from operator_runs import until
from real_api import TOKEN, RealApi
from rights import RBAC, SUBJECT, WATCHED_RULES

from conftest import new_namespace

pytestmark = [pytest.mark.cluster, pytest.mark.nixl]
MERGE = "application/merge-patch+json"
SOURCES = os.pathsep.join(one for one in sys.path if one.endswith("/src"))


def start(real: RealApi, namespace: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "pdcluster_operator", "doctor", "--probe"),
            *("-n", namespace, "-o", "json", *words),
        ],
        env={
            **os.environ,
            "KUBECONFIG": str(real.kubeconfig("admin", TOKEN)),
            "PYTHONPATH": SOURCES,
        },
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def left(real: RealApi, namespace: str) -> list[str]:
    paths = ("/apis/batch/v1/namespaces/{}/jobs", "/api/v1/namespaces/{}/configmaps")
    found = [one for path in paths for one in real.call("GET", path.format(namespace))[1]["items"]]
    names = (one["metadata"]["name"] for one in found)
    return [name for name in names if name.startswith("pdcluster-probe")]


class Node:
    """Runs the containers of probes as processes of this machine, and says how they ended."""

    def __init__(self, real: RealApi, namespace: str, folder: Path) -> None:
        self._real, self._folder = real, folder
        self._jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self.address = "127.77.3.9"
        self.jobs: dict[str, dict[str, Any]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._done = threading.Event()

    @contextmanager
    def playing(self) -> Iterator[Node]:
        thread = threading.Thread(target=self._play)
        thread.start()
        try:
            yield self
        finally:
            self._done.set()
            thread.join()
            for process in self._processes.values():
                process.kill()
                process.wait()

    def _play(self) -> None:
        ended: set[str] = set()
        while not self._done.wait(0.2):
            for job in self._real.call("GET", self._jobs)[1]["items"]:
                if job["metadata"]["name"] not in self.jobs:
                    self._begin(job)
            for name, process in self._processes.items():
                if process.poll() is not None and name not in ended:
                    ended.add(name)
                    words = (self._folder / name).read_text()
                    state = {"terminated": {"exitCode": process.returncode, "message": words}}
                    self._say(name, {"phase": "Succeeded", **self._containers(state)})

    def _begin(self, job: dict[str, Any]) -> None:
        name, template = job["metadata"]["name"], job["spec"]["template"]
        self.jobs[name] = job
        metadata = {"name": name, "labels": {**template["metadata"]["labels"], "job-name": name}}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata,
               "spec": {**template["spec"], "nodeName": f"node-of-{name[-7:]}"}}  # fmt: skip
        assert self._real.call("POST", self._pods, pod)[0] == 201
        (container,) = template["spec"]["containers"]
        words = [*container["command"], *container["args"]]
        words[0] = sys.executable
        words[words.index("--last-words") + 1] = str(self._folder / name)
        words += ["--host", self.address, "--mib", "4"]
        environment = {**os.environ, "PYTHONPATH": SOURCES, "UCX_TLS": "tcp"}
        self._processes[name] = subprocess.Popen(words, env=environment)
        running = {"phase": "Running", "podIP": self.address}
        self._say(name, {**running, **self._containers({"running": {}})})

    def _containers(self, state: dict[str, Any]) -> dict[str, Any]:
        one = {"name": "engine", "image": "x", "imageID": "x", "ready": True, "restartCount": 0}
        return {"containerStatuses": [{**one, "state": state}]}

    def _say(self, name: str, status: dict[str, Any]) -> None:
        self._real.call("PATCH", f"{self._pods}/{name}/status", {"status": status}, MERGE)


def test_bytes_move_and_everything_is_removed(real: RealApi, tmp_path: Path) -> None:
    space = new_namespace(real)
    with Node(real, space, tmp_path).playing() as node:
        process = start(real, space)
        out, errors = process.communicate(timeout=120)
    found = json.loads(out)
    probe = found["probe"]
    assert probe["bytes"] == 4 << 20, errors
    assert probe["gigabytesPerSecond"] > 0
    assert [one.partition("/")[0] for one in probe["transports"]] == ["tcp"]
    (row,) = (row for row in found["rows"] if row["check"] == "probe")
    assert row["verdict"] == "ok"
    assert "host memory, between node-of-prefill and node-of--decode" in row["found"]
    assert len(node.jobs) == 2
    until(lambda: not left(real, space), 30, lambda: left(real, space))


def test_without_a_node_it_ends_in_time_and_says_for_what_it_waited(real: RealApi) -> None:
    space = new_namespace(real)
    out, _ = start(real, space, "--timeout", "2s").communicate(timeout=60)
    (row,) = (row for row in json.loads(out)["rows"] if row["check"] == "probe")
    assert row["verdict"] == "missing"
    assert row["found"].startswith("not done in 2 s: serving pod: ")
    until(lambda: not left(real, space), 30, lambda: left(real, space))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_nothing(real: RealApi, number: signal.Signals) -> None:
    space = new_namespace(real)
    process = start(real, space)
    # A Job and the connector.
    until(lambda: len(left(real, space)) == 2, 60, lambda: left(real, space))
    process.send_signal(number)
    process.communicate(timeout=30)
    if number == signal.SIGINT:
        assert process.returncode == 130
    else:
        # Its time to live ends the Job. What the Job owns goes with it.
        jobs = f"/apis/batch/v1/namespaces/{space}/jobs"
        (job,) = real.call("GET", jobs)[1]["items"]
        assert job["spec"]["ttlSecondsAfterFinished"] <= 60
        assert job["spec"]["activeDeadlineSeconds"] <= 400
        path = f"{jobs}/{job['metadata']['name']}?propagationPolicy=Background"
        assert real.call("DELETE", path)[0] == 200
    until(lambda: not left(real, space), 60, lambda: left(real, space))


def test_somebody_who_may_not_make_jobs_is_told(real: RealApi) -> None:
    space = new_namespace(real)
    rules = [one for one in WATCHED_RULES if one["apiGroups"] != ["batch"]]
    role = {"metadata": {"name": "visitor"}, "rules": rules}
    subject = {**SUBJECT[0], "name": "visitor"}
    reference = {"kind": "Role", "name": "visitor", "apiGroup": "rbac.authorization.k8s.io"}
    binding = {"metadata": {"name": "visitor"}, "subjects": [subject], "roleRef": reference}
    for kind, made in (("roles", role), ("rolebindings", binding)):
        assert real.call("POST", f"{RBAC}/namespaces/{space}/{kind}", made)[0] == 201
    process = subprocess.run(
        [sys.executable, "-m", "pdcluster_operator", "doctor", "--probe", "-n", space],
        env={
            **os.environ,
            "KUBECONFIG": str(real.kubeconfig("visitor", "visitor-token")),
            "PYTHONPATH": SOURCES,
        },
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert process.returncode == 6
    assert 'cannot create resource "jobs"' in process.stdout
