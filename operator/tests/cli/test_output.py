"""What all commands print: help in 40 columns, and documents for programs."""

from __future__ import annotations

import io
import json
import re

import click
import jsonschema
import msgspec
import pytest
import yaml
from rich.console import Console
from rich.live import Live
from rich.text import Text

from pdcluster_operator.cli import (
    check_facts,
    doctor,
    fabric_probe,
    output,
    rollout,
    status_facts,
    status_view,
    view,
)
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.main import COMMANDS, _say, main, pdcluster
from pdcluster_operator.runtime.interfaces import Key


def every_command() -> list[tuple[str, ...]]:
    """The words of each command, those below a command too."""
    found: list[tuple[str, ...]] = []
    root = click.Context(pdcluster)
    for name in COMMANDS:
        found.append((name,))
        if isinstance(command := pdcluster.get_command(root, name), click.Group):
            found.extend((name, verb) for verb in command.list_commands(root))
    return found


def words_of(text: str) -> set[str]:
    return set(re.split(r"[\s-]+", text))


@pytest.mark.parametrize("words", [(), *every_command()], ids=" ".join)
def test_help_is_readable_in_40_columns(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*words, "--help"]) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "40")
    assert main([*words, "--help"]) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, wide.splitlines())) <= 100
    for line in narrow.splitlines():
        # Commands and options are there to be copied, so they stay in one line.
        assert len(line) <= 40 or re.match(r"  (pdcluster|kubectl|helm|-)", line), line
    assert re.sub(r"\s", "", narrow) == re.sub(r"\s", "", wide), "no word is lost"
    assert words_of(narrow) == words_of(wide), "no word is cut, unless at its hyphen"


class Part(msgspec.Struct, frozen=True, rename="camel"):
    in_bytes: int


class Report(msgspec.Struct, frozen=True, rename="camel"):
    file_name: str
    parts: tuple[Part, ...] = ()
    speed: float | None = None


REPORT = Report("half \udcff, 'quoted': ä", (Part(3),))
FACTS = {
    "apiVersion": "cli.pdcluster.dev/v1",
    "kind": "Report",
    "fileName": REPORT.file_name,
    "parts": [{"inBytes": 3}],
    "speed": None,
}


@pytest.mark.parametrize(("form", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_a_document_has_an_envelope_and_its_schema(
    form: str, read: object, capsys: pytest.CaptureFixture[str]
) -> None:
    output.show(form, REPORT, lambda console: pytest.fail("no text"))
    assert callable(read)
    found = read(capsys.readouterr().out)
    assert found == FACTS
    assert list(found)[:2] == ["apiVersion", "kind"]
    schema = output.schema(Report)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(found, schema)
    for wrong in ({"kind": "Other"}, {"parts": [{}]}, {"fileName": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(found | wrong, schema)


def test_a_stream_is_one_document_a_line_or_a_yaml_stream(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for form in ("json", "json", "yaml", "yaml"):
        output.show(form, REPORT, lambda console: None, one_of_many=True)
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert json.loads(first) == json.loads(second) == FACTS
    assert list(yaml.safe_load_all("\n".join(rest))) == [FACTS, FACTS]


@pytest.mark.parametrize(
    ("terminal", "environment", "coloured"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False)],
)
def test_text_has_colours_in_a_terminal_unless_somebody_minds(
    terminal: bool,
    environment: dict[str, str],
    coloured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": "40", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", stream := Stream())
    body = Text("fifteen words " * 5 + "end", "red")
    output.show("text", REPORT, lambda console: output.hanging(console, "  name  ", body))
    written = stream.getvalue()
    assert ("\x1b[31m" in written) is coloured
    first, *rest = re.sub(r"\x1b\[\d*m", "", written).splitlines()
    assert first.startswith("  name  fifteen words")
    assert " ".join([first, *rest]).split() == ["name", *body.plain.split()]
    assert all(line[:8].isspace() and line[8] != " " for line in rest)
    assert len(rest) == (2 if terminal else 0)
    assert not terminal or max(map(len, (first, *rest))) <= 40


EVIL = "\x1b]0;pwned\x07\x1b[2J\x1b]52;c;ZXZpbA==\x1b\\\x9b2J\r"
CLUSTER: dict = {"metadata": {"name": "a", "namespace": "n", "generation": 1}, "spec": {}}


def of_doctor(console: Console) -> None:
    pod = {"status": {"containerStatuses": [{"state": {"terminated": {"message": EVIL}}}]}}
    row = fabric_probe.failed_row(fabric_probe.ProbeError(fabric_probe._ended(pod)["error"]))
    doctor._print(console, doctor.Doctor("Cluster", 1, (row,)))


def of_status(console: Console) -> None:
    event = {"regarding": {"name": "a"}, "type": "Warning", "reason": EVIL, "note": EVIL,
             "eventTime": "2026-11-27T00:00:00.000000Z"}  # fmt: skip
    objects = status_facts.Objects({**CLUSTER, "status": {}}, [], None, True, [event], 1e9)
    status_view.print_status(console, status_facts.status_of(objects), 1e9)


def of_a_live_table(console: Console) -> None:
    with Live(console=console, transient=True) as live:
        live.update(view.pods_table([view.PodLine("n", "r", "a", "Died", EVIL, None, 0)]))


def of_check(console: Console) -> None:
    path = check_facts.kv_path({"outcome": "local", "reason": EVIL}, 0, ["p"], ["d"])
    console.print(Text(f"KV path: {path}{EVIL}"))


def of_rollout(_: Console) -> None:
    progressing = {"type": "Progressing", "status": "True", "reason": "Replacing",
                   "message": EVIL, "lastTransitionTime": "2026-11-27T00:00:00Z"}  # fmt: skip
    status = {"observedGeneration": 1, "conditions": [progressing]}
    found = rollout.announce({**CLUSTER, "status": status})
    rollout._show("text", False, Key("n", "a"), found)


SINKS = {
    "doctor": of_doctor,
    "probe": lambda _: doctor._say(EVIL),
    "status": of_status,
    "live table": of_a_live_table,
    "lines of up": lambda console: view.View(console, plain=True).say(EVIL),
    "check": of_check,
    "rollout": of_rollout,
    "error": lambda _: _say(UserError(EVIL, Exit.MACHINE)),
    "table": lambda console: console.print(view.conditions_table([view.Condition(*[EVIL] * 4)])),
}


@pytest.mark.parametrize("sink", SINKS)
def test_what_others_write_cannot_change_the_terminal(
    sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    written = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", written)
    for name, value in {"TERM": "xterm", "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    SINKS[sink](output.console())
    text = written.getvalue()
    assert "pwned" in text
    for bad in ("\x1b]", "\x07", "\x1b[2J", "\x1b\\", "\x9b"):
        assert bad not in text
