"""Debian's buildah: images built from Dockerfiles as root, without a daemon and without systemd."""

from __future__ import annotations

import collections
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.commands import run
from cluster.report import ClusterError, Progress, say

# Debian package: the program that shows it is there.
PACKAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}
# Other programs on this machine go first.
POLITELY = ("nice", "-n", "19")
LAST_LINES = 25


def ensure_packages() -> None:
    """Install what is missing.

    Raises:
        ClusterError: something is missing and cannot be installed from here.
    """
    missing = [package for package, program in PACKAGES.items() if not shutil.which(program)]
    if not missing:
        return
    wanted = " ".join(missing)
    if os.geteuid() or not shutil.which("apt-get"):
        raise ClusterError(f"images are built with {wanted}: apt-get install {wanted}")
    say(f"  installing the Debian packages {wanted}")
    run("apt-get", "update", "--quiet=2")
    run("apt-get", "install", "--yes", "--quiet=2", "--no-install-recommends", *missing)


class Buildah:
    """Builds and exports; keeps layers in `home`, so that only what changed is built again."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._command = [
            *("buildah", "--root", str(home / "store"), "--runroot", str(home / "run")),
            *("--storage-driver", _driver(home)),
        ]

    def has(self, name: str) -> bool:
        """Whether an image of that name is stored."""
        listed = run(*self._command, "images", "--format", "{{.Name}}:{{.Tag}}")
        return f"localhost/{name}" in listed.split()

    def build(
        self,
        name: str,
        dockerfile: Path,
        context: Path,
        *,
        arguments: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """Build the image `name`, NAME:TAG, and show the current step.

        Raises:
            ClusterError: a step failed. The message has the last lines of its output.
        """
        words = ["build", "--isolation", "chroot", "--layers", "--tag", name, *options]
        for key, value in (arguments or {}).items():
            words += ["--build-arg", f"{key}={value}"]
        self.watch(
            f"building the image {name}",
            [*self._command, *words, "--file", str(dockerfile), str(context)],
        )

    def export(self, name: str, reference: str, archive: Path) -> None:
        """Write the image as `docker save` does, under another name: completely or not at all."""
        partial = archive.with_name(archive.name + ".partial")
        partial.unlink(missing_ok=True)
        run(*self._command, "push", "--quiet", name, f"docker-archive:{partial}:{reference}")
        partial.replace(archive)

    def prune(self) -> None:
        """Remove layers that no named image needs any more."""
        run(*self._command, "rmi", "--prune", "--force")

    @staticmethod
    def watch(what: str, command: Sequence[str]) -> None:
        """Run a long command with low priority, and show its latest line as progress."""
        progress = Progress(what)
        process = subprocess.Popen(
            [*POLITELY, *command],
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        for line in process.stdout:
            last.append(line)
            progress.show(line.strip()[:100])
        if process.wait():
            raise ClusterError(f"{what} failed:\n" + "".join(last).rstrip())
        progress.done()


def _driver(home: Path) -> str:
    """Use overlay if this file system can. Otherwise use whole copies, which are slow and large."""
    home.mkdir(parents=True, exist_ok=True)
    chosen = home / "driver"
    if not chosen.exists():
        chosen.write_text("overlay" if _overlay_works(home) else "vfs")
    return chosen.read_text()


def _overlay_works(home: Path) -> bool:
    probe = home / "probe"
    folders = {name: probe / name for name in ("lower", "upper", "work", "merged")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    settings = ",".join(
        f"{option}={folders[name]}"
        for option, name in (("lowerdir", "lower"), ("upperdir", "upper"), ("workdir", "work"))
    )
    mount = ["mount", "-t", "overlay", "overlay", "-o", settings, str(folders["merged"])]
    works = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    if works:
        subprocess.run(["umount", str(folders["merged"])], check=True)
    shutil.rmtree(probe)
    return works
