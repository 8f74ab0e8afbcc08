"""What a shell and kubectl get while somebody presses Tab, by processes as they start them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from played_server import kubeconfig, serving

from pdcluster_operator.cli import completion
from pdcluster_operator.cli.main import COMMANDS

PATIENT = """
import sys
from pdcluster_operator.cli import completion, main
completion.SECONDS = 200.0
"""
SHELL = PATIENT + "sys.exit(main.main())"
KUBECTL = PATIENT + "sys.exit(completion.complete_for_kubectl())"
NAMES = ("llama", "qwen")
LISTED = {"items": [{"metadata": {"name": name, "namespace": "team"}} for name in NAMES]}


def answer(*program: str, **environment: str) -> str:
    """What a process writes. It writes no error, and ends with 0."""
    done = subprocess.run(
        [sys.executable, *program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def completed(line: str, program: tuple[str, ...] = ("-c", SHELL), **environment: str) -> list[str]:
    """What bash offers for the last word of a line."""
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    found = answer(*program, _PDCLUSTER_COMPLETE="bash_complete", **asked, **environment)
    return [one.partition(",")[2] for one in found.splitlines() if one]


def test_commands_and_options_are_completed() -> None:
    assert completed("pdcluster ") == list(COMMANDS)
    assert completed("pdcluster rollout re") == ["resume", "restart"]
    assert "--timeout" in completed("pdcluster rollout status --")
    assert completed("pdcluster lint -o ") == ["text", "json", "yaml"]


def clusters(method: str, path: str) -> tuple[int, object]:
    del method
    assert "/namespaces/team/pdclusters?limit=" in path
    return 200, LISTED


def test_names_come_from_the_namespace_of_the_line(tmp_path: Path) -> None:
    with serving(clusters) as server:
        file = str(kubeconfig(tmp_path, server.url))
        assert completed("pdcluster rollout status ", KUBECONFIG=file) == ["llama", "qwen"]
        file = str(kubeconfig(tmp_path, server.url, "other"))
        assert completed("pdcluster check -n team q", KUBECONFIG=file) == ["qwen"]


def test_kubectl_gets_names_and_that_no_files_follow(tmp_path: Path) -> None:
    with serving(clusters) as server:
        file = str(kubeconfig(tmp_path, server.url))
        said = answer("-c", KUBECTL, "rollout", "status", "", KUBECONFIG=file)
    assert said == "llama\nqwen\n:4\n"
    assert answer("-c", KUBECTL, "lint", "exa") == ":0\n", "files follow"
    first, *_, last = answer("-c", KUBECTL, "").splitlines()
    assert (first.split("\t")[0], last) == (next(iter(COMMANDS)), ":4")


@pytest.mark.parametrize("kind", ["refuses", "no kubeconfig"])
def test_what_goes_wrong_is_silent(kind: str, tmp_path: Path) -> None:
    with serving(lambda *_: (403, "no")) as server:
        file = kubeconfig(tmp_path, server.url)
        if kind == "no kubeconfig":
            file.unlink()
        assert completed("pdcluster rollout status ", KUBECONFIG=str(file)) == []
        assert bool(server.asked) is (kind == "refuses")


def test_a_server_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    """The client itself would wait for 30 s."""
    real = ("-m", "pdcluster_operator")
    with serving(lambda *_: None) as server:
        file = str(kubeconfig(tmp_path, server.url))
        assert completed("pdcluster rollout status ", real, KUBECONFIG=file) == []
    assert completion.SECONDS == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_reads(shell: str) -> None:
    script = answer("-m", "pdcluster_operator", "completion", shell)
    assert "_PDCLUSTER_COMPLETE" in script
    if shutil.which(shell):
        read = subprocess.run(
            [shell, "-n"], input=script, text=True, capture_output=True, check=False
        )
        assert (read.returncode, read.stderr) == (0, "")
