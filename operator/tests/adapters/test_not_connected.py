"""Commands without a cluster end with one sentence that says what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loopback import free_ports
from pdcluster_operator.adapters.api_server import kubeconfig
from pdcluster_operator.cli import main as command

# A test may run in a pod that has a ServiceAccount.
OUTSIDE = """
import pathlib, sys
from pdcluster_operator.adapters.api_server import kubeconfig
kubeconfig.ACCOUNT = pathlib.Path("/none")
"""
KOPF_RUN = """
from kopf.cli import main
main(["run", "-m", "pdcluster_operator.handlers", "--all-namespaces"])
"""
OPERATOR_RUN = """
from pdcluster_operator.cli.operator import main
sys.exit(main(["run", "--host=127.0.0.1", *sys.argv[1:]]))
"""
REMEDY = "; run in a pod with a ServiceAccount, or set KUBECONFIG"
OTHER_FILE = "; correct it, or set KUBECONFIG to another file"


def ended(code: str, home: Path, *words: str, **environment: str) -> list[str]:
    """Return what a process that failed wrote."""
    kept = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE + code, *words],
        env=kept | {"HOME": str(home)} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr.splitlines()


def config(server: str = "https://127.0.0.1:1", login: str = "true") -> str:
    """A kubeconfig whose user logs in with a program."""
    program = {"apiVersion": "client.authentication.k8s.io/v1", "command": login}
    return json.dumps({
        "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"exec": program}}],
    })  # fmt: skip


@pytest.mark.process
def test_kopf_run_without_a_kubeconfig_says_so(tmp_path: Path) -> None:
    health, metrics = map(str, free_ports(2))
    ports = {"PDCLUSTER_HEALTH_PORT": health, "PDCLUSTER_METRICS_PORT": metrics}
    said = ended(KOPF_RUN, tmp_path, PDCLUSTER_HOST="127.0.0.1", **ports)
    assert said == [
        "stopped: cannot reach the API server: ~/.kube/config: there is no such file" + REMEDY
    ]


@pytest.mark.process
def test_kopf_run_names_the_variable_that_is_wrong(tmp_path: Path) -> None:
    *_, said = ended(KOPF_RUN, tmp_path, PDCLUSTER_HEALTH_PORT="many")
    assert said == "stopped: PDCLUSTER_HEALTH_PORT=many: Expected `int`, got `str`"


@pytest.mark.process
def test_the_operator_without_a_kubeconfig_says_so(tmp_path: Path) -> None:
    health, metrics = free_ports(2)
    ports = f"--health-port={health}", f"--metrics-port={metrics}"
    [said] = ended(OPERATOR_RUN, tmp_path, *ports, KUBECONFIG="/none/a:/none/b")
    _, _, said = said.partition(" stopped: ")
    assert said == "cannot reach the API server: /none/a:/none/b: there is no such file" + REMEDY


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "there is no such file"),
        ("a: [b", "while parsing a flow sequence "),
        ("a", "'str' object "),
        ("", "this is no kubeconfig: it is empty"),
        ("contexts: 1", "'int' object "),
        ("kind: Config", "Invalid kube-config file. Expected key current-context "),
        (config(server="notaurl"), "the server 'notaurl' must begin with https:// or http://"),
        (config(login="no-such"), "the login program 'no-such' (users[].user.exec) is not on PATH"),
        (config(login="false"), "the login program 'false' (users[].user.exec) gives no crede"),
    ],
)
def test_a_kubeconfig_that_is_none_is_named(text, why, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(kubeconfig, "ACCOUNT", tmp_path / "none")
    monkeypatch.setenv("KUBECONFIG", str(file := tmp_path / "config"))
    if text is not None:
        file.write_text(text)
    assert command.main(["rollout", "status", "llama"]) == 6
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: cannot reach the API server: {file}: {why}")
    assert said.endswith(REMEDY if text is None else OTHER_FILE)
