"""The cgroup of the node's processes: one group of version 1 in every hierarchy.

The group also identifies the node. Every process in it belongs to the node, so no other process can
be killed by mistake, and no process id has to be stored.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.report import ClusterError

GROUP = "pdcluster-test"
COPIED_TO_CHILDREN = ("cpuset.cpus", "cpuset.mems")


@dataclass(frozen=True)
class Hierarchy:
    """One mounted cgroup file system."""

    path: Path
    kind: str  # "cgroup" or "cgroup2"
    options: str  # what mounts the same hierarchy elsewhere, such as "memory"

    @property
    def group(self) -> Path:
        return self.path / GROUP


def hierarchies() -> list[Hierarchy]:
    """Raises ClusterError if the memory controller of version 1 is not mounted."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, super_options = after.split()[:3]
        if kind in ("cgroup", "cgroup2"):
            names = [word for word in super_options.split(",") if word not in ("rw", "ro")]
            if names and names[0].startswith("name="):
                names.insert(0, "none")
            found.append(Hierarchy(Path(before.split()[4]), kind, ",".join(names)))
    if not any(h.kind == "cgroup" and "memory" in h.options.split(",") for h in found):
        raise ClusterError(
            "this machine's cgroups are of version 2, and the test node knows version 1 only: "
            "start a cluster another way (kind, minikube) and set KUBECONFIG to it"
        )
    return found


def create() -> None:
    for hierarchy in hierarchies():
        hierarchy.group.mkdir(exist_ok=True)
        if "cpuset" in hierarchy.options.split(","):
            for name in COPIED_TO_CHILDREN:
                (hierarchy.group / name).write_text((hierarchy.path / name).read_text())
            (hierarchy.group / "cgroup.clone_children").write_text("1")


def join() -> None:
    """Put this process into the node's group. Its children will be in it too."""
    for hierarchy in hierarchies():
        (hierarchy.group / "cgroup.procs").write_text(str(os.getpid()))


def processes() -> set[int]:
    """Every process of the node, in the host's numbers."""
    found: set[int] = set()
    for hierarchy in hierarchies():
        for folder, _, _ in os.walk(hierarchy.group):
            try:
                found.update(map(int, (Path(folder) / "cgroup.procs").read_text().split()))
            except FileNotFoundError:
                continue  # a container's group that was just removed
    return found


def kill(patience: float = 60.0) -> None:
    """End every process of the node at once; returns when they are gone."""
    end = time.monotonic() + patience
    while left := processes():
        if time.monotonic() > end:
            raise ClusterError(f"the node's processes {sorted(left)} do not end")
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def remove(patience: float = 60.0) -> None:
    """Remove the groups. The kernel frees the group of an ended process a moment later."""
    end = time.monotonic() + patience
    while left := [h.group for h in hierarchies() if not _removed(h.group)]:
        if time.monotonic() > end:
            raise ClusterError(f"these cgroups cannot be removed: {', '.join(map(str, left))}")
        time.sleep(0.05)


def _removed(group: Path) -> bool:
    for folder, _, _ in os.walk(group, topdown=False):
        try:
            Path(folder).rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return not group.exists()
