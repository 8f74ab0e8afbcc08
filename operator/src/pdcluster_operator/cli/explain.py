"""``pdcluster explain``: what a reason or rule means, what to do, and examples of manifests."""

import difflib
import itertools
import textwrap
from collections.abc import Iterable
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from pdcluster_connector.compat.check import RULES
from pdcluster_operator.api import rule_examples
from pdcluster_operator.api.conditions import StatusReason
from pdcluster_operator.api.findings import quoted
from pdcluster_operator.api.remedies import Remedy, Severity, find, table
from pdcluster_operator.api.schema.crd import to_yaml
from pdcluster_operator.cli import output as printed
from pdcluster_operator.cli.columns import Columns
from pdcluster_operator.cli.commands import Command
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.plan.observed.pods import WAITING_REASONS

DETAILS = """\
Says what a reason of the status, a rule of lint, or a symptom means: what you see, why, what to do,
and the next command. For a rule it also prints a manifest that breaks it, and the smallest change
with which nothing is reported any more.

WORD is a name, in upper or lower case, or a message that shows a symptom. Without WORD, it lists
every name.

Exits with 2 if nothing has that name; it then says which names are near.
"""
EXAMPLES = (
    ("pdcluster explain NoTicket", "a reason of a condition or a link"),
    ("pdcluster explain OwnedFlag", "a rule, with a manifest that breaks it"),
    ("pdcluster explain OOMKilled", "a word of a message"),
    ("pdcluster explain", "all names"),
)
OF_PODS = {
    **WAITING_REASONS,
    "CrashLoopBackOff": StatusReason.ENGINE_FAILED,
    "Died": StatusReason.ENGINE_FAILED,
    "Terminating": StatusReason.DRAINING,
}
"""What kubectl and pdcluster up call the state of a pod, and our reason for it."""
COLOURS = {
    Severity.GOOD: "green",
    Severity.PROGRESS: "cyan",
    Severity.ADVICE: "yellow",
    Severity.WAITS: "yellow",
    Severity.FAULT: "red",
}
LABEL = 10
LEAST_WIDTH = 20
MOST_NEAR = 5


class CompatibilityRule(msgspec.Struct, frozen=True):
    """A rule about a pair of engines, or about one engine."""

    id: str
    description: str
    remedy: str
    source: str


class RuleExample(msgspec.Struct, frozen=True):
    """A manifest that breaks a rule, and its nearest neighbour, which breaks none.

    ``refused``: whether admission refuses ``wrong``. If not, it warns of it. ``difference`` has the
    lines that change, with ``-`` and ``+``, and the fields around them. ``by``: who judges, beyond
    a default install.
    """

    rule: str
    refused: bool
    finding: str
    wrong: dict[str, Any]
    right: dict[str, Any]
    difference: list[str]
    by: tuple[str, ...]


class Explanation(msgspec.Struct, frozen=True, rename="camel"):
    """What one name means. ``page`` and ``more`` are pages below docs/."""

    name: str
    section: str
    severity: Severity
    symptom: str
    cause: str
    remedy: str
    next_command: str
    page: str
    more: str
    rules: tuple[CompatibilityRule, ...] = ()
    examples: tuple[RuleExample, ...] = ()


class Explanations(msgspec.Struct, frozen=True):
    """The names that were asked for; all of them if none was."""

    items: tuple[Explanation, ...]


@click.command(cls=Command, help=DETAILS, examples=EXAMPLES, document=Explanations)
@click.argument("words", nargs=-1, metavar="[WORD]...")
def explain(words: tuple[str, ...], output: str) -> Exit:
    """Print the explanation of each word, or the list of all names."""
    asked = [_known(word) for word in words]
    items = tuple(_explanation(one, only) for one, only in asked)
    if not asked and output != "text":
        items = tuple(_explanation(one) for one in table().values())
    printed.show(output, Explanations(items), lambda console: _print(console, items))
    return Exit.DONE


def _known(word: str) -> tuple[Remedy, str]:
    """Return the entry of a word, and the compatibility rule if the word is its id."""
    names = {state.lower(): str(reason) for state, reason in OF_PODS.items()}
    names |= {name.lower(): name for name in (*(rule.id for rule in RULES), *table())}
    if name := names.get(word.lower()):
        return table()[name.partition("/")[0]], name if "/" in name else ""
    if symptom := find("", word):
        return symptom, ""
    near = difflib.get_close_matches(word.lower(), names, MOST_NEAR)
    near += [name for name in names if word and word.lower() in name]
    or_these = " or ".join(list(dict.fromkeys(names[name] for name in near))[:MOST_NEAR])
    question = f"did you mean {or_these}? " if near else ""
    raise UserError(
        f"no reason, rule or symptom is called {quoted(word)}; {question}"
        "`pdcluster explain` lists all names",
        Exit.USAGE,
    )


def _explanation(one: Remedy, only: str = "") -> Explanation:
    """Return what is known about an entry.

    Args:
        only: the id of the compatibility rule that is meant; empty for all that the reason has.
    """
    rules = [rule for rule in RULES if rule.reason == one.name and only in ("", rule.id)]
    examples = rule_examples.of_reason(one.name).items()
    return Explanation(
        name=one.name,
        section=one.section,
        severity=one.severity,
        symptom=one.symptom,
        cause=one.cause,
        remedy=one.remedy,
        next_command=one.next,
        page=one.link,
        more=one.more,
        rules=tuple(
            CompatibilityRule(rule.id, rule.description, rule.remedy, rule.source) for rule in rules
        ),
        examples=tuple(_example(rule, one) for rule, one in examples if only in ("", rule)),
    )


def _example(rule: str, one: rule_examples.Example) -> RuleExample:
    by = tuple(rule_examples.SETTINGS[setting] for setting in one.admits)
    told = str(one.finding)
    return RuleExample(rule, one.refused, told, one.wrong, one.right, one.difference(), by)


def _print(console: Console, items: tuple[Explanation, ...]) -> None:
    if not items:
        _print_names(console)
    for place, one in enumerate(items):
        if place:
            console.print()
        head = Text(one.name, style="bold").append(": ", style="not bold")
        console.print(head.append(one.severity.meaning, style=COLOURS[one.severity]))
        for label, text in (
            ("you see", one.symptom),
            ("cause", one.cause),
            ("to do", one.remedy),
            ("next", one.next_command),
            ("read", " ".join(filter(None, (f"docs/{one.page}", one.more and f"docs/{one.more}")))),
        ):
            _print_line(console, label, text)
        for rule in one.rules:
            console.print(Text(f"\n{rule.id}", style="bold"))
            _print_line(console, "rule", rule.description)
            _print_line(console, "to do", rule.remedy)
            _print_line(console, "source", rule.source)
        for example in one.examples:
            _print_example(console, example)
        if one.rules and not one.examples:
            console.print("\nNo manifest shows it. The engines check it when they connect.")


def _print_example(console: Console, one: RuleExample) -> None:
    verb = "refuses" if one.refused else "warns of"
    console.print(Text(f"\nAdmission {verb} this manifest:", style="bold"))
    _print_block(console, to_yaml(one.wrong).splitlines())
    _print_line(console, "finding", one.finding)
    for setting in one.by:
        _print_line(console, "judge", setting)
    console.print(Text("\nWith this change it reports nothing:", style="bold"))
    _print_block(console, one.difference)


def _print_block(console: Console, lines: Iterable[str]) -> None:
    """Print lines of YAML or of a diff as they are, so that they can be copied."""
    styles = {"-": "red", "+": "green"}
    for line in lines:
        console.print(Text(f"  {line}", style=styles.get(line[:1], "")), soft_wrap=True)


def _print_line(console: Console, label: str, text: str) -> None:
    """Print a label and its text, whose further lines stand below its first."""
    if text:
        width = max(LEAST_WIDTH, console.width - LABEL) if console.is_terminal else len(text)
        first, *more = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        head = Text(f"  {label:{LABEL - 2}}", style="dim").append(first, style="not dim")
        console.print(head, soft_wrap=True)
        for line in more:
            console.print(Text(" " * LABEL + line), soft_wrap=True)


def _print_names(console: Console) -> None:
    for section, entries in itertools.groupby(table().values(), lambda one: one.section):
        console.print(Text(f"{section}", style="bold"))
        names = Columns("NAME", "SEVERITY", "WHAT YOU SEE")
        for one in entries:
            names.add(one.name, Text(one.severity, style=COLOURS[one.severity]), one.symptom)
        console.print(names, soft_wrap=True)
        console.print()
