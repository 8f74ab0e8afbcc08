"""What tests need of the machine that they run on, and the list of what was not run.

``@pytest.mark.needs("fp8")`` skips a test where the machine lacks that feature. Each process asks
the machine once. ``PDCLUSTER_WITHOUT=fp8,cgroup`` treats these features as missing. At the end of a
run, the root's ``conftest.py`` prints :func:`not_run`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

OPEN_FILES = 12_000
ROOM_OF_RINGS = 256 << 20
"""vLLM asks for 160 MiB before it makes a ring of messages, and fills little of it."""


def without() -> frozenset[str]:
    """Return the features that ``PDCLUSTER_WITHOUT`` names.

    Raises:
        ValueError: one of them is not known.
    """
    named = os.environ.get("PDCLUSTER_WITHOUT", "").split(",")
    return frozenset(known(word.strip() for word in named if word.strip()))


def known(features: Iterable[str]) -> list[str]:
    """Return the same features.

    Raises:
        ValueError: one of them is not known.
    """
    features = list(features)
    for feature in features:
        if feature not in SHOWS:
            raise ValueError(f"no feature of a machine: {feature!r}; known are {', '.join(SHOWS)}")
    return features


@functools.cache
def lacks(feature: str) -> str:
    """Return why this machine cannot run what needs a feature; nothing if it can."""
    if feature in without():
        return f"PDCLUSTER_WITHOUT names {feature}"
    return PROBES[feature]()


def reason(features: Iterable[str]) -> str:
    """Return what is not run and why, if one of these features is missing; else nothing."""
    missing = [(SHOWS[feature], why) for feature in features if (why := lacks(feature))]
    return "; ".join(f"{shown}: {why}" for shown, why in missing)


@functools.cache
def unshared(*options: str) -> tuple[str, ...]:
    """Return words before a command that run it in namespaces of its own.

    Root may make them, but often not in a container. Other users may on most machines, as the root
    of a user namespace. Where neither works, there are no words.
    """
    for user in ((), ("--user", "--map-root-user")):
        words = ("unshare", *user, *options)
        if not _refusal(*words, "true"):
            return words
    return ()


@functools.cache
def python310() -> str:
    """Return a Python 3.10, of this user's path or of pyenv; nothing if there is none."""
    versions = Path.home().glob(".pyenv/versions/3.10.*/bin/python3.10")
    found = [shutil.which("python3.10"), *map(str, versions)]
    return next((path for path in found if path and not _refusal(path, "-c", "")), "")


@contextlib.contextmanager
def small_cgroup(limit: int) -> Iterator[Path]:
    """Make a cgroup with a limit of memory in bytes, of the version that this machine has.

    Raises:
        OSError: this user may not, or there is no controller for memory.
    """
    with _cgroup("memory") as (folder, first):
        (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit))
        if not first:
            (folder / "memory.swap.max").write_text("0")
        yield folder


@contextlib.contextmanager
def slow_cgroup(share: float, processes: Iterable[int] = ()) -> Iterator[Path]:
    """Let processes together have this share of one core, until the end.

    Raises:
        OSError: this user may not, or there is no controller for quotas of CPU time.
    """
    period = 100_000  # microseconds
    with _cgroup("cpu") as (folder, first):
        quota = round(share * period)
        if first:
            (folder / "cpu.cfs_period_us").write_text(str(period))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (folder / "cpu.max").write_text(f"{quota} {period}")
        try:
            for process in processes:
                (folder / "cgroup.procs").write_text(str(process))
            yield folder
        finally:
            for process in (folder / "cgroup.procs").read_text().split():
                (folder.parent / "cgroup.procs").write_text(process)


@contextlib.contextmanager
def _cgroup(controller: str) -> Iterator[tuple[Path, bool]]:
    """Make a cgroup for one controller. Yields it, and whether it is of version 1."""
    root = Path("/sys/fs/cgroup")
    first = (root / controller / "cgroup.procs").exists()
    folder = (root / controller if first else root) / f"pdcluster-test-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder, first
    finally:
        deadline = time.monotonic() + 10
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        folder.rmdir()


def not_run(skipped: Iterable[tuple[str, str]], before: Iterable[str] = ()) -> list[str]:
    """Return a line for each reason why tests were skipped.

    Args:
        skipped: node ids, and why each was skipped. An id that comes twice counts once.
        before: lines of an earlier run, which come first.
    """
    tests: dict[str, dict[str, None]] = defaultdict(dict)
    for node, why in skipped:
        tests[why][node] = None
    lines = list(before)
    for why, nodes in tests.items():
        files = sorted({node.partition("::")[0].rpartition("/")[2] for node in nodes})
        count = f"{len(nodes)} test{'s' if len(nodes) > 1 else ''}"
        lines.append(f"- {why} ({count} in {', '.join(files)})")
    return lines


def _refusal(*command: str) -> str:
    """Return what a command says that fails; nothing if it works."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return f"there is no program {command[0]}"
    return (done.stderr.strip() or f"{command[0]} failed") if done.returncode else ""


def _no_cgroup() -> str:
    try:
        with small_cgroup(300 << 20):
            return ""
    except OSError as error:
        return f"no memory cgroup can be made ({error.strerror})"


def _no_quota() -> str:
    try:
        with slow_cgroup(1.0):
            return ""
    except OSError as error:
        return f"no cgroup with a quota of CPU time can be made ({error.strerror})"


def _no_network() -> str:
    """A pair of network devices, one of them in a named namespace, as ``test_cut_network`` has."""
    device = f"pdp{os.getpid()}"
    cable = f"ip link add {device} type veth peer name {device} netns {device}"
    slow = f"tc -n {device} qdisc add dev {device} root tbf rate 1mbit burst 9kb latency 1ms"
    if refusal := _refusal("ip", "netns", "add", device):
        return f"no network namespace can be made ({refusal})"
    refusal = _refusal(*cable.split()) or _refusal(*slow.split())
    _refusal("ip", "netns", "del", device)
    return refusal and f"no pair of network devices can be made, or none is slow ({refusal})"


def _no_pid1() -> str:
    return "" if unshared(*PROCESSES) else "no process namespace can be made"


def _no_small_shm() -> str:
    """A /dev/shm of its own, as ``test_nixl_options`` has."""
    words = unshared("--mount")
    if not words:
        return "no mount namespace can be made"
    refusal = _refusal(*words, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    return refusal and f"nothing can be mounted at /dev/shm ({refusal})"


def _no_rings() -> str:
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        return f"there is no /dev/shm ({error.strerror})"
    free = status.f_bavail * status.f_frsize
    return "" if free >= ROOM_OF_RINGS else f"/dev/shm has {free >> 20} MiB free"


def _few_files() -> str:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return f"a process may open {hard} files" if 0 <= hard < OPEN_FILES else ""


def _no_python310() -> str:
    return "" if python310() else "there is no Python 3.10"


def _no_browser() -> str:
    import browser

    return browser.problem()


def _ask_vllm() -> str:
    raise LookupError("only tests in connector/tests/vllm may need fp8: their fork host asks vLLM")


PROCESSES = ("--pid", "--fork", "--mount-proc", "--kill-child")
# By feature: what is not shown without it, and the function that asks this machine.
SHOWS = {
    "fp8": "engines with an fp8 or int8 KV cache",
    "cgroup": "an engine that the kernel kills because memory is short",
    "quota": "a prefill engine that gets a twentieth of a core",
    "network": "KV over a network that drops packets, or is slow",
    "pid1": "a launcher that is process 1 of its namespace",
    "shm": "NIXL beside a /dev/shm with little room",
    "files": "a side channel with thousands of connections",
    "rings": "engines of several processes",
    "browser": "the page of `pdcluster ui` in a browser",
    "python310": "a router's gate with the oldest Python of a router's image",
}
PROBES: dict[str, Callable[[], str]] = {
    "fp8": _ask_vllm,
    "cgroup": _no_cgroup,
    "quota": _no_quota,
    "network": _no_network,
    "pid1": _no_pid1,
    "shm": _no_small_shm,
    "files": _few_files,
    "rings": _no_rings,
    "browser": _no_browser,
    "python310": _no_python310,
}
