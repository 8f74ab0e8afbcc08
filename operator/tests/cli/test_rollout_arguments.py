"""What the words of ``pdcluster rollout`` and of ``pdcluster plan --against`` mean."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdcluster_operator.cli import (
    against,
    main as command,
    plan as plan_command,
    rollout,
    up as up_command,
)
from pdcluster_operator.cli.exits import Exit
from pdcluster_operator.cli.main import main


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What was called instead of talking to an API server, and with which options."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def noting(module: Any, name: str) -> None:
        async def verb(client: Any, key: Any, options: Any) -> Exit:
            assert (client, key) == ("client", (options.namespace or "mine", "a"))
            calls.append((name, vars(options)))
            return Exit.NOT_READY

        def note(options: Any) -> Exit:
            calls.append((name, vars(options)))
            return Exit.NOT_READY

        monkeypatch.setattr(module, name, verb if module is rollout else note)

    def connected(context: str | None, chosen: Any) -> Exit:
        assert context in (None, "there")
        ended: Exit = asyncio.run(chosen("client"))
        return ended

    for name in ("status", "hold", "go_back", "restart"):
        noting(rollout, name)
    monkeypatch.setattr(rollout, "connected", connected)
    monkeypatch.setattr(rollout, "namespace_of_context", lambda context: "mine")
    noting(against, "show_plan_against")
    noting(plan_command, "show_plan")
    noting(up_command, "up")
    untouched = SimpleNamespace(SIGINT=0, SIG_DFL=0, default_int_handler=0, signal=lambda *_: None)
    monkeypatch.setattr(command, "signal", untouched)
    return calls


TO = ("--context", "there", "-n", "ns")
ROLLOUT = {"command": "rollout", "name": "a", "context": None, "namespace": None}
THERE = ROLLOUT | {"context": "there", "namespace": "ns"}
STATUS = {"verb": "status", "timeout": math.inf, "no_watch": False}
PLAN = {"command": "plan", "file": "f", "output": "steps", "against": None, "namespace": None}
UP = {
    "command": "up", "file": "f", "once": None, "max_tokens": 32, "timeout": 900,
    "model_dir": None, "plain": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "name", "options"),
    [
        (("rollout", "status", "a"), "status", ROLLOUT | STATUS),
        (("rollout", "status", "a", "--no-watch", *TO), "status",
         THERE | STATUS | {"no_watch": True}),
        (("rollout", "status", "a", "--timeout", "90"), "status",
         ROLLOUT | STATUS | {"timeout": 90.0}),
        (("rollout", "status", "a", "--timeout", "1s"), "status",
         ROLLOUT | STATUS | {"timeout": 1.0}),
        (("rollout", "status", "a", "--timeout", "30m"), "status",
         ROLLOUT | STATUS | {"timeout": 1800.0}),
        (("rollout", "status", "a", "--timeout", "2h"), "status",
         ROLLOUT | STATUS | {"timeout": 7200.0}),
        (("rollout", "pause", "a", *TO), "hold", THERE | {"verb": "pause"}),
        (("rollout", "resume", "a"), "hold", ROLLOUT | {"verb": "resume"}),
        (("rollout", "restart", "a"), "restart", ROLLOUT | {"verb": "restart"}),
        (("rollout", "undo", "a"), "go_back", ROLLOUT | {"verb": "undo", "dry_run": False}),
        (("rollout", "undo", "a", "--dry-run"), "go_back",
         ROLLOUT | {"verb": "undo", "dry_run": True}),
        (("plan", "f", "--against"), "show_plan_against", PLAN | {"against": ""}),
        (("plan", "f", "--against", "there", "-n", "ns"), "show_plan_against",
         PLAN | {"against": "there", "namespace": "ns"}),
        (("plan", "f"), "show_plan", PLAN),
        (("up", "f"), "up", UP),
        (("up", "f", "--once", "p", "--max-tokens", "1", "--timeout", "2", "--model-dir", "/m",
          "--plain"), "up",
         UP | {"once": "p", "max_tokens": 1, "timeout": 2, "model_dir": Path("/m"),
               "plain": True}),
    ],
)  # fmt: skip
def test_each_command_line_calls_what_it_says(
    called: list[Any], words: tuple[str, ...], name: str, options: dict[str, Any]
) -> None:
    assert main(words) == 3, "how the command ends is how the process ends"
    assert called == [(name, options)]


@pytest.mark.parametrize("time", ["0", "-1", "1.5", "5d", "m", "", "1 m", "0h"])
def test_a_time_that_is_none_is_refused(
    called: list[Any], time: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["rollout", "status", "a", f"--timeout={time}"])
    assert left.value.code == 2
    assert "is not a time such as 90s, 30m or 1h" in capsys.readouterr().err
    assert called == []
