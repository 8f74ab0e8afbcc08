"""The cluster of the tests: the one that KUBECONFIG names, else ours, which is started for them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from cluster import binaries, images, lifecycle
from cluster.commands import run
from cluster.daemons import Programs
from cluster.places import Places
from cluster.report import ClusterError


@dataclass(frozen=True)
class Cluster:
    """A reachable cluster; `ours` says whether its node and its logs are on this machine."""

    kubeconfig: Path
    programs: Programs
    places: Places
    ours: bool

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Standard output; raises ClusterError with what kubectl said when it failed."""
        return run(
            self.programs["kubectl"], "--kubeconfig", self.kubeconfig, *arguments, stdin=stdin
        )

    def make_namespace(self, name: str) -> None:
        """Make a namespace whose pods can be made: until it has the account `default`, none can."""
        self.kubectl("create", "namespace", name)
        account = ("wait", "--for=create", "serviceaccount/default", "--timeout=120s")
        self.kubectl("--namespace", name, *account)

    def helm(self, major: int) -> Path:
        """Path of helm 3 or helm 4, which is built at its first use."""
        helms = [helm for helm in binaries.HELM_PROGRAMS if helm.name == f"helm{major}"]
        return binaries.provide(helms, self.places)[f"helm{major}"]

    def load(self, archive: Path) -> None:
        """Import an image archive into the node."""
        self._must_be_ours("images cannot be imported into it")
        images.load(archive, self.places, self.programs)

    @property
    def audit_log(self) -> Path:
        self._must_be_ours("its audit log cannot be read")
        return self.places.audit_log

    def _must_be_ours(self, consequence: str) -> None:
        if not self.ours:
            raise ClusterError(f"{self.kubeconfig} names a cluster that is not ours: {consequence}")


def connect() -> Cluster:
    """The user's cluster where KUBECONFIG names one, else the one of this machine, started."""
    places = Places.of_user()
    if other := lifecycle.users_own():
        kubectl = shutil.which("kubectl")
        own = [program for program in binaries.NODE_PROGRAMS if program.name == "kubectl"]
        programs = {"kubectl": Path(kubectl)} if kubectl else binaries.provide(own, places)
        return Cluster(Path(other), programs, places, ours=False)
    return Cluster(places.kubeconfig, lifecycle.up(places), places, ours=True)
