"""The chart on the test cluster; how to kill and stop the operator, and to see what it writes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster_access import Proxy

from authority import Authority
from cluster import audit, cgroups
from cluster.session import Cluster
from images.for_cluster import load_engine_image, operator_values
from pdcluster_connector.protocol.engine_id import OPERATOR_NAME
from pdcluster_operator.adapters.engine_authority import EngineAuthority
from pdcluster_operator.adapters.own_secrets import CERTIFICATE, KEY
from waiting import until

CHART = Path(__file__).resolve().parents[2] / "charts" / "pdcluster"
NAMESPACE = "pdcluster-system"
RELEASE = "pdcluster"
AUTHORITY = f"{RELEASE}-engine-ca"
OWN_CERTIFICATE = "operator-certificate"
OPERATOR, WEBHOOK = f"{RELEASE}-operator", f"{RELEASE}-webhook"
OPERATOR_PODS = "--selector=app.kubernetes.io/component=operator"
OPERATOR_USER = f"system:serviceaccount:{NAMESPACE}:{OPERATOR}"


def certificate_secret(
    authority: Authority, secret: str, name: str, days: int = 10
) -> dict[str, Any]:
    """Return a Secret with the certificate of ``name``, as cert-manager would write it."""
    with tempfile.TemporaryDirectory() as folder:
        files = authority.files(Path(folder), "x", name=name, days=days)
        parts = (files.ca, files.certificate, files.key)
        data = {part.name: base64.b64encode(part.read_bytes()).decode() for part in parts}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": secret}, "data": data}


class Installation:
    """The operator and its webhook, as `helm install` leaves them."""

    def __init__(self, cluster: Cluster, proxy: Proxy) -> None:
        self.cluster, self._proxy = cluster, proxy
        self.of_users = Authority("the users' CA")

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("--namespace", NAMESPACE, *words, stdin=stdin)

    def install(self) -> str:
        """Build and import the images, then `helm upgrade --install`; what helm said."""
        load_engine_image(self.cluster)
        values: dict[str, Any] = {
            "image": operator_values(self.cluster),
            "operator": {
                "allowHostPathModels": True,
                "engineCertificate": {"existingSecret": OWN_CERTIFICATE},
            },
            # A webhook that does not answer for some seconds is late, and no failure.
            "webhook": {"replicas": 1, "timeoutSeconds": 30},
        }
        # A run that was killed within helm left the release locked.
        self._helm("uninstall", RELEASE, "--ignore-not-found", "--wait")
        self._give_own_certificate()
        done = self._helm(
            *("upgrade", "--install", RELEASE, str(CHART), "--create-namespace"),
            *("--values=-", "--wait", "--timeout=180s"),
            stdin=json.dumps(values),
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.report()}"
        return done.stdout

    def _give_own_certificate(self) -> None:
        """Write the Secret by which engines with certificates of users know the operator."""
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        secret = certificate_secret(self.of_users, OWN_CERTIFICATE, OPERATOR_NAME)
        for document in (space, secret):
            self.kubectl("apply", "--filename=-", stdin=json.dumps(document))

    def test(self) -> str:
        """`helm test`: what helm said."""
        done = self._helm("test", RELEASE, "--timeout=180s")
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.report()}"
        return done.stdout

    def _helm(self, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        program = [str(self.cluster.helm(4)), "--kubeconfig", str(self.cluster.kubeconfig)]
        command = [*program, "--namespace", NAMESPACE, *words]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)

    def report(self) -> str:
        words = ("get", "pods,events", "--output=wide")
        selector = "--selector=app.kubernetes.io/instance=pdcluster"
        logs = ("logs", selector, "--tail=40", "--prefix", "--ignore-errors")
        return self.kubectl(*words) + self.kubectl(*logs)

    def authority(self) -> EngineAuthority:
        """The CA of the engines' certificates."""
        data = json.loads(self.kubectl("get", "secret", AUTHORITY, "--output=json"))["data"]
        return EngineAuthority(*(base64.b64decode(data[name]) for name in (CERTIFICATE, KEY)))

    def pods(self, component: str) -> list[dict[str, Any]]:
        label = f"app.kubernetes.io%2Fcomponent%3D{component}"
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={label}"
        found = self._proxy.get(path) or {}
        return list(found["items"])

    def ready(self, component: str) -> int:
        """How many pods of a component are ready and meant to stay."""
        return sum(
            condition["type"] == "Ready" and condition["status"] == "True"
            for pod in self.pods(component)
            if "deletionTimestamp" not in pod["metadata"]
            for condition in pod.get("status", {}).get("conditions", ())
        )

    def scale(self, component: str, replicas: int) -> None:
        """Scale a component; returns when all its pods are ready, or gone for 0 replicas."""
        name = {"operator": OPERATOR, "webhook": WEBHOOK}[component]
        self.kubectl("scale", f"deployment/{name}", f"--replicas={replicas}")

        def done() -> bool:
            return self.ready(component) == replicas and len(self.pods(component)) == replicas

        self._wait(f"{replicas} pods of {component}", done)

    def kill(self) -> None:
        """Send SIGKILL to the operator's process as soon as it exists, and get a new pod at once.

        A new pod, because the kubelet would wait longer and longer before it starts the same
        container again. On another cluster, the kubelet kills: a grace of 0 seconds is SIGKILL.
        """
        if self.cluster.ours:
            self._wait("process of the operator", lambda: self.processes("run"))
            for pid in self.processes("run"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        force = ("--force", "--grace-period=0")
        self.kubectl("delete", "pod", OPERATOR_PODS, *force, "--wait=false")

    def restart(self) -> None:
        """Get a new pod. The old one gives its Leases back, so nobody waits until they end."""
        self.kubectl("delete", "pod", OPERATOR_PODS, "--wait=false")

    @staticmethod
    def processes(command: str) -> list[int]:
        """The node's processes that are `pdcluster-operator COMMAND`, in the host's numbers."""
        found = []
        for pid in cgroups.processes():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            names = [word.rpartition(b"/")[2] for word in words[:3]]
            if b"pdcluster-operator" in names and command.encode() in words:
                found.append(pid)
        return found

    def wait_ready(self) -> None:
        self._wait("operator", lambda: self.ready("operator") == 1)

    def writes(self, since: float) -> list[audit.Write]:
        """What the operator asked the API server to write since a moment (seconds since 1970).

        The renewals of its Leases are left out: they are what it is alive by.
        """
        found = audit.read_writes(self.cluster.audit_log, since, OPERATOR_USER)
        return [write for write in found if write.resource != "leases"]

    def _wait(self, what: str, holds: Callable[[], object]) -> None:
        until(what, holds, 180, self.report)
