"""Run all parts, each in processes of its own, and print one page in Markdown.

Stage 1 is the connector over NIXL. Stage 2 is whole vLLM engines, where vLLM is installed.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from gpu import PREFILL_DEVICE
from gpu.attention import attention
from gpu.hand_over import GROUPS, run_part

PARTS = ("oracle", "probe", "fence", "quarantine", "idle", "speed", "threads", "pauses")
ATTENTION = "attention"
STAGING, RDMA = "host staging over TCP", "RDMA"
TRANSPORTS = {
    "cuda": {"cuda_ipc": "", STAGING: "tcp,cuda_copy", RDMA: "rc,ud,cuda_copy"},
    "cpu": {"shared memory": "", "TCP": "tcp", RDMA: "rc,ud"},
}
NICS = Path("/sys/class/infiniband")
NEEDS = ("torch", "numpy", "msgspec", "aiohttp", "nixl")
SECONDS = 240
ENGINE_SECONDS = 600


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu", "cuda:0"), default="auto",
        help="where the KV caches lie; auto takes a GPU if torch sees one",
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="the same with little data")
    parser.add_argument(
        "--parts",
        help=f"which parts, with commas: {', '.join(PARTS)}; where vLLM is installed, also"
        f" {', '.join(GROUPS['cuda'])} (on a CPU only vllm) and {ATTENTION}. All by default",
    )
    parser.add_argument(
        "--prefill-device", metavar="cuda:1",
        help="where prefill's KV lies, if that is another GPU than decode's, which is cuda:0",
    )  # fmt: skip
    parser.add_argument("--transport", help="one of those that are tried, for example TCP")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Run what the arguments name; 0 if all of it was right, 2 if nothing was run."""
    parser = _parser()
    arguments = parser.parse_args()
    device = arguments.device
    if arguments.folder:
        run = attention if arguments.part == ATTENTION else partial(run_part, arguments.part)
        right = run(device, arguments.folder, small=arguments.small)
        return 0 if right else 1
    if arguments.part:
        _functions()[arguments.part](device, arguments.small)
        return 0
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        print(f"make gpu needs {', '.join(missing)}: python3 -m pip install nixl msgspec aiohttp")
        return 2
    if device == "auto":
        device = "cuda" if _gpus() else "cpu"
    device = device.partition(":")[0]
    if device == "cuda" and not _gpus():
        parser.error("--device cuda: torch sees no GPU here")
    if arguments.transport not in (None, *TRANSPORTS[device]):
        tried = ", ".join(TRANSPORTS[device])
        parser.error(f"--transport {arguments.transport}: on {device} these are tried: {tried}")
    known = [*PARTS, *GROUPS[device], ATTENTION]
    parts = [part.strip() for part in arguments.parts.split(",")] if arguments.parts else known
    if unknown := set(parts) - set(known):
        parser.error(f"there is no part {', '.join(sorted(unknown))} on {device}")
    on = "cuda:0" if device == "cuda" else device
    if arguments.prefill_device:
        _put_prefill_on(arguments.prefill_device, device, parser)
    print("\n".join(_machine(device)), flush=True)
    failed = _stage_1(
        [part for part in parts if part in PARTS], on, arguments.transport, small=arguments.small
    )
    failed += _stage_2([part for part in parts if part not in PARTS], on, small=arguments.small)
    if not failed:
        print("\nNothing was run.")
        return 2
    print(f"\n{'FAILED' if any(failed) else 'All that was run was right'}.")
    return int(any(failed))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _put_prefill_on(name: str, device: str, parser: argparse.ArgumentParser) -> None:
    there = [f"cuda:{number}" for number in range(_gpus())] if device == "cuda" else ["cpu"]
    if name not in there:
        parser.error(f"--prefill-device: there is no {name} here, only {', '.join(there)}")
    os.environ[PREFILL_DEVICE] = name


def _functions() -> dict[str, Callable[[str, bool], None]]:
    from gpu import correct, pauses, speed, threads

    return {
        "oracle": correct.oracle,
        "probe": correct.probe,
        "fence": correct.fence,
        "quarantine": correct.quarantine,
        "idle": speed.idle,
        "speed": speed.speed,
        "threads": threads.threads,
        "pauses": pauses.pauses,
    }


def _stage_1(parts: list[str], device: str, only: str | None, *, small: bool) -> list[bool]:
    """Run the parts over each transport, or over ``only`` one; return which failed."""
    failed: list[bool] = []
    for transport, tls in TRANSPORTS[device.partition(":")[0]].items():
        if not parts or only not in (None, transport):
            continue
        if transport == RDMA and not (NICS.is_dir() and any(NICS.iterdir())):
            print(f"\nRDMA is left out: {NICS} has no device.")
            continue
        for part in parts:
            if part in ("speed", "idle", "threads") and transport == STAGING:
                continue  # staging is proven, not timed
            print(f"\n### {part} ({transport})\n", flush=True)
            failed.append(_run(part, device, {"UCX_TLS": tls} if tls else {}, small=small))
    return failed


def _stage_2(parts: list[str], device: str, *, small: bool) -> list[bool]:
    """Run real engines, with one model for all parts; return which parts failed."""
    if parts and find_spec("vllm") is None:
        print(f"\nStage 2 ({', '.join(parts)}) needs vLLM, which is not installed here.")
        return []
    failed: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="pdcluster-gpu-") as folder:
        for part in parts:
            print(f"\n### {part}\n", flush=True)
            failed.append(_run(part, device, {}, small=small, folder=folder))
    return failed


def _run(
    part: str, device: str, environment: dict[str, str], *, small: bool, folder: str = ""
) -> bool:
    """Run one part in processes of its own; return whether it failed."""
    quiet = {"NIXL_LOG_LEVEL": "WARN", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    variables = {**quiet, **os.environ, "PYTHONUNBUFFERED": "1", **environment}
    command = [sys.executable, "-m", "gpu", "--device", device, "--part", part]
    command += ["--small"] * small + ["--folder", folder] * bool(folder)
    seconds = ENGINE_SECONDS if folder else SECONDS
    began = time.monotonic()
    try:
        done = subprocess.run(command, env=variables, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        done = -1
        print(f"{part} did not end within {seconds} s")
    print(f"\n({part}: {'right' if done == 0 else 'FAILED'}, {time.monotonic() - began:.0f} s)")
    return done != 0


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
