"""How commands find the runs of ``pdcluster up`` on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdcluster_operator.cli import runs
from pdcluster_operator.cli.exits import Exit, UserError

ENDED = 2**22 + 1  # no process can have this number


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDCLUSTER_CACHE", str(tmp_path))
    return tmp_path / "runs"


def run_of(base: Path, cluster: str, hour: int, pid: int, *, opened: bool = True) -> Path:
    folder = base / f"{cluster}-20261127-{hour:02}0000-{pid}"
    folder.mkdir(parents=True)
    if opened:
        (folder / runs.KUBECONFIG).touch()
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
