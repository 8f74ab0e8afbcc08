"""``pdcluster-operator`` as a process of its own, and what tests look at while it runs."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from real_api import RealApi, die_with_us

from loopback import free_ports
from pdcluster_operator.plan.status.pace import QUIET_SECONDS

GROUP = "/apis/pdcluster.dev/v1alpha1"
PATIENCE = 3
CHILDREN = {
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "ControllerRevision": "/apis/apps/v1/namespaces/{}/controllerrevisions",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "Service": "/api/v1/namespaces/{}/services",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "Pod": "/api/v1/namespaces/{}/pods",
}


class Operator:
    """One process of ours; it may be killed and started again."""

    def __init__(self, real: RealApi, *arguments: str) -> None:
        self.health, self.metrics = free_ports(2)
        self.log = real.folder / f"{arguments[0]}-{self.health}.log"
        self._command = [
            sys.executable,
            "-m",
            "pdcluster_operator.cli.operator",
            *arguments,
            "--host=127.0.0.1",
            f"--health-port={self.health}",
            f"--metrics-port={self.metrics}",
        ]
        path = [one for one in sys.path if one.endswith("/src")]
        self._environment = {
            **os.environ,
            "KUBECONFIG": str(real.folder / "operator.kubeconfig"),
            "PYTHONPATH": os.pathsep.join(path),
            # As in a pod, whose container starts again under the same name.
            "POD_NAME": f"operator-{self.health}",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def bring(self, sources: Path) -> None:
        """Let the next start find its modules in this folder first, as after an upgrade."""
        self._environment["PYTHONPATH"] = f"{sources}{os.pathsep}{self._environment['PYTHONPATH']}"

    def start(self, *, ready: bool = True, seconds: float = 120.0) -> Operator:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_us,  # noqa: PLW1509
            )
        if ready:
            until(self.is_ready, seconds, self.said)
        return self

    def start_if_ended(self) -> None:
        """Do as the kubelet would."""
        if self.process is not None and self.process.poll() is not None:
            self.start(ready=False)

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.said()
        return self.page("/readyz")[0] == 200

    def page(self, path: str, port: int | None = None) -> tuple[int, str]:
        url = f"http://127.0.0.1:{port or self.health}{path}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metric(self, line: str) -> float:
        """Value of the metric that is written so, labels and all; 0 if it is not there."""
        for row in self.page("/metrics", self.metrics)[1].splitlines():
            name, _, value = row.rpartition(" ")
            if name == line:
                return float(value)
        return 0.0

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int | None:
        if self.process is None:
            return None
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def said(self) -> str:
        return self.log.read_text()[-4000:]


# No rule of ours knows the names of the kernel's settings.
REFUSED_BY_SERVER = {"spec": {"securityContext": {"sysctls": [{"name": "Bogus", "value": "1"}]}}}


def cluster(name: str = "tiny", **spec: Any) -> dict[str, Any]:
    spec.setdefault("model", {"source": {"hostPath": {"path": "/models/tiny"}}})
    spec.setdefault("transfer", {"device": "CPU"})
    return {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": name},
        "spec": spec,
    }


def create(real: RealApi, namespace: str, manifest: dict[str, Any]) -> dict[str, Any]:
    status, answer = real.call("POST", f"{GROUP}/namespaces/{namespace}/pdclusters", manifest)
    assert status == 201, answer
    return answer


def get(real: RealApi, namespace: str, name: str = "tiny") -> dict[str, Any]:
    return real.call("GET", f"{GROUP}/namespaces/{namespace}/pdclusters/{name}")[1]


def delete(real: RealApi, namespace: str, name: str = "tiny") -> None:
    status, answer = real.call("DELETE", f"{GROUP}/namespaces/{namespace}/pdclusters/{name}")
    assert status == 200, answer


def edit(real: RealApi, namespace: str, spec: dict[str, Any], name: str = "tiny") -> tuple:
    return real.call(
        "PATCH",
        f"{GROUP}/namespaces/{namespace}/pdclusters/{name}",
        {"spec": spec},
        "application/merge-patch+json",
    )


def condition(real: RealApi, namespace: str, kind: str, name: str = "tiny") -> dict[str, Any]:
    conditions = (get(real, namespace, name).get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one["type"] == kind), {})


def owned(real: RealApi, namespace: str, kind: str | None = None) -> list[str]:
    """`Kind/name` of everything that carries our label."""
    found = []
    for one, path in CHILDREN.items():
        if kind in (None, one):
            items = real.call(
                "GET", path.format(namespace) + "?labelSelector=pdcluster.dev/cluster"
            )[1]["items"]
            found += [f"{one}/{item['metadata']['name']}" for item in items]
    return sorted(found)


def events(real: RealApi, namespace: str) -> list[dict[str, Any]]:
    items = real.call("GET", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events")[1]["items"]
    return [item for item in items if item["reportingController"] == "pdcluster.dev/operator"]


def at_rest(real: RealApi, operator: Operator) -> None:
    """Wait until nothing was written for longer than the operator may hold a status back.

    Operator and API server answer again and again meanwhile, so a machine that stalls for a moment
    is no rest.
    """

    def idle() -> bool:
        status, page = operator.page("/metrics", operator.metrics)
        return real.ready() and status == 200 and "pdcluster_queue_depth 0.0" in page

    def quiet() -> bool:
        before = real.written
        for _ in range(math.ceil(2 * (QUIET_SECONDS + 2))):
            if not idle():
                return False
            time.sleep(0.5)
        return idle() and real.writes(before) == []

    until(quiet, 120, operator.said)


def until(check: Callable[[], Any], seconds: float, explain: Callable[[], Any]) -> Any:
    """Wait for something true and return it.

    Args:
        seconds: enough on a machine that is not busy; PATIENCE times as long is waited.
    """
    deadline = time.monotonic() + PATIENCE * seconds
    while True:
        found = None
        with contextlib.suppress(KeyError, IndexError, OSError):
            found = check()
        if found:
            return found
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)
