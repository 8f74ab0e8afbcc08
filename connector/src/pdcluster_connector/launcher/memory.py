"""How much memory a process may still take here: the machine's, or what its cgroup leaves."""

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

    The smaller of the machine's ``MemAvailable`` and the cgroup's limit less what it uses, where
    file cache that can be dropped does not count as used. Version 1 and 2 of cgroups.
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
    """How many processes the kernel has killed for want of memory so far.

    Those of this process's cgroup, of version 2 or 1; of the whole machine where none is readable.
    """
    counters = [*_own_counters(cgroup, own), cgroup / "memory.events"]
    counters += [cgroup / "memory" / "memory.oom_control", machine]
    return next((_field(path, "oom_kill") for path in counters if _has(path, "oom_kill")), 0)


def _own_counters(cgroup: Path, own: Path) -> list[Path]:
    """The files of the cgroup that this process is in. In a container it looks like the root."""
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
