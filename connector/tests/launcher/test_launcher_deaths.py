"""Children that end in every way, and what their parent tells of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from multiprocessing.popen_fork import Popen
from pathlib import Path

import pytest

from pdcluster_connector.launcher import inside_vllm
from pdcluster_connector.launcher.engine.last_words import choose

pytestmark = pytest.mark.process


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(Popen, "poll", Popen.poll)  # it is put back after the test
    monkeypatch.setattr(os, "kill", os.kill)
    monkeypatch.setattr(inside_vllm, "say", lines.append)
    inside_vllm.report_deaths()
    return lines


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(600)


def run(target, *arguments, name: str = "EngineCore") -> multiprocessing.Process:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=target, args=arguments, name=name)
    child.start()
    return child


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_child_that_a_signal_ended(told, number):
    child = run(end_by, number)
    child.join()
    assert child.exitcode == -number
    words = f"vLLM's process EngineCore (pid {child.pid}) was killed by {number.name}"
    assert told == [words]
    assert (
        choose([f"pdcluster: {words}"]) == f"vLLM's process EngineCore was killed by {number.name}"
    )


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_a_child_that_this_process_ended(told, end):
    child = run(time.sleep, 600)
    getattr(child, end)()
    child.join()
    assert child.exitcode < 0
    assert told == []


@pytest.mark.parametrize("code", [0, 3])
def test_a_child_that_ended_by_itself(told, code):
    child = run(os._exit, code)
    child.join()
    assert child.exitcode == code
    assert told == []


def test_whoever_asks_first_it_is_told_once(told):
    child = run(end_by, signal.SIGKILL, name="VllmWorker-1")
    while child.is_alive():
        time.sleep(0.02)
    assert child.exitcode == -signal.SIGKILL
    child.join()
    assert len(told) == 1
    assert "VllmWorker-1" in told[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_a_child_that_has_ended_already_is_not_its_cause(told, number):
    child = run(end_by, signal.SIGKILL)
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.02)
    os.kill(child.pid, number)
    child.join()
    assert [line.rpartition(" ")[2] for line in told] == ["SIGKILL"]


def test_another_signal_than_ours_is_told(told):
    child = run(deaf, name="EngineCore")
    while not ignores_sigterm(child.pid):
        time.sleep(0.02)
    child.terminate()
    subprocess.run(["kill", "-KILL", str(child.pid)], check=True)
    child.join()
    assert [line.rpartition(" ")[2] for line in told] == ["SIGKILL"]


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    [ignored] = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")]
    return bool(int(ignored, 16) & 1 << (signal.SIGTERM - 1))
