"""The host's side of the node: starts its namespaces, ends them, and leaves the host unchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from cluster import cgroups, network
from cluster.packages import SYSTEM_FOLDERS
from cluster.places import PACKAGE, Places
from cluster.report import ClusterError

# The kubelet sets these, and no namespace separates them from the host's.
GLOBAL_SYSCTLS = ("kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory")
NAMESPACES = (
    "--mount",
    "--propagation",
    "private",
    "--pid",
    "--mount-proc",
    "--net",
    "--uts",
    "--ipc",
    "--cgroup",
)


def start(places: Places) -> None:
    """Start the node's first process, `cluster.node`, and wire it to the host.

    Raises:
        ClusterError: it did not start; the log's last lines are in the text.
    """
    sysctls = {name: (Path("/proc/sys") / name).read_text() for name in GLOBAL_SYSCTLS}
    _sysctl_file(places).write_text(json.dumps(sysctls))
    cgroups.create()
    environment = {
        "PATH": SYSTEM_FOLDERS,
        "HOME": os.environ.get("HOME", "/root"),
        "PYTHONPATH": str(PACKAGE.parent),
        "PDCLUSTER_CACHE": str(places.home.parent),
    }
    # setsid --fork: the node outlives this process, and init reaps it.
    command = [
        "setsid",
        "--fork",
        "unshare",
        *NAMESPACES,
        "--fork",
        "--kill-child",
        sys.executable,
        "-m",
        "cluster.node",
    ]
    with (places.logs / "node.log").open("w") as log:
        subprocess.run(
            command,
            env=environment,
            cwd="/",
            preexec_fn=cgroups.join,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=True,
        )
    network.join_host(_first_process(places))


def running() -> bool:
    return bool(cgroups.processes())


def stop(places: Places) -> None:
    """End the node and remove all of it from the host. Does nothing if there is no node."""
    cgroups.kill()
    cgroups.remove()
    network.leave_host()
    if _sysctl_file(places).exists():
        for name, value in json.loads(_sysctl_file(places).read_text()).items():
            (Path("/proc/sys") / name).write_text(value)
    _remove(places.node)
    places.kubeconfig.unlink(missing_ok=True)


def _sysctl_file(places: Places) -> Path:
    return places.node / "host-sysctls.json"


def _first_process(places: Places, patience: float = 60.0) -> int:
    """The host's number of the process that is 1 in the node."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        for pid in cgroups.processes():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            numbers = status.partition("\nNSpid:")[2].partition("\n")[0].split()
            # unshare itself is still in the host's process namespace.
            if len(numbers) > 1 and numbers[-1] == "1":
                return int(numbers[0])
        time.sleep(0.01)
    raise ClusterError(f"the node did not start:\n{(places.logs / 'node.log').read_text()}")


def _remove(folder: Path) -> None:
    """Remove a folder, unless something is mounted under it: that could be somebody's data."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    for line in mounts:
        target = line.split()[4]
        if Path(target).is_relative_to(folder):
            raise ClusterError(f"{target} is still mounted: unmount it, then repeat this")
    if folder.exists():
        shutil.rmtree(folder)
