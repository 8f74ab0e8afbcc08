"""``status``, ``links`` and ``logs`` of a ``pdcluster up`` with small engines, through its door."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import yaml
from test_up_command import ENVIRONMENT, Up

from pdcluster_operator.cli.main import main

pytestmark = pytest.mark.process

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A run that is Ready: two prefill engines, one decode engine."""
    folder = tmp_path_factory.mktemp("run")

    def change(manifest: dict) -> None:
        manifest["spec"]["prefill"]["replicas"] = 2

    up = Up(folder, "--plain", "--keep-going", change=change)
    up.until("Ctrl-C stops it")
    yield up
    up.process.send_signal(signal.SIGINT)
    assert up.wait() == 130
    assert up.left() == []
    assert list(folder.glob("cache/**/kubeconfig")) == []


@pytest.fixture
def command(
    run: Up, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Run a command in this process: exit code, output and errors."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(run.folder / "cache"))
    monkeypatch.delenv("PDCLUSTER_CACHE", raising=False)
    before = signal.getsignal(signal.SIGINT)

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([words[0], "tiny", "--local", *words[1:]])
        said = capsys.readouterr()
        return code, said.out, said.err

    yield call
    signal.signal(signal.SIGINT, before)


def started(run: Up, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **ENVIRONMENT, "XDG_CACHE_HOME": str(run.folder / "cache")}
    return subprocess.Popen(
        [sys.executable, "-m", "pdcluster_operator", words[0], "tiny", "--local", *words[1:]],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_status_and_links_of_a_run_that_is_ready(command: Command) -> None:
    code, said, _ = command("status")
    assert code == 0
    assert said.startswith("tiny serves: ")
    assert "prefill   2/2 ready" in said
    assert re.search(r"endpoint  http://127\.\d+\.\d+\.\d+:8000\n", said)
    code, said, _ = command("status", "-o", "json")
    document = json.loads(said)
    assert (code, document["kind"], document["ready"]) == (0, "Status", True)
    assert len(document["engines"]) == 3
    code, said, _ = command("status", "--watch", "--until-ready", "-o", "json")
    assert code == 0
    assert json.loads(said)["ready"], "one document in one line"
    code, said, _ = command("links")
    assert code == 0
    assert said.startswith("tiny: 2 of 2 links verified\n")
    assert said.count("●") == 3
    assert re.search(r"Verified +2 +< \d+ (s|min)", said), "GB/s, and the age of the proof"
    code, said, _ = command("links", "-o", "yaml")
    document = yaml.safe_load(said)
    assert [one["state"] for one in document["links"]] == ["Verified"] * 2


def test_logs_of_all_pods_together(command: Command) -> None:
    code, said, _ = command("logs")
    assert code == 0
    loading = re.findall(r"tiny-prefill-\S+ +loading default\.tiny\.prefill", said)
    assert len(set(loading)) == 2, "another test may have killed and started one again"
    assert re.search(r"tiny-decode-\S+ +loading default\.tiny\.decode", said)
    assert re.search(r"tiny-router-\S+ ", said)
    code, said, _ = command("logs", "--role", "decode", "--tail", "1")
    assert code == 0
    assert re.fullmatch(r"tiny-decode-\S+ \S.*\n", said)
    code, said, errors = command("logs", "--request", "cmpl-of-nobody")
    assert (code, said) == (0, "")
    assert "none of the 4 logs names cmpl-of-nobody" in errors


def test_what_is_not_there_is_said(command: Command, run: Up) -> None:
    assert command("status", "-n", "other")[0] == 4
    code, _, errors = command("links", "-n", "other")
    assert code == 4
    assert errors.startswith('error: there is no PDCluster "tiny" in namespace "other"')
    assert command("status", "--until-ready")[0] == 2


def test_an_engine_that_dies_and_comes_back_is_followed(command: Command, run: Up) -> None:
    follow = started(run, "logs", "--follow", "--role", "prefill")
    watch = started(run, "status", "--watch")
    assert follow.stdout is not None
    assert watch.stdout is not None
    assert {"loading" in follow.stdout.readline() for _ in range(2)} == {True}
    assert watch.stdout.readline().startswith("tiny serves: ")
    crash = run.folder / "fake/crash"
    crash.write_text("CUDA error: it fell over")
    while not watch.stdout.readline().startswith("tiny does not serve: "):
        pass
    deadline = time.monotonic() + 60
    code, document = 0, {}
    while code != 3 and time.monotonic() < deadline:
        code, said, _ = command("status", "-o", "json")
        document = json.loads(said)
    assert code == 3
    assert any("it fell over" in one["message"] for one in document["engines"])
    crash.unlink()
    while not watch.stdout.readline().startswith("tiny serves: "):
        pass
    text = "".join(follow.stdout.readline() for _ in range(4))
    assert text.count("it fell over") >= 1
    for process in (follow, watch):
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    code, said, _ = command("status", "-o", "json")
    engines = json.loads(said)["engines"]
    assert all(one["restarts"] for one in engines)
    assert "it fell over" in engines[0]["ended"]
    code, said, _ = command("logs", "--role", "prefill")
    assert code == 0
    former = [line for line in said.splitlines() if re.match(r"tiny-prefill-\S+-0- ", line)]
    assert any("it fell over" in line for line in former), "of the process before"
    assert any("loading" in line for line in said.splitlines() if line not in former)
