"""Run all parts, each in processes of its own, and print one page in Markdown."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

PARTS = ("oracle", "probe", "fence", "quarantine", "idle", "speed")
TRANSPORTS = {
    "cuda": {"cuda_ipc": "", "host staging over TCP": "tcp,cuda_copy"},
    "cpu": {"shared memory": "", "TCP": "tcp"},
}
NEEDS = ("torch", "numpy", "msgspec", "aiohttp", "nixl")
SECONDS = 240


def main() -> int:
    """Run what the arguments name; 0 if all of it was right."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu", "cuda:0"), default="auto",
        help="where the KV caches lie; auto takes a GPU if torch sees one",
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="the same with little data")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, with commas")
    parser.add_argument("--transport", help="one of those that are tried, for example TCP")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = arguments.device
    if arguments.part:
        _functions()[arguments.part](device, arguments.small)
        return 0
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        print(f"make gpu needs {', '.join(missing)}: python3 -m pip install nixl msgspec aiohttp")
        return 2
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    on = "cuda:0" if device == "cuda" else device
    print("\n".join(_machine(device)), flush=True)
    failed = 0
    for transport, tls in TRANSPORTS[device].items():
        if arguments.transport not in (None, transport):
            continue
        for part in arguments.parts.split(","):
            if part in ("speed", "idle") and tls and device == "cuda":
                continue  # staging is proven, not timed
            print(f"\n### {part} ({transport})\n", flush=True)
            failed += _run(part, on, tls, small=arguments.small)
    print(f"\n{'FAILED' if failed else 'All parts were right'}.")
    return 1 if failed else 0


def _functions() -> dict[str, Callable[[str, bool], None]]:
    from gpu import correct, speed

    return {
        "oracle": correct.oracle,
        "probe": correct.probe,
        "fence": correct.fence,
        "quarantine": correct.quarantine,
        "idle": speed.idle,
        "speed": speed.speed,
    }


def _run(part: str, device: str, tls: str, *, small: bool) -> int:
    quiet = {"NIXL_LOG_LEVEL": "WARN", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    environment = {**quiet, **os.environ, "PYTHONUNBUFFERED": "1"}
    if tls:
        environment["UCX_TLS"] = tls
    command = [sys.executable, "-m", "gpu", "--device", device, "--part", part]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command + ["--small"] * small, env=environment, timeout=SECONDS, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        done = -1
        print(f"{part} did not end within {SECONDS} s")
    print(f"\n({part}: {'right' if done == 0 else 'FAILED'}, {time.monotonic() - began:.0f} s)")
    return int(done != 0)


def _machine(device: str) -> list[str]:
    import torch

    lines = [
        f"# pdcluster on {torch.cuda.get_device_name(0) if device == 'cuda' else 'a CPU'}",
        "",
        (
            f"- Python {platform.python_version()}, torch {torch.__version__}, {_nixl()},"
            f" {os.cpu_count()} cores, kernel {platform.release()}"
        ),
    ]
    if device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        count = torch.cuda.device_count()
        lines.append(f"- {count} GPU(s) of {memory:.0f} GiB, driver {_driver()}")
    return lines


def _nixl() -> str:
    for name in ("nixl-cu13", "nixl-cu12", "nixl-rocm", "nixl"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "nixl of unknown version"


def _driver() -> str:
    found = Path("/proc/driver/nvidia/version")
    return found.read_text().splitlines()[0].split("  ")[1] if found.exists() else "unknown"


if __name__ == "__main__":
    sys.exit(main())
