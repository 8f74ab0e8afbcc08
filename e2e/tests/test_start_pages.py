"""docs/start-laptop.md and docs/chat.md: what they tell a reader to run, on real engines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from local_run import EXAMPLE, START_SECONDS

from waiting import until

pytestmark = [pytest.mark.local, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


DEMO, SETTINGS_AND_UP, LOOKS = blocks("start-laptop.md", "bash")
SETTINGS, UP = SETTINGS_AND_UP.rsplit("pdcluster up ", 1)
ANSWER, STREAM, TOOLS = blocks("chat.md", "python")
NAME = "chat"
"""Other tests run a `tiny` at the same time, and the commands of the page take the newest."""


def bash(script: str) -> list[str]:
    return ["bash", "-ec", f"shopt -s expand_aliases\n{SETTINGS}\n{script}"]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Runs the page's `pdcluster up` until the tests are over; the address that it prints.

    The engines have the flags of the page about chats, too.
    """
    document = yaml.safe_load(EXAMPLE.read_text())
    document["metadata"]["name"] = NAME
    [flags] = [yaml.safe_load(block) for block in blocks("chat.md", "yaml")]
    document["spec"]["engine"]["extraArgs"] += flags["spec"]["engine"]["extraArgs"]
    file = tmp_path_factory.mktemp("chat") / "tiny.yaml"
    file.write_text(yaml.safe_dump(document))
    words = UP.replace(str(EXAMPLE.relative_to(ROOT)), str(file))
    assert DEMO.strip() == "make demo"  # test_local_up_once.py runs what it runs
    process = subprocess.Popen(
        bash(f"exec python -m pdcluster_operator up --plain {words}"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: [lines.append(line) for line in process.stdout or ()])
    reader.start()

    def said() -> str:
        assert process.poll() is None, "".join(lines)
        found = re.findall(r"^endpoint: (\S+)$", "".join(lines), re.MULTILINE)
        return found[0] if found else ""

    try:
        until("endpoint", said, START_SECONDS, lambda: "".join(lines))
        yield said()
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(120)
        reader.join()


@pytest.mark.parametrize("command", LOOKS.splitlines())
def test_each_command_of_the_page_says_that_kv_moves(endpoint: str, command: str) -> None:
    assert " tiny --local" in command
    command = command.replace(" tiny --local", f" {NAME} --local")
    done = subprocess.run(
        bash(command), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    word = {"status": "Ready", "links": "Verified", "check": "prefill/0"}[command.split()[1]]
    assert word in done.stdout


def test_the_openai_client_chats_streams_and_offers_tools(endpoint: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{ANSWER}\n{STREAM}\n{TOOLS}\nprint('END')"],
        env={**os.environ, "ENDPOINT": endpoint},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The model is random, and so is what it says.
    assert len(done.stdout) > 2 * 16
    assert done.stdout.endswith("END\n")
