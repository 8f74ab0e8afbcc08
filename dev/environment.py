"""Make the development environment and print the path of its Python.

Needs nothing but Python 3.11 or newer: installs a pinned uv, then every pinned requirement
(vLLM for CPU, torch, NIXL and the router among them: about 6.5 GB) into the user's cache
folder. The environment's folder is named by a hash of the pins, so that a second clone finds
it, and a changed pin gets one of its own. Progress goes to standard error.

Cache folder: $PDCLUSTER_CACHE, else $XDG_CACHE_HOME/pdcluster, else ~/.cache/pdcluster.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "development.txt"
UV = "uv==0.13.8"
NEEDED_BYTES = 9 * 1024**3


def cache_folder() -> Path:
    """Return the folder for everything that is slow to make. It is never inside of the tree."""
    if own := os.environ.get("PDCLUSTER_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pdcluster"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fail(text: str) -> None:
    say(f"error: {text}")
    raise SystemExit(1)


def run(*command: str | Path, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [str(word) for word in command], stdout=sys.stderr, env=environment, check=False
    )
    if done.returncode:
        fail(f"{' '.join(map(str, command[:4]))} … ended with exit code {done.returncode}")


def make_uv(cache: Path) -> Path:
    folder = cache / UV.replace("==", "-")
    uv = folder / "bin" / "uv"
    if not uv.exists():
        say(f"  installing {UV}")
        try:
            run(sys.executable, "-m", "venv", folder)
        except SystemExit:
            fail(
                "this Python cannot make a virtual environment; install its venv module "
                "(Debian: apt-get install python3-venv)"
            )
        run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", UV)
    return uv


def make_environment(cache: Path, uv: Path) -> Path:
    pins = REQUIREMENTS.read_bytes()
    tag = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(pins + tag.encode()).hexdigest()[:12]
    folder = cache / "environments" / f"py{tag}-{digest}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    free = shutil.disk_usage(cache).free
    if free < NEEDED_BYTES:
        fail(
            f"{cache} has {free / 1e9:.1f} GB free, the environment needs "
            f"{NEEDED_BYTES / 1e9:.0f} GB; free some, or set PDCLUSTER_CACHE to another disk"
        )
    count = sum(1 for line in pins.splitlines() if b"==" in line)
    say(f"  installing {count} packages into {folder} (once; 1–5 minutes)")
    # Without bytecode the first start of an engine takes minutes longer.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["UV_CACHE_DIR"] = str(cache / "uv")
    environment["UV_LINK_MODE"] = "hardlink"
    run(
        uv,
        "venv",
        "--quiet",
        "--allow-existing",
        "--python",
        sys.executable,
        folder,
        environment=environment,
    )
    run(
        uv,
        "pip",
        "install",
        "--python",
        python,
        "--no-deps",
        "--compile-bytecode",
        "-r",
        REQUIREMENTS,
        environment=environment,
    )
    (folder / "complete").touch()
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print-uv", action="store_true", help="print the path of uv instead")
    options = parser.parse_args()
    if sys.version_info < (3, 11):
        fail(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("  waiting for another process that prepares the environment")
            fcntl.flock(lock, fcntl.LOCK_EX)
        uv = make_uv(cache)
        if options.print_uv:
            print(uv)
            return
        started = time.monotonic()
        python = make_environment(cache, uv)
        if (took := time.monotonic() - started) > 1:
            say(f"  environment ready after {took:.0f} s")
    print(python)


if __name__ == "__main__":
    main()
