"""How much memory is left to a process, and how many processes died because none was left."""

from __future__ import annotations

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
    its use. File cache that can be dropped does not count as used. Reads cgroups v1 and v2.
    """
    machine = _field(meminfo, "MemAvailable:") * 1024
    v2, v1 = cgroup, cgroup / "memory"
    limit = _number(v2 / "memory.max") or _number(v1 / "memory.limit_in_bytes")
    used = _number(v2 / "memory.current") or _number(v1 / "memory.usage_in_bytes")
    cache = _field(v2 / "memory.stat", "inactive_file")
    cache = cache or _field(v1 / "memory.stat", "total_inactive_file")
    if not limit or limit >= _UNLIMITED:
        return machine or _UNLIMITED
    room = max(0, limit - max(0, used - cache))
    return min(room, machine) if machine else room


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
    return next((_field(path, "oom_kill") for path in counters if _has(path, "oom_kill")), 0)


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


def _has(path: Path, name: str) -> bool:
    return any(line.startswith(f"{name} ") for line in _read(path).splitlines())


def _number(path: Path) -> int:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else 0


def _field(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
