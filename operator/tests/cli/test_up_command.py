"""``pdcluster up`` as a process: what it prints, how it exits, and that nothing stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "local"))

from fake_engine import fake_connector
from manifests import tiny
from pods import carrying

from forked_python import Forked, ForkedPython
from pdcluster_operator.cli import plan
from pdcluster_operator.cli.main import main
from pdcluster_operator.cli.up import with_names

pytestmark = pytest.mark.process

FAKE_ENGINES = Path(__file__).parents[1] / "local"
# aiohttp reads the certificates of the machine at every import; nobody needs them.
ENVIRONMENT = {"SSL_CERT_FILE": os.devnull}
SCRIPT = Path(__file__).with_name("up_with_small_engines.py")


class Up:
    """One run, in a session of its own, with its output in a file."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        change: Callable[[dict], None] | None = None,
        forks: ForkedPython | None = None,
    ) -> None:
        self.folder = folder
        manifest = tiny(folder)
        if change is not None:
            change(manifest)
        (folder / "cluster.yaml").write_text(yaml.safe_dump(manifest))
        self.output = folder / "output"
        environment = {**os.environ, **ENVIRONMENT, "XDG_CACHE_HOME": str(folder / "cache")}
        command = [str(SCRIPT), str(folder / "cluster.yaml"), *arguments]
        self.process: subprocess.Popen[bytes] | Forked
        with self.output.open("wb") as output:
            if forks is not None:
                to = output.fileno()
                self.process = forks.start(*command, stdout=to, stderr=to, environment=environment)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, *command],
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )

    def until(self, words: str, seconds: float = 120) -> str:
        deadline = time.monotonic() + seconds
        while words not in (text := self.output.read_text()):
            assert time.monotonic() < deadline, text
            assert self.process.poll() is None or words in self.output.read_text(), text
            time.sleep(0.05)
        return text

    def wait(self, seconds: float = 240) -> int:
        return self.process.wait(seconds)

    def left(self, seconds: float = 60) -> list[int]:
        deadline = time.monotonic() + seconds
        while (pids := carrying(f"mark-{self.folder}")) and time.monotonic() < deadline:
            time.sleep(0.05)
        return pids

    def text(self) -> str:
        return self.output.read_text()


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkedPython]:
    """Starts commands whose modules have been imported."""
    host = ForkedPython(
        "fake_engine",
        "pdcluster_operator.cli.main",
        "pdcluster_operator.cli.up",
        path=[FAKE_ENGINES],
        environment={**os.environ, **ENVIRONMENT},
    )
    yield host
    host.close()


@pytest.fixture
def start(tmp_path: Path, forks: ForkedPython) -> Iterator[Callable[..., Up]]:
    """Start the command; ``cold`` in a new Python, which imports everything first."""
    runs: list[Up] = []

    def make(
        *arguments: str, change: Callable[[dict], None] | None = None, cold: bool = False
    ) -> Up:
        runs.append(Up(tmp_path, *arguments, change=change, forks=None if cold else forks))
        return runs[-1]

    yield make
    for run in runs:
        run.process.kill()
        run.process.wait()
        assert run.left() == []


@pytest.fixture
def refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Run it in this process, for what ends before the first engine: exit code and output."""
    sigint = signal.getsignal(signal.SIGINT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(plan, "shipped_connector", fake_connector)

    def make(*arguments: str, change: Callable[[dict], None] | None = None) -> tuple[int, str]:
        manifest = tiny(tmp_path)
        if change is not None:
            change(manifest)
        (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(manifest))
        code = main(["up", str(tmp_path / "cluster.yaml"), *arguments])
        assert carrying(f"mark-{tmp_path}") == []
        assert not (tmp_path / "cache/pdcluster/runs").exists(), "nothing was started"
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    yield make
    signal.signal(signal.SIGINT, sigint)


def test_once_answers_shows_the_kv_path_and_leaves_nothing(start: Callable[..., Up]) -> None:
    run = start("--once", "Once upon a time", "--timeout", "240")
    assert run.wait() == 0, run.text()
    assert run.left() == []
    text = run.text()
    assert "answer:  ' and then' (3 tokens)" in text
    assert "KV path: prefill/0 -> decode/0: 1 block (8 tokens), 8,192 bytes" in text
    for words in ("not simulated:", "PREFILL", "Established", "2.00", "Passed", "KVPathVerified"):
        assert words in text
    # A pipe gets whole lines without trailing spaces.
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_a_router_that_strips_the_path_leaves_the_metrics(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/strip").touch()
    run = start("--once", "Once upon a time")
    assert run.wait() == 0, run.text()
    assert "8,192 bytes were pulled into decode (from its metrics)" in run.text()


def test_ctrl_c_ends_everything(start: Callable[..., Up]) -> None:
    run = start()
    text = run.until("Ctrl-C stops it.")
    assert "/v1/completions" in text
    assert "pdcluster status tiny --local" in text
    assert len(carrying(f"mark-{run.folder}")) >= 6
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()
    assert run.left(0) == [], "everything is gone before the command returns"
    assert "stopped" in run.text()


STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def stubborn(manifest: dict) -> None:
    """Engines whose first process ignores SIGTERM."""
    overlay = {
        "spec": {
            "containers": [
                {
                    "name": "engine",
                    "command": [
                        "python3",
                        "-c",
                        f"{STUBBORN}\nimport time; print('deaf', flush=True); time.sleep(600)",
                    ],
                }
            ]
        }
    }
    for role in ("prefill", "decode"):
        manifest["spec"][role]["podTemplate"] = overlay


def test_a_second_ctrl_c_kills_at_once(start: Callable[..., Up]) -> None:
    run = start(change=stubborn)
    run.until("decode")
    logs = run.folder / "cache/pdcluster/runs"
    deadline = time.monotonic() + 120
    while sum("deaf" in log.read_text() for log in logs.rglob("container.log")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.process.send_signal(signal.SIGINT)
    run.until("Ctrl-C again kills them")
    time.sleep(1)
    assert run.process.poll() is None, "the engines ignore SIGTERM"
    run.process.send_signal(signal.SIGINT)
    run.wait()
    assert run.left(0) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_engines_load_ends_everything(
    start: Callable[..., Up], tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/slow").touch()
    run = start("--once", "x")
    run.until("LoadingWeights - shard 1 of 2")
    run.process.send_signal(number)
    assert run.wait() == 130, run.text()
    assert run.left(0) == []


@pytest.mark.parametrize("moment", ["Starting", "Ready: KV", ""])
def test_kill_minus_9_leaves_nothing(start: Callable[..., Up], moment: str) -> None:
    run = start(cold=not moment)
    if moment:
        run.until(moment)
    else:
        time.sleep(0.7)
    run.process.kill()
    run.wait()
    assert run.left() == []


def test_ctrl_c_at_any_early_moment_leaves_nothing(start: Callable[..., Up]) -> None:
    for delay in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        run = start(cold=True)
        run.until("begins")  # what Python does before is not ours
        time.sleep(delay)
        run.process.send_signal(signal.SIGINT)
        run.wait()
        assert run.left() == []
        assert "Traceback" not in run.text()


@pytest.mark.parametrize("once", [(), ("--once", "x")])
def test_an_engine_that_keeps_dying_ends_the_run_with_its_last_words(
    start: Callable[..., Up], tmp_path: Path, once: tuple[str, ...]
) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/die").write_text("OSError: shard 3 is truncated")
    run = start(*once)
    assert run.wait() == 3, run.text()
    assert run.left() == []
    assert " wrote last:\n  OSError: shard 3 is truncated\nerror: tiny-" in run.text()
    last = run.text().strip().splitlines()[-1]
    assert last.startswith("error: tiny-")
    assert "died 2 times: OSError: shard 3 is truncated (exit code 1); see " in last
    assert "OSError: shard 3 is truncated" in Path(last.rpartition("; see ")[2]).read_text()


def test_a_run_that_keeps_going_has_its_verdict_once_and_recovers(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/die").write_text("OSError: shard 3 is truncated")
    run = start("--keep-going")
    run.until("prefill", 60)
    text = run.until("starts again in 4 s")
    (tmp_path / "fake/die").unlink()
    run.until("Ctrl-C stops it.")
    for role in ("prefill", "decode"):
        assert len(re.findall(rf"tiny-{role}-\S+ died 2 times: OSError: shard", text)) == 1


def test_a_process_that_is_stopped_is_named_and_goes_on(start: Callable[..., Up]) -> None:
    run = start("--plain")
    run.until("Ctrl-C stops it.")
    [pid, *_] = [
        pid
        for pid in carrying(f"mark-{run.folder}")
        if b"\0--engine\0default.tiny.prefill" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(pid, signal.SIGSTOP)
    text = run.until(f"kill -CONT {pid} lets it go on")
    assert re.search(
        r"tiny-prefill-\S+: Frozen - a signal \(SIGSTOP\) has stopped 1 of its processes", text
    )
    os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while not re.search(r"lets it go on(.|\n)*tiny-prefill-\S+: Ready", run.text()):
        assert time.monotonic() < deadline, run.text()
        time.sleep(0.05)


def test_not_ready_in_time_says_what_it_waits_for(start: Callable[..., Up], tmp_path: Path) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/slow").touch()
    for seconds in (4, 16, 64):  # on a busy machine the engines need longer to load at all
        run = start("--once", "x", "--timeout", str(seconds))
        assert run.wait() == 3, run.text()
        last = run.text().strip().splitlines()[-1]
        assert f"not Ready after {seconds} s, waiting for PrefillReady=False " in last
        if "PrefillReady=False LoadingWeights" in last:
            break
    assert "PrefillReady=False LoadingWeights" in last
    assert "shard 1 of 2" in last


def test_a_wrong_manifest_starts_nothing(refuse: Callable[..., tuple[int, str]]) -> None:
    code, text = refuse(change=lambda m: m["spec"].update(bogus=1))
    assert code == 1
    assert "spec.bogus" in text


@pytest.mark.parametrize(
    "source", [{"huggingFace": {"repo": "org/model"}}, {"hostPath": {"path": "/no/such/folder"}}]
)
def test_a_model_folder_of_this_machine_stands_in(
    start: Callable[..., Up], tmp_path: Path, source: dict
) -> None:
    def elsewhere(manifest: dict) -> None:
        manifest["spec"]["model"]["source"] = source

    run = start("--once", "x", "--model-dir", str(tmp_path / "model"), change=elsewhere)
    assert run.wait() == 0, run.text()
    assert "spec.model.source" not in run.text(), "no warning of a source that was replaced"


@pytest.mark.parametrize("once", [(), ("--once", "x")])
def test_a_model_folder_that_is_not_there_ends_it_before_the_first_process(
    refuse: Callable[..., tuple[int, str]], once: tuple[str, ...]
) -> None:
    code, text = refuse("--model-dir", "/no/such/folder", *once)
    assert code == 6, text
    assert "error   --model-dir = /no/such/folder\n" in text
    assert "[ModelUnusable]" in text


def test_a_model_that_the_manifest_does_not_fit_ends_it_before_the_first_process(
    refuse: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    def wide(manifest: dict) -> None:
        manifest["spec"]["decode"]["parallelism"] = {"tensor": 3}
        manifest["spec"]["engine"]["maxModelLen"] = 4097
        (tmp_path / "model/config.json").write_text(
            '{"num_hidden_layers": 2, "num_attention_heads": 8, "max_position_embeddings": 4096}'
        )

    code, text = refuse(change=wide)
    assert code == 1, text
    assert "8 attention heads cannot be spread evenly over 3 ranks [LayoutUnsupported]" in text
    assert "config.json allows 4,096 tokens" in text


def test_what_the_command_line_cannot_have_is_said_at_once(
    refuse: Callable[..., tuple[int, str]],
) -> None:
    code, text = refuse("--once", "x", change=lambda m: m["spec"]["router"].update(replicas=0))
    assert code == 2, text
    assert ": spec.router.replicas = 0\n" in text


def test_everything_that_the_machine_lacks_is_said_at_once(start: Callable[..., Up]) -> None:
    def ask_for_much(manifest: dict) -> None:
        manifest["spec"]["transfer"]["device"] = "CUDA"
        manifest["spec"]["prefill"]["resources"] = {"requests": {"memory": "4000Gi"}}
        manifest["spec"]["model"]["source"]["hostPath"]["path"] = "/no/such/folder"
        manifest["spec"]["router"]["replicas"] = 0

    run = start("--once", "x", change=ask_for_much)
    assert run.wait() == 6, run.text()
    text = run.text()
    for rule in ("OnceNeedsRouter", "ModelUnusable", "MemoryTooSmall"):
        assert f"[{rule}]" in text
    assert "[WrongBuild]" in text or "[NoGpu]" in text or "GPU" in text
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize(
    ("spec", "transfer"),
    [
        ({}, {"internalNames": "Shown"}),
        ({"transfer": {"device": "CPU"}}, {"internalNames": "Shown", "device": "CPU"}),
        ({"transfer": {"internalNames": "Hidden"}}, {"internalNames": "Hidden"}),
        ({"transfer": None}, {"internalNames": "Shown"}),
    ],
)
def test_local_mode_names_engines_unless_the_manifest_says_otherwise(
    spec: dict, transfer: object
) -> None:
    assert with_names({"spec": spec})["spec"]["transfer"] == transfer


@pytest.mark.parametrize("wrong", ["words", [1], 7])
def test_what_is_no_cluster_is_refused(
    refuse: Callable[..., tuple[int, str]], wrong: object
) -> None:
    assert refuse(change=lambda m: m["spec"].update(transfer=wrong))[0] == 1
    assert refuse(change=lambda m: m.update(spec=wrong))[0] == 1


def test_the_page_of_a_run_shows_it_and_goes_away_with_it(start: Callable[..., Up]) -> None:
    run = start("--plain", "--ui")
    text = run.until("Ctrl-C stops it")
    [url] = re.findall(r"page: (http://\S+)", text)
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    deadline = time.monotonic() + 120
    while True:
        with opener.open(url) as answer:
            assert answer.url.endswith("/c/default/tiny")
            html = answer.read().decode()
        # The pods' own condition follows the operator's.
        if "No engine is ready" not in html or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for words in (
        "tiny serves: ",
        "prefill/0",
        "Verified",
        "CanaryPassed",
        "metrics cannot be read",
    ):
        assert words in html
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()
    assert run.left() == []
    with pytest.raises(urllib.error.URLError):
        opener.open(url)
