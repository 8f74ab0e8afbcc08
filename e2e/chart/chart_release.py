"""One installation of the chart under test, by helm 3 or helm 4, in a namespace of its own."""

from __future__ import annotations

import json
import secrets
import subprocess
from pathlib import Path

from cluster.report import ClusterError

CHART = Path(__file__).resolve().parent.parent.parent / "charts" / "pdcluster"
CRD = "pdclusters.pdcluster.dev"
SCALER_CRD = "prefillscalers.pdcluster.dev"


class Release:
    """One installation of the chart under test."""

    def __init__(self, cluster, major: int) -> None:
        self.cluster = cluster
        self.namespace = f"chart-helm{major}-{secrets.token_hex(3)}"
        self.binary = cluster.helm(major)
        # A CRD that exists already belongs to somebody. Removing it would remove every PDCluster.
        self.brings_crd = not cluster.kubectl("get", "crd", CRD, "-o", "name", "--ignore-not-found")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run helm. A failure raises nothing."""
        words = [str(self.binary), "--kubeconfig", str(self.cluster.kubeconfig)]
        return subprocess.run(
            [*words, "--namespace", self.namespace, *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def helm(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def words(self, *settings: str) -> tuple[str, ...]:
        """Arguments of an installation."""
        crds = () if self.brings_crd else ("--set", "crds.enabled=false")
        return ("install", "chart", str(CHART), *crds, *settings)

    def install(self, *settings: str) -> str:
        return self.helm(*self.words(*settings))

    def take_away(self) -> None:
        """Clean up after a test, whatever state the release is in."""
        self.run("uninstall", "chart")
        self.cluster.kubectl("delete", "namespace", self.namespace, "--wait=false")
        if self.brings_crd:
            self.cluster.kubectl("delete", "crd", CRD, SCALER_CRD, "--ignore-not-found")

    def get(self, kind: str, name: str) -> dict:
        words = ("get", kind, name, "-n", self.namespace, "-o", "json")
        return json.loads(self.cluster.kubectl(*words))

    def may(self, verb: str, resource: str, namespace: str = "default") -> bool:
        """Whether the operator's account may; `resource` is TYPE, TYPE/NAME or TYPE:SUBRESOURCE."""
        user = f"system:serviceaccount:{self.namespace}:chart-pdcluster-operator"
        resource, _, part = resource.partition(":")
        words = [*("auth", "can-i", verb, resource, "-n", namespace), f"--as={user}"]
        try:
            return "yes" in self.cluster.kubectl(*words, *([f"--subresource={part}"] * bool(part)))
        except ClusterError as error:
            if "exit code 1:" not in str(error):
                raise
            return False
