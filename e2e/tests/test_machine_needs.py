"""A test that needs what this machine lacks is skipped, with what was not run; no other is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import machine

ROOT = Path(__file__).parents[2]
SYS_ADMIN, NET_ADMIN = 21, 12
NOTHING = {"PDCLUSTER_WITHOUT": "", "PDCLUSTER_RUN": ""}
SAMPLE = """
import pytest

import machine

machine.PROBES.update(pid1=lambda: "", network=lambda: "there is no cable")


@pytest.mark.needs("pid1")
def test_needs_what_is_here():
    pass


@pytest.mark.needs("network")
@pytest.mark.parametrize("number", range(2))
def test_needs_what_is_not_here(number):
    raise AssertionError


@pytest.fixture(scope="module")
def made():
    raise AssertionError("the machine is asked before any fixture")


@pytest.mark.needs("pid1", "files")
def test_needs_what_is_forced_off(made):
    raise AssertionError


def test_skips_by_itself():
    pytest.skip("another reason")
"""
LISTED = """\
- KV over a network that drops packets, or is slow: there is no cable (2 tests in test_sample.py)
- a side channel with thousands of connections: PDCLUSTER_WITHOUT names files (1 test in \
test_sample.py)
- another reason (1 test in test_sample.py)
"""


def run_pytest(folder: Path, sample: str, *options: str, **environment: str) -> str:
    """Return what pytest prints of a file of tests, with the repository's conftest.py."""
    (folder / "test_sample.py").write_text(sample)
    shutil.copy(ROOT / "conftest.py", folder)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"),
         "--rootdir", str(folder), *options, "test_sample.py"],
        cwd=folder, env={**os.environ, **NOTHING, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def listed_at_the_end(said: str, counts: str) -> list[str]:
    """Return the list behind which pytest prints nothing but its counts."""
    *_, listed, last = re.split(r"^=+ (?:not run on this machine )?", said, flags=re.MULTILINE)
    assert last.startswith(counts), said
    return listed.partition("=\n")[2].splitlines()


@pytest.mark.process
def test_what_is_skipped_is_listed_at_the_end(tmp_path: Path) -> None:
    """With workers; by the runs of one make in one list, and not by those of another."""
    first = run_pytest(tmp_path, SAMPLE, "-n", "2", PDCLUSTER_WITHOUT="files", PDCLUSTER_RUN="1234")
    lines = listed_at_the_end(first, "1 passed, 4 skipped")
    assert sorted(lines) == sorted(LISTED.splitlines())
    second = run_pytest(tmp_path, SAMPLE, "-k", "what_is_here", PDCLUSTER_RUN="1234")
    assert listed_at_the_end(second, "1 passed") == lines
    other = run_pytest(tmp_path, SAMPLE, "-k", "what_is_here", PDCLUSTER_RUN="1235")
    assert "1 passed" in other
    assert "not run" not in other
    without_cache = run_pytest(
        tmp_path, SAMPLE, "-p", "no:cacheprovider", PDCLUSTER_WITHOUT="files"
    )
    assert len(listed_at_the_end(without_cache, "1 passed, 4 skipped")) == 3


@pytest.mark.process
def test_a_mark_with_an_unknown_feature_is_refused(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, SAMPLE.replace('"network")', '"fp9")'))
    assert "test_needs_what_is_not_here[0]: no feature of a machine: 'fp9'; known are fp8, " in said
    assert "passed" not in said


@pytest.mark.process
def test_an_unknown_feature_cannot_be_forced_off(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, SAMPLE, PDCLUSTER_WITHOUT="files,fp9")
    assert "PDCLUSTER_WITHOUT: no feature of a machine: 'fp9'; known are fp8, " in said
    assert "passed" not in said


@pytest.mark.process
def test_local_mode_needs_room_for_what_its_processes_share(tmp_path: Path) -> None:
    sample = "import pytest\n\n@pytest.mark.local\ndef test_it():\n    raise AssertionError\n"
    said = run_pytest(tmp_path, sample, PDCLUSTER_WITHOUT="rings")
    assert "engines of several processes: PDCLUSTER_WITHOUT names rings (1 test in" in said
    assert "1 failed" in run_pytest(
        tmp_path, sample.replace("local", "nixl"), PDCLUSTER_WITHOUT="rings"
    )


def test_features_are_forced_off_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, meant in (("", ()), ("fp8", ("fp8",)), (" fp8, cgroup,", ("fp8", "cgroup"))):
        monkeypatch.setenv("PDCLUSTER_WITHOUT", said)
        assert machine.without() == frozenset(meant)


def test_each_feature_can_be_asked_for_and_is_described() -> None:
    assert machine.PROBES.keys() == machine.SHOWS.keys()
    _, _, section = (
        (ROOT / "CONTRIBUTING.md").read_text().partition("## What a machine cannot show")
    )
    table = re.findall(r"^\| `(\w+)` \|", section.partition("## ")[0], re.MULTILINE)
    assert table == list(machine.SHOWS)


def test_what_this_process_may_do_is_not_said_to_be_missing() -> None:
    held = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert held is not None
    rights = {bit for bit in (SYS_ADMIN, NET_ADMIN) if int(held[1], 16) >> bit & 1}
    if SYS_ADMIN in rights and shutil.which("unshare"):
        assert machine.PROBES["pid1"]() == ""
        if NET_ADMIN in rights and shutil.which("ip"):
            assert machine.PROBES["network"]() == ""
    if os.access("/sys/fs/cgroup/memory", os.W_OK) or os.access(
        "/sys/fs/cgroup/memory.max", os.W_OK
    ):
        assert machine.PROBES["cgroup"]() == ""
