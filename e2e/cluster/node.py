"""The node's first process: prepares its namespaces, starts every program, reaps children.

`cluster.machine` starts it as process 1 of new namespaces. It restarts nothing. A program that
ended leaves a file in `ended`, and a command that waits for the cluster reports it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from cluster import cgroups, control_plane, kubelet, network, policy
from cluster.access import ADMIN
from cluster.api import Api
from cluster.commands import run
from cluster.daemons import Daemon, Prepare, Programs
from cluster.packages import SYSTEM_FOLDERS
from cluster.places import Places
from cluster.report import ClusterError

FIRST: tuple[Prepare, ...] = (control_plane.etcd, control_plane.api_server, kubelet.containerd)
# If no API server answers, these give up or wait long before they try again.
WITH_API: tuple[Prepare, ...] = (
    control_plane.controller_manager,
    control_plane.scheduler,
    kubelet.kubelet,
    kubelet.kube_proxy,
    policy.enforcer,
)
# Folders of the host that the node's programs insist on writing to.
WRITTEN = ("/var/lib", "/var/log")


def furnish(places: Places) -> None:
    """Set name, network and mounts of the node. The process is already in its own namespaces."""
    socket.sethostname(network.NODE_NAME)
    network.join_node()
    for hierarchy in cgroups.hierarchies():
        # After a new mount, a hierarchy begins at this namespace's own group.
        run("umount", hierarchy.path)
        options = ("-o", hierarchy.options) if hierarchy.options else ()
        run("mount", "-t", hierarchy.kind, *options, hierarchy.kind, hierarchy.path)
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    for folder in WRITTEN:
        layers = places.node / "overlay" / folder.strip("/").replace("/", "-")
        upper, work = layers / "upper", layers / "work"
        upper.mkdir(parents=True)
        work.mkdir()
        run(
            "mount",
            "-t",
            "overlay",
            "-o",
            f"lowerdir={folder},upperdir={upper},workdir={work}",
            "overlay",
            folder,
        )


class Family:
    """The children of process 1: those that it started, and orphans of theirs."""

    def __init__(self, places: Places, programs: Programs) -> None:
        self._places = places
        self._programs = programs
        self._names: dict[int, str] = {}
        # containerd looks for its shim and for runc on PATH.
        shim = programs["containerd-shim-runc-v2"].parent
        self._environment = {"PATH": f"{shim}:{SYSTEM_FOLDERS}", "HOME": os.environ["HOME"]}

    def start(self, preparations: Iterable[Prepare]) -> None:
        for prepare in preparations:
            daemon = prepare(self._places, self._programs)
            self._names[self._spawn(daemon)] = daemon.name

    def _spawn(self, daemon: Daemon) -> int:
        with (self._places.logs / f"{daemon.name}.log").open("w") as log:
            return subprocess.Popen(
                [str(word) for word in daemon.command],
                env=self._environment,
                cwd=self._places.node,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ).pid

    def reap(self) -> None:
        """Note down a child that ended, if one did."""
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if name := self._names.pop(pid, None):
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            print(f"{name} {how}", flush=True)
            (self._places.ended / name).write_text(how)

    def wait(self) -> None:
        while self._names:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            self.reap()


def main() -> None:
    places = Places.of_user()
    try:
        furnish(places)
    except ClusterError as error:
        sys.exit(f"error: {error}")
    paths: dict[str, str] = json.loads((places.settings / "programs.json").read_text())
    family = Family(places, {name: Path(path) for name, path in paths.items()})
    family.start(FIRST)
    api = Api(places.settings / f"{ADMIN}.kubeconfig")
    while not api.ready():
        family.reap()
        time.sleep(0.05)
    family.start(WITH_API)
    family.wait()


if __name__ == "__main__":
    main()
