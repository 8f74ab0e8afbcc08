"""The paths of all files: nothing in the tree, everything in one folder of the user's cache.

kubernetes/tools/NAME-DIGEST/   programs, kept from run to run
kubernetes/bin/                 links to them, for a person's PATH
kubernetes/kubeconfig           how to reach the cluster, while there is one
kubernetes/node/                all that a running node writes; gone after `down`
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def cache_folder() -> Path:
    """$PDCLUSTER_CACHE, else $XDG_CACHE_HOME/pdcluster, else ~/.cache/pdcluster, as `make env`."""
    if own := os.environ.get("PDCLUSTER_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "pdcluster"


@dataclass(frozen=True)
class Places:
    """The folders of one user's cluster. `node` exists only while there is a node."""

    home: Path

    @classmethod
    def of_user(cls) -> Places:
        return cls(cache_folder() / "kubernetes")

    @property
    def programs(self) -> Path:
        return self.home / "tools"

    @property
    def links(self) -> Path:
        return self.home / "bin"

    @property
    def kubeconfig(self) -> Path:
        return self.home / "kubeconfig"

    @property
    def node(self) -> Path:
        return self.home / "node"

    @property
    def keys(self) -> Path:
        return self.node / "keys"

    @property
    def settings(self) -> Path:
        return self.node / "settings"

    @property
    def logs(self) -> Path:
        return self.node / "logs"

    @property
    def audit_log(self) -> Path:
        """Every write that the API server was asked for, one JSON object on each line."""
        return self.logs / "audit.log"

    @property
    def ended(self) -> Path:
        """One file for each program of the node that ended. It says how the program ended."""
        return self.node / "ended"

    @property
    def containerd_socket(self) -> Path:
        return self.node / "containerd.sock"
