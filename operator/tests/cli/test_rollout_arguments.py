"""What the words of ``pdcluster rollout`` and of ``pdcluster plan --against`` mean."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdcluster_operator.cli import against, rollout
from pdcluster_operator.cli import main as command
from pdcluster_operator.cli import plan as plan_command
from pdcluster_operator.cli import up as up_command
from pdcluster_operator.cli.connection import Where
from pdcluster_operator.cli.exits import Exit
from pdcluster_operator.cli.main import main
from pdcluster_operator.cli.up import UpOptions


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was called instead of talking to an API server."""
    calls: list[Any] = []

    def noting(module: Any, name: str) -> None:
        def note(*words: Any, **options: Any) -> Exit:
            calls.append((name, *words, options))
            return Exit.NOT_READY

        monkeypatch.setattr(module, name, note)

    for name in ("status", "hold", "go_back"):
        noting(rollout, name)
    noting(against, "show_plan_against")
    noting(plan_command, "show_plan")
    noting(up_command, "up")
    untouched = SimpleNamespace(SIGINT=0, SIG_DFL=0, default_int_handler=0, signal=lambda *_: None)
    monkeypatch.setattr(command, "signal", untouched)
    return calls


HERE, THERE = Where(), Where("there", "ns")
TO = ("--context", "there", "-n", "ns")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("rollout", "status", "a"), ("status", "a", HERE, {"watch": True, "timeout": 0.0})),
        (("rollout", "status", "a", "--no-watch", *TO),
         ("status", "a", THERE, {"watch": False, "timeout": 0.0})),
        (("rollout", "status", "a", "--timeout", "90"),
         ("status", "a", HERE, {"watch": True, "timeout": 90.0})),
        (("rollout", "status", "a", "--timeout", "1s"),
         ("status", "a", HERE, {"watch": True, "timeout": 1.0})),
        (("rollout", "status", "a", "--timeout", "30m"),
         ("status", "a", HERE, {"watch": True, "timeout": 1800.0})),
        (("rollout", "status", "a", "--timeout", "2h"),
         ("status", "a", HERE, {"watch": True, "timeout": 7200.0})),
        (("rollout", "pause", "a", *TO), ("hold", "a", THERE, {"paused": True})),
        (("rollout", "resume", "a"), ("hold", "a", HERE, {"paused": False})),
        (("rollout", "undo", "a"), ("go_back", "a", HERE, {"dry_run": False})),
        (("rollout", "undo", "a", "--dry-run"), ("go_back", "a", HERE, {"dry_run": True})),
        (("plan", "f", "--against"), ("show_plan_against", "f", HERE, {})),
        (("plan", "f", "--against", "there", "-n", "ns"), ("show_plan_against", "f", THERE, {})),
        (("plan", "f"), ("show_plan", "f", "steps", {})),
        (("up", "f"), ("up", UpOptions("f", None, 32, 900, None, False), {})),
        (("up", "f", "--once", "p", "--max-tokens", "1", "--timeout", "2", "--model-dir", "/m",
          "--plain"), ("up", UpOptions("f", "p", 1, 2, Path("/m"), True), {})),
    ],
)  # fmt: skip
def test_each_command_line_calls_what_it_says(
    called: list[Any], words: tuple[str, ...], expected: tuple[Any, ...]
) -> None:
    assert main(words) == 3, "how the command ends is how the process ends"
    assert called == [expected]


@pytest.mark.parametrize("time", ["0", "-1", "1.5", "5d", "m", "", "1 m", "0h"])
def test_a_time_that_is_none_is_refused(
    called: list[Any], time: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["rollout", "status", "a", f"--timeout={time}"])
    assert left.value.code == 2
    assert "is not a time such as 90s, 30m or 1h" in capsys.readouterr().err
    assert called == []
