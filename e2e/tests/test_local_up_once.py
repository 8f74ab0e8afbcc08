"""``pdcluster up`` as a newcomer runs it: one command, real engines, tokens, no process left."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from local_run import BLOCK_TOKENS, EXAMPLE, KV_BYTES_PER_TOKEN, START_SECONDS, idle, manifest

from models.tiny import model_path

pytestmark = [pytest.mark.local, pytest.mark.timeout(900)]

PROMPT = "Once upon a time there was a model that computed its prompt here and decoded it there"
UP = [sys.executable, "-m", "pdcluster_operator", "up", "--plain"]
COMMAND = [*UP, str(EXAMPLE)]


def left(printed: str) -> list[str]:
    """Running processes whose folder is below the run's: all that its pods have started."""
    [folder] = re.findall(r"logs are below (\S+)", printed)
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str((process / "cwd").readlink()).startswith(f"{folder}/"):
                found.append(f"{process.name} {(process / 'cmdline').read_bytes()!r}")
        except OSError:
            continue
    return found


def once(model: Path, file: Path = EXAMPLE) -> tuple[int, str]:
    """Exit code and output of ``pdcluster up --once``, which leaves no process."""
    command = [*UP, str(file), "--model-dir", str(model), "--once", PROMPT]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=START_SECONDS, check=False
    )
    printed = done.stdout + done.stderr
    print(printed)
    assert left(printed) == [], printed
    return done.returncode, printed


def test_one_manifest_to_tokens() -> None:
    code, printed = once(model_path("llama"))
    assert code == 0, printed
    [answer] = re.findall(r"^answer:  (.+) \((\d+) tokens\)$", printed, re.MULTILINE)
    assert answer[1] == "32"
    [path] = re.findall(r"^KV path: (.+)$", printed, re.MULTILINE)
    blocks = -(-len(PROMPT) // BLOCK_TOKENS)
    size = blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN
    assert path.startswith(f"prefill/0 -> decode/0: {blocks} blocks ")
    assert f"{size:,} bytes in " in path
    assert "GB/s" in path
    assert re.search(
        r"^prefill/0 +decode/0 +Established +1/1 +\d+\.\d\d +Passed", printed, re.MULTILINE
    )
    assert re.search(r"^KVPathVerified +True +CanaryPassed", printed, re.MULTILINE)
    assert "not simulated:" in printed


@pytest.mark.parametrize("end", ["Ctrl-C", "kill -9"])
def test_ending_it_while_engines_load_leaves_no_process(tmp_path: Path, end: str) -> None:
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*COMMAND, "--model-dir", str(model_path("llama"))], stdout=file, stderr=file
        )
    deadline = time.monotonic() + START_SECONDS
    while "the engine core has started" not in (said := output.read_text()) or len(left(said)) <= 6:
        assert time.monotonic() < deadline, said
        assert process.poll() is None, said
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL if end == "kill -9" else signal.SIGINT)
    process.wait(120)
    deadline = time.monotonic() + (60 if end == "kill -9" else 0)
    while left(output.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left(output.read_text()) == []


def test_an_engine_that_cannot_load_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "broken-model"
    folder.mkdir()
    for file in model_path("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = next(folder.glob("*.safetensors"))
    # The file itself is sound, so only vLLM can find out.
    whole = weights.read_bytes()
    assert b'"model.norm.weight"' in whole
    weights.write_bytes(whole.replace(b'"model.norm.weight"', b'"model.morm.weight"'))
    file = tmp_path / "prefill-alone.yaml"
    file.write_text(yaml.safe_dump(manifest(decode={"podTemplate": idle()})))
    code, printed = once(folder, file)
    assert code == 3, printed
    last = printed.strip().splitlines()[-1]
    why = "ValueError: There is no module or parameter named 'morm'"
    assert re.match(rf"error: tiny-prefill-.* died [0-9]+ times: {why}", last), last
