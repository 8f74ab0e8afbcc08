"""A launcher that is process 1, as in a pod, and is told to stop while it still starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched import CONFIG, HERE

import machine
from loopback import free_port

pytestmark = pytest.mark.process

MOMENTS = 10
# Runs what the zip file holds with a finder that sees each import: it writes the modules' names
# down, or sends SIGTERM at the Nth of them.
SCRIPT = """\
import os, runpy, signal, sys

class Finder:
    seen = 0

    def find_spec(self, name, path=None, target=None):
        self.seen += 1
        if moment is None:
            print(name, file=sys.stderr)
        elif self.seen == moment:
            os.kill(os.getpid(), signal.SIGTERM)

moment = int(sys.argv[1]) or None
sys.argv = sys.argv[2:]
sys.meta_path.insert(0, Finder())
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FIRST = "pdcluster_connector.launcher.main"


def start(bundle: Path, model: Path, behaviour: str, moment: int, *before: str) -> subprocess.Popen:
    config = json.dumps(
        {
            **CONFIG,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"side_channel_port": free_port()},
        }
    )
    return subprocess.Popen(
        [
            *before, sys.executable, "-c", SCRIPT, str(moment), str(bundle),
            "--engine", "default.tiny.prefill.r1.0", "--role", "prefill",
            "--host", "127.0.0.1", "--port", str(free_port()), "--runner", "stand_in_engine",
            "--drain-seconds", "600", "--stop-seconds", "600",
            "--", str(model), "--host", "127.0.0.1", "--port", str(free_port()),
            "--kv-transfer-config", config,
        ],
        env={**os.environ, "PYTHONPATH": str(HERE), "STAND_IN": behaviour},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen) -> str:
    """What it said until its end; one that goes on fails the test."""
    try:
        return process.communicate(timeout=240)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it goes on: {process.communicate()[1]}") from None


@pytest.mark.needs("pid1")
def test_process_1_ends_whenever_it_is_told_to(unpacked, model):
    names = ended(start(unpacked, model, "exit:0", 0)).splitlines()
    first, last = names.index(FIRST) + 1, len(names)
    assert last - first > 5 * MOMENTS, "most of the launcher is imported after it heeds SIGTERM"
    moments = [first + (last - first) * number // MOMENTS for number in range(MOMENTS)]
    alone = machine.unshared(*machine.PROCESSES)
    # An engine that never gets ready: the launcher ends by being told to, or not at all.
    for at in range(0, MOMENTS, 5):
        some = [start(unpacked, model, "slow:600", m, *alone) for m in moments[at : at + 5]]
        try:
            for moment, process in zip(moments[at:], some, strict=False):
                said = ended(process)
                where = f"at the import of {names[moment - 1]}: {said}"
                # Killed: the engine's process was there already.
                assert process.returncode in {128 + signal.SIGTERM, 128 + signal.SIGKILL}, where
        finally:
            for process in some:
                process.kill()


def test_what_comes_before_the_handlers_is_small(pyz):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules)\n"
        "import pdcluster_connector.launcher.__main__\n"
        "print(*sorted(name for name in set(sys.modules) - before if name[:4] == 'pdcl'))\n"
        "print(len(set(sys.modules) - before))"
    )
    command = [sys.executable, "-I", "-c", code, str(pyz)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ours, number = done.stdout.splitlines()
    package = "pdcluster_connector"
    assert ours.split() == [package, f"{package}.launcher", f"{package}.launcher.__main__"]
    assert int(number) < 30
