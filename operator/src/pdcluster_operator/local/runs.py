"""Folders for the logs and volumes of each run. The latest few are kept."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

KEPT = 5


def new_run_folder(cluster: str) -> Path:
    """Make a new folder in the user's cache, and remove those of old runs that have ended."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdcluster"
    base = Path(os.environ.get("PDCLUSTER_CACHE") or cache).expanduser() / "runs"
    base.mkdir(parents=True, exist_ok=True)
    finished = sorted(
        (run for run in base.iterdir() if not _is_running(run)), key=lambda run: run.stat().st_mtime
    )
    for run in finished[: max(0, len(finished) - KEPT + 1)]:
        shutil.rmtree(run, ignore_errors=True)
    folder = base / f"{cluster}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir()
    return folder


def _is_running(run: Path) -> bool:
    return Path("/proc", run.name.rpartition("-")[2]).exists()
