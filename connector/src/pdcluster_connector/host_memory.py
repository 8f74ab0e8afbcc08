"""How much memory of this machine is left, and how many processes died because none was left.

The launcher reads it in a container, and local mode on the machine itself.
"""

from pathlib import Path
from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30
_UNLIMITED: Final = 1 << 60


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes that can be allocated before the kernel refuses or kills.

    This is the smaller of two numbers: the machine's ``MemAvailable``, and the cgroup's limit minus
    its use. File cache that can be dropped does not count as used: otherwise a container that has
    read a model once would seem full from then on. Reads cgroups v2, else v1.
    """
    machine = (_field(meminfo, "MemAvailable:") or 0) * 1024 or _UNLIMITED
    for folder, limit_file, used_file, cache in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
         "total_inactive_file"),
    ):  # fmt: skip
        if limit := _read(folder / limit_file).strip():
            if not limit.isdecimal():  # "max"
                break
            used = _read(folder / used_file).strip()
            in_use = int(used) if used.isdecimal() else 0
            in_use -= _field(folder / "memory.stat", cache) or 0
            return min(machine, max(0, int(limit) - max(0, in_use)))
    return machine


def oom_kills(
    cgroup: Path = Path("/sys/fs/cgroup"),
    own: Path = Path("/proc/self/cgroup"),
    machine: Path = Path("/proc/vmstat"),
) -> int:
    """How many processes the kernel has killed so far because memory ran out.

    Counts in this process's cgroup, v2 or v1. If none is readable, counts in the whole machine.
    """
    counters = [*_own_counters(cgroup, own), cgroup / "memory.events"]
    counters += [cgroup / "memory" / "memory.oom_control", machine]
    return next((n for path in counters if (n := _field(path, "oom_kill")) is not None), 0)


def _own_counters(cgroup: Path, own: Path) -> list[Path]:
    """The files of this process's cgroup. In a container, it looks like the root cgroup."""
    found = []
    for line in _read(own).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found.append(cgroup / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(cgroup / "memory" / path.lstrip("/") / "memory.oom_control")
    return found


def _field(path: Path, name: str) -> int | None:
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
