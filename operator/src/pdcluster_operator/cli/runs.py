"""The runs of ``pdcluster up`` on this machine: their folders, and how other commands reach one."""

import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pdcluster_operator.cli.exits import Exit, UserError

KEPT_RUNS = 5
"""So many folders of runs stay, with their logs and volumes."""
KUBECONFIG = "kubeconfig"
BEGAN = "began"
"""The file that says when its process began. Later, another process may have its number."""
SHOWN = 5


class Run(NamedTuple):
    """A run that other commands can reach."""

    cluster: str
    folder: Path

    @property
    def kubeconfig(self) -> str:
        """The file that says how."""
        return str(self.folder / KUBECONFIG)


def new_run_folder(cluster: str) -> Path:
    """Make a folder for logs and volumes in the user's cache; remove those of old, ended runs."""
    base = _base()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    finished = sorted(
        (run for run in base.iterdir() if _is_ours(run) and not _lives(run)),
        key=lambda run: run.stat().st_mtime,
    )
    for run in finished[: max(0, len(finished) - KEPT_RUNS + 1)]:
        shutil.rmtree(run, ignore_errors=True)
    folder = base / f"{cluster}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    (folder / BEGAN).write_text(_began(str(os.getpid())))
    return folder


def find_run(named: str = "") -> Run:
    """Return the newest run that goes on, or the one that is named. Say so if there are others.

    Args:
        named: a PDCluster, or a run's folder; empty for any.

    Raises:
        UserError: there is none.
    """
    runs = sorted(_reachable(), key=lambda run: run.folder.stat().st_mtime, reverse=True)
    folder = Path(named).name
    found = [run for run in runs if named in ("", run.cluster) or folder == run.folder.name]
    if found:
        newest, *older = found
        if older:
            others = ", ".join(run.folder.name for run in older[:SHOWN])
            print(
                f"{len(found)} runs of `pdcluster up`: this is the newest, {newest.folder.name}; "
                f"name another by its folder: {others}",
                file=sys.stderr,
            )
        return newest
    start = "start one: pdcluster up FILE"
    if not runs:
        raise UserError(
            f"no `pdcluster up` of this user runs on this machine; {start}", Exit.MACHINE
        )
    others = ", ".join(run.folder.name for run in runs[:SHOWN])
    raise UserError(
        f"no `pdcluster up` of {named!r} runs on this machine, but {others}; name one of these, "
        f"or {start}",
        Exit.MACHINE,
    )


def is_running(cluster: str) -> bool:
    """Whether a `pdcluster up` of this PDCluster runs on this machine."""
    return any(run.cluster == cluster for run in _reachable())


def _base() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdcluster"
    return Path(os.environ.get("PDCLUSTER_CACHE") or cache).expanduser() / "runs"


def _reachable() -> Iterator[Run]:
    """Yield each run that has opened its door and has not ended."""
    for kubeconfig in _base().glob(f"*/{KUBECONFIG}"):
        folder = kubeconfig.parent
        if _is_ours(folder) and _is_ours(kubeconfig) and _lives(folder):
            yield Run(folder.name.rsplit("-", 3)[0], folder)


def _is_ours(path: Path) -> bool:
    """Whether nobody else wrote it: the cache may be shared, and a kubeconfig can run programs."""
    try:
        found = path.lstat()
    except FileNotFoundError:  # the run has ended
        return False
    shared = stat.S_ISLNK(found.st_mode) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.geteuid() and not shared


def _lives(run: Path) -> bool:
    began = _began(run.name.rpartition("-")[2])
    try:
        return began != "" and (run / BEGAN).read_text() in ("", began)
    except FileNotFoundError:  # it starts just now
        return began != ""


def _began(pid: str) -> str:
    """Return when a process began, in clock ticks since the boot; empty if there is none."""
    try:
        stat = Path("/proc", pid, "stat").read_bytes()
    except OSError:
        return ""
    return stat.rpartition(b")")[2].split()[19].decode()  # what is before has the program's name
