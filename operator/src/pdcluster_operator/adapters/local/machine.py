"""What this machine lacks for a pod, found before a process is started, in one sentence each.

These are the checks of a scheduler and a kubelet. What an engine itself needs (ports, shared
memory, room for its KV cache) the launcher checks, here as in a cluster.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdcluster_operator.api.quantity import parse_quantity

Manifest = Mapping[str, Any]

CONFIG = "CreateContainerConfigError"
UNSCHEDULABLE = "Unschedulable"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a pod cannot start here: Kubernetes' reason, and a sentence with the remedy."""

    reason: str
    message: str


def find_problem(pod: Manifest, environment: Mapping[str, str], promised: int) -> Problem | None:
    """Return the first thing in the way of a pod, or None.

    Args:
        pod: the pod to be started.
        environment: what its containers inherit, PATH among it.
        promised: bytes of memory that pods which run already have asked for and not yet used.
    """
    spec = pod["spec"]
    if spec.get("initContainers"):
        return Problem(
            CONFIG,
            "local mode runs no init containers: remove them from podTemplate, or use a cluster",
        )
    for volume in spec.get("volumes") or ():
        if problem := _volume_problem(volume):
            return problem
    for container in spec["containers"]:
        program = (container.get("command") or [""])[0]
        if program and shutil.which(program, path=environment["PATH"]) is None:
            return Problem(
                CONFIG,
                f"{program} is not installed: install it next to "
                "python3 (`make env` does), or put its folder on PATH",
            )
        for entry in container.get("env") or ():
            if (
                entry.get("valueFrom", {}).keys() - {"fieldRef"}
                and entry["name"] not in environment
            ):
                return Problem(
                    CONFIG,
                    f"{entry['name']} comes from a Secret or a "
                    "ConfigMap, which local mode lacks: set it in your environment",
                )
    return _memory_problem(spec["containers"], promised)


def memory_request(pod: Manifest) -> int:
    """Bytes of memory that a pod's containers ask for."""
    return sum(_request(container) for container in pod["spec"]["containers"])


def available_memory() -> int:
    """Bytes that can be had without swapping, also below a container's own limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, int(limit) - used) if limit.isdigit() else free


def oom_kills() -> int:
    """Count processes that the kernel has killed for want of memory since boot."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def port_holder(address: str, port: int) -> str:
    """`` by NAME (pid N)`` of the listener, or nothing where it can't be told."""
    packed = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
    places = {f"{host}:{port:04X}" for host in (packed, "00000000", "0" * 32)}
    inodes = {
        fields[9]
        for table in ("tcp", "tcp6")
        for line in _table(Path("/proc/net", table))
        if (fields := line.split()) and fields[1] in places and fields[3] == "0A"
    }
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for link in (process / "fd").iterdir():
                if os.readlink(link).removeprefix("socket:[").removesuffix("]") in inodes:
                    return f" by {(process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:
            continue
    return ""


def _table(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:] if path.exists() else []


def _volume_problem(volume: Manifest) -> Problem | None:
    name = volume["name"]
    if path := volume.get("hostPath", {}).get("path"):
        folder = Path(path)
        remedy = "put the model there, or name its folder with --model-dir"
        if not folder.is_dir():
            return Problem(CONFIG, f"{path} (volume {name}) is no folder here: {remedy}")
        if not os.access(folder, os.R_OK | os.X_OK):
            return Problem(
                CONFIG,
                f"{path} (volume {name}) can't be read by this user: "
                "change its permissions (chmod -R a+rX), or choose another folder",
            )
        if not any(folder.iterdir()):
            return Problem(CONFIG, f"{path} (volume {name}) is empty: {remedy}")
    elif not volume.keys() & {"emptyDir", "configMap"}:
        kind = next((key for key in volume if key != "name"), "unknown")
        return Problem(
            CONFIG,
            f"volume {name} is a {kind}, which local mode lacks: "
            "use a hostPath, or name a model folder with --model-dir",
        )
    return None


def _memory_problem(containers: list[Manifest], promised: int) -> Problem | None:
    asked = sum(_request(container) for container in containers)
    free = available_memory() - promised
    if asked <= max(free, 0):
        return None
    return Problem(
        UNSCHEDULABLE,
        f"it asks for {asked / 2**30:.1f} GiB of memory and "
        f"{max(free, 0) / 2**30:.1f} GiB are free: stop other programs, or lower "
        "resources and the KV cache (--kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE) of its "
        "role",
    )


def _request(container: Manifest) -> int:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.get("memory")
    return int(parse_quantity(str(asked)) or 0) if asked else 0
