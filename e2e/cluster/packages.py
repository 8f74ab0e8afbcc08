"""What the distribution provides: three small packages, and tools that every system has."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from cluster.report import ClusterError, say

# Debian package: a file that shows it is there, or a program's name.
PACKAGES = {
    "runc": "runc",
    "nftables": "nft",  # kube-proxy runs it
    "busybox-static": "/bin/busybox",  # the shell of the test images
    "openssl": "openssl",
    "iproute2": "ip",
    "util-linux": "unshare",
}
SYSTEM_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def ensure_packages(packages: Mapping[str, str] = PACKAGES) -> None:
    """Install what is missing.

    Raises:
        ClusterError: something is missing and cannot be installed from here.
    """
    missing = _missing(packages)
    if not missing:
        return
    wanted = " ".join(missing)
    if os.geteuid() or not shutil.which("apt-get"):
        raise ClusterError(f"these packages are missing: apt-get install {wanted}")
    say(f"  installing the Debian packages {wanted}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "--option=DPkg::Lock::Timeout=300", "--quiet=2"]  # others may install, too
    install = [*apt, "install", "--yes", "--no-install-recommends", *missing]
    for command in (install, [*apt, "update"], install):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not _missing(packages):
            return
    raise ClusterError(f"apt-get could not install {wanted}: {done.stderr.strip()[-500:]}")


def _missing(packages: Mapping[str, str]) -> list[str]:
    return [package for package, witness in packages.items() if not _present(witness)]


def _present(witness: str) -> bool:
    if witness.startswith("/"):
        return Path(witness).exists()
    return shutil.which(witness, path=SYSTEM_FOLDERS) is not None
