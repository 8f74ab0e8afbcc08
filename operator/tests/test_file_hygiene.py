"""dev/file_hygiene.py and the hooks of pre-commit."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from dev import file_hygiene

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_of_the_repository_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    files = file_hygiene.tracked()
    assert len(files) > 500
    assert {str(path): found for path in files if (found := list(file_hygiene.faults(path)))} == {}


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.py", "x = 1 \n", "line 1: blanks at the end"),
        ("a.md", "one\n\t\n", "line 2: blanks at the end"),
        ("a.md", "one", "the last line has no end"),
        ("a.md", "one\r\ntwo\r\n", "line ends of Windows"),
        ("a.py", "x = 1\n<<<<<<< HEAD\n", "line 2: the mark of a merge that is not resolved"),
        ("a.svg", ">>>>>>> main\n", "line 1: the mark of a merge that is not resolved"),
        ("a.yaml", "a: [1\n", "expected ',' or ']'"),
        ("a.toml", "a = ]\n", "Invalid value"),
        ("a.txt", "x" * 500_000 + "\n", "500,001 bytes, more than 500,000"),
        ("a.bin", "\0" * 500_001, "500,001 bytes, more than 500,000"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, name: str, text: str, fault: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode())
    [found] = file_hygiene.faults(path)
    assert fault in found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.log", "as a program wrote it \n"),
        ("charts/pdcluster/templates/a.yaml", "{{- if .Values.x }}\n"),
        ("a.bin", "\0 \n"),
        ("a.rst", "Title\n=======\n"),
        ("empty.py", ""),
    ],
)
def test_what_is_no_fault(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    assert list(file_hygiene.faults(path)) == []


def test_the_hooks_run_files_of_the_repository_and_fetch_nothing() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    for hook in config["repos"][0]["hooks"]:
        assert hook["language"] == "system"
        [runner, *words] = hook["entry"].split()
        assert (ROOT / runner).stat().st_mode & 0o100
        for word in words:
            assert "/" not in word or (ROOT / word).exists()


def test_a_file_with_a_fault_ends_the_program_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.md"
    path.write_text("one")
    monkeypatch.setattr("sys.argv", ["file_hygiene.py", str(path), str(tmp_path / "deleted.py")])
    with pytest.raises(SystemExit, match="1"):
        file_hygiene.main()
    assert capsys.readouterr().out == f"{path}: the last line has no end\n"
