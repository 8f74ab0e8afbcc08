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
    commands,
    connection,
    main as command,
    plan as plan_command,
    rollout,
    up as up_command,
)
from pdcluster_operator.cli.exits import Exit
from pdcluster_operator.cli.main import main


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was called instead of talking to an API server, and with which options."""
    calls: list[tuple[Any, ...]] = []

    def noting(module: Any, name: str) -> None:
        async def verb(client: Any, key: Any, *words: Any, **options: Any) -> Exit:
            assert client == "client"
            calls.append((name, key, *(one for one in words if not callable(one)), options))
            return Exit.NOT_READY

        def note(*words: Any) -> Exit:
            calls.append((name, *words))
            return Exit.NOT_READY

        monkeypatch.setattr(module, name, verb if module is rollout else note)

    def connected(context: str | None, key: Any, chosen: Any, _: Any = None) -> Exit:
        assert (context, key.namespace) in ((None, "mine"), ("there", "ns"))
        ended: Exit = asyncio.run(chosen("client"))
        return ended

    for name in ("follow", "hold", "go_back", "restart"):
        noting(rollout, name)
    monkeypatch.setattr(connection, "connected", connected)
    monkeypatch.setattr(connection, "namespace_of_context", lambda *_: "mine")
    noting(against, "show_plan_against")
    noting(plan_command, "show_plan")
    noting(up_command, "run")
    untouched = SimpleNamespace(SIGINT=0, SIG_DFL=0, default_int_handler=0, signal=lambda *_: None)
    monkeypatch.setattr(command, "signal", untouched)
    monkeypatch.setattr(commands, "signal", untouched)
    return calls


TO = ("--context", "there", "-n", "ns")
MINE, THERE = ("mine", "a"), ("ns", "a")
UP = up_command.Options("f", None, 32, 900, None, keep_going=False, plain=False, ui=False)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (("rollout", "status", "a"), ("follow", MINE, math.inf, {"watch": True})),
        (("rollout", "status", "a", "--no-watch", *TO),
         ("follow", THERE, math.inf, {"watch": False})),
        (("rollout", "status", "a", "--timeout", "90"), ("follow", MINE, 90.0, {"watch": True})),
        (("rollout", "status", "a", "--timeout", "1s"), ("follow", MINE, 1.0, {"watch": True})),
        (("rollout", "status", "a", "--timeout", "30m"),
         ("follow", MINE, 1800.0, {"watch": True})),
        (("rollout", "status", "a", "--timeout", "2h"), ("follow", MINE, 7200.0, {"watch": True})),
        (("rollout", "pause", "a", *TO), ("hold", THERE, {"paused": True})),
        (("rollout", "resume", "a"), ("hold", MINE, {"paused": False})),
        (("rollout", "restart", "a"), ("restart", MINE, {})),
        (("rollout", "undo", "a"), ("go_back", MINE, {"dry_run": False})),
        (("rollout", "undo", "a", "--dry-run"), ("go_back", MINE, {"dry_run": True})),
        (("plan", "f", "--against"), ("show_plan_against", "f", None, None, "text")),
        (("plan", "f", "--against", "there", "-n", "ns"),
         ("show_plan_against", "f", "there", "ns", "text")),
        (("plan", "f"), ("show_plan", "f", "text")),
        (("plan", "f", "-o", "steps"), ("show_plan", "f", "text")),
        (("plan", "f", "-o", "yaml"), ("show_plan", "f", "yaml")),
        (("up", "f"), ("run", UP)),
        (("up", "f", "--once", "p", "--max-tokens", "1", "--timeout", "2m", "--model-dir", "/m",
          "--plain"),
         ("run", up_command.Options(
             "f", "p", 1, 120, Path("/m"), keep_going=False, plain=True, ui=False))),
    ],
)  # fmt: skip
def test_each_command_line_calls_what_it_says(
    called: list[Any], words: tuple[str, ...], call: tuple[Any, ...]
) -> None:
    assert main(words) == 3, "how the command ends is how the process ends"
    assert called == [call]


def test_objects_are_of_a_new_cluster_only(
    called: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "f", "--against", "there", "-o", "yaml"]) == 2
    assert "use -o json instead; see `pdcluster plan --help`" in capsys.readouterr().err
    assert called == []


@pytest.mark.parametrize("time", ["0", "-1", "1.5", "5d", "m", "", "1 m", "0h"])
def test_a_time_that_is_none_is_refused(
    called: list[Any], time: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollout", "status", "a", f"--timeout={time}"]) == 2
    assert "is not a time such as 90s, 30m or 1h" in capsys.readouterr().err
    assert called == []
