"""How commands find the runs of ``pdcluster up`` on this machine."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from played_server import kubeconfig

from pdcluster_operator.cli import connection, runs
from pdcluster_operator.cli.commands import Target, target_or_run
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.main import pdcluster
from pdcluster_operator.runtime.interfaces import Key

ENDED = 2**22 + 1  # no process can have this number


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDCLUSTER_CACHE", str(tmp_path))
    return tmp_path / "runs"


def run_of(base: Path, cluster: str, hour: int, pid: int, *, opened: bool = True) -> Path:
    folder = base / f"{cluster}-20261127-{hour:02}0000-{pid}"
    folder.mkdir(parents=True, mode=0o700)
    if opened:
        (folder / runs.KUBECONFIG).touch(mode=0o600)
    os.utime(folder, (hour, hour))
    return folder


def test_the_newest_run_that_goes_on_is_found(base: Path) -> None:
    run_of(base, "old", 1, os.getpid())
    newest = run_of(base, "my-llama", 3, os.getpid())
    run_of(base, "ended", 4, ENDED)
    run_of(base, "starts", 5, os.getpid(), opened=False)
    found = runs.find_run()
    assert found == runs.Run("my-llama", newest)
    assert found.kubeconfig == str(newest / "kubeconfig")


def test_a_run_is_named_by_its_cluster_or_its_folder(base: Path) -> None:
    old = run_of(base, "old", 1, os.getpid())
    run_of(base, "new", 3, os.getpid())
    assert runs.find_run("old").folder == old
    assert runs.find_run(old.name).folder == old
    assert runs.find_run(str(old)).folder == old


def test_which_of_two_runs_is_taken_is_said(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = run_of(base, "tiny", 1, os.getpid())
    new = run_of(base, "tiny", 3, os.getpid())
    assert runs.find_run("tiny").folder == new
    said = capsys.readouterr().err
    assert said.startswith(f"2 runs of `pdcluster up`: this is the newest, {new.name}; ")
    assert said.endswith(f": {old.name}\n")
    assert runs.find_run(old.name).folder == old
    assert capsys.readouterr().err == ""


def test_what_is_not_there_is_said_with_what_is(base: Path) -> None:
    with pytest.raises(UserError, match="no `pdcluster up` of this user runs") as none:
        runs.find_run()
    assert none.value.exit is Exit.MACHINE
    run_of(base, "tiny", 1, os.getpid())
    with pytest.raises(UserError, match=r"of 'llama' runs .* but tiny-2026") as other:
        runs.find_run("llama")
    assert other.value.exit is Exit.MACHINE


def test_a_new_run_removes_old_ones_that_ended(base: Path) -> None:
    ended = [run_of(base, "tiny", hour, ENDED) for hour in range(1, 8)]
    going_on = run_of(base, "tiny", 0, os.getpid())
    new = runs.new_run_folder("tiny")
    left = {one.name for one in base.iterdir()}
    assert left == {one.name for one in (*ended[-(runs.KEPT_RUNS - 1) :], going_on, new)}


def test_another_process_with_the_number_of_a_run_is_not_the_run(base: Path) -> None:
    ended = runs.new_run_folder("tiny")
    (ended / runs.KUBECONFIG).touch(mode=0o600)
    assert runs.find_run("tiny").folder == ended
    began = int((ended / runs.BEGAN).read_text())
    (ended / runs.BEGAN).write_text(str(began - 1))  # this process is younger
    with pytest.raises(UserError, match="no `pdcluster up` of this user runs"):
        runs.find_run("tiny")


def test_a_run_that_does_not_answer_leads_to_no_other_cluster(base: Path) -> None:
    folder = run_of(base, "tiny", 1, os.getpid())
    with socket.socket() as reserved:  # bound, but nobody listens
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        kubeconfig(folder, url, "n").rename(folder / runs.KUBECONFIG)
        (folder / runs.KUBECONFIG).chmod(0o600)
        told = CliRunner().invoke(pdcluster, ["status", "tiny", "--local"])
    assert str(told.exception).endswith(f"; the logs of this run are below {folder}")
    assert "kubectl" not in str(told.exception)


@pytest.mark.parametrize(("name", "here"), [("tiny", True), ("other", False)])
def test_who_forgets_local_is_reminded_of_the_run(
    name: str, here: bool, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(base, "tiny", 1, os.getpid())
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    told = CliRunner().invoke(pdcluster, ["status", name]).exception
    assert isinstance(told, UserError)
    assert told.exit is Exit.MACHINE
    reminder = "; a `pdcluster up` of tiny runs on this machine: --local reads it"
    assert str(told).endswith(reminder) is here


def test_a_run_that_somebody_else_may_have_planted_is_not_found(base: Path) -> None:
    ours = run_of(base, "tiny", 1, os.getpid())
    run_of(base, "tiny", 2, os.getpid()).chmod(0o777)
    (run_of(base, "tiny", 3, os.getpid()) / runs.KUBECONFIG).chmod(0o620)
    (base / f"tiny-20991231-000000-{os.getpid()}").symlink_to(ours)
    if os.geteuid() == 0:
        os.chown(run_of(base, "tiny", 4, os.getpid()), 65534, 65534)
    assert runs.find_run("tiny").folder == ours


def test_nobody_else_can_look_into_a_run(base: Path) -> None:
    folder = runs.new_run_folder("tiny")
    assert [one.stat().st_mode & 0o777 for one in (folder, base)] == [0o700, 0o700]


def test_a_command_reaches_the_run_that_is_named(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_of(base, "tiny", 1, os.getpid())
    context = {"namespace": "n", "cluster": "up", "user": "up"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "up",
        "contexts": [{"name": "up", "context": context}],
        "clusters": [{"name": "up", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "up", "user": {"token": "x"}}],
    }
    (folder / runs.KUBECONFIG).write_text(json.dumps(config))
    reached = []

    def connected(
        context: str | None, key: Key, command: Any, kubeconfig: str | None = None
    ) -> Exit:
        assert key == Key("n", "tiny")
        command(None)
        reached.append((context, kubeconfig))
        return Exit.DONE

    def command(_: None, key: Key, *, more: int) -> None:
        reached.append((key, more))

    monkeypatch.setattr(connection, "connected", connected)
    for name in ("tiny", folder.name):
        target = Target(name, None, None, local=True)
        assert connection.with_cluster(target, command, more=3) is Exit.DONE
    expected = [(Key("n", "tiny"), 3), (None, str(folder / runs.KUBECONFIG))]
    assert reached == expected * 2
    with pytest.raises(UserError, match="start one: pdcluster up FILE"):
        connection.with_cluster(Target("other", None, None, local=True), command, more=3)


def test_a_run_and_a_context_are_two_places() -> None:
    @click.command()
    @target_or_run
    def look(target: Target) -> None:
        click.echo(repr(target))

    told = CliRunner().invoke(look, ["tiny", "--local", "-n", "ns"])
    assert told.output == f"{Target('tiny', 'ns', None, local=True)!r}\n"
    told = CliRunner().invoke(look, ["tiny", "--local", "--context", "c"])
    assert told.exit_code == Exit.USAGE
    assert "two different places" in told.output
