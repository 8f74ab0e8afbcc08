"""What all commands share: how their help looks, where their cluster is, and how values are read.

Help is readable in a terminal of 40 columns: examples and options then have their explanation
below them, and no word is cut.
"""

import functools
import importlib
import math
import shlex
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import click
import msgspec
from click.shell_completion import CompletionItem

from pdcluster_operator.api.object_names import name_errors, namespace_errors

NARROW = 60
"""In a narrower terminal, an explanation stands below what it explains."""
BROAD = 90
"""In a broader terminal, what an example does stands beside it."""
LEAST_WIDTH = 30
WIDEST = 100
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
COMPLETE = "_PDCLUSTER_COMPLETE"
"""The variable by which a shell asks what could follow."""
FORMATS = ("text", "json", "yaml")

Examples = Sequence[tuple[str, str]]
"""Command lines, each with what it does."""


class Help(click.HelpFormatter):
    """Writes help in the width of the terminal; Click alone takes at least 50 columns."""

    def __init__(
        self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None
    ) -> None:
        columns = min(shutil.get_terminal_size().columns, max_width or WIDEST)
        super().__init__(indent_increment, width or max(columns - 2, LEAST_WIDTH))

    def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
        """Write terms and their explanations, below each other if the terminal is narrow."""
        widest = col_max if self.width >= NARROW else 2
        super().write_dl(rows, widest, col_spacing)


class Context(click.Context):
    """The context of one command."""

    formatter_class = Help


class Command(click.Command):
    """One command.

    Args:
        document: what ``-o json`` prints. The name of the type is the document's ``kind``. With
            it, the command has the option ``-o``, unless it brings its own.
        examples: printed at the end of the help.
    """

    context_class = Context

    def __init__(
        self,
        *words: Any,
        document: type[msgspec.Struct] | None = None,
        examples: Examples = (),
        **settings: Any,
    ) -> None:
        super().__init__(*words, **settings)
        self.document, self.examples = document, examples
        if document is not None and all(one.name != "output" for one in self.params):
            self.params.append(_output(document))

    def invoke(self, ctx: click.Context) -> Any:
        """Run it. From here on, Ctrl-C is an exception: the command may have to clean up."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        _write_examples(self.examples, formatter)
        super().format_epilog(ctx, formatter)


class Entry(NamedTuple):
    """A command that is imported when it is used: ``module:name``, and its line in the help."""

    where: str
    summary: str


class Group(click.Group):
    """A command with commands below it.

    Args:
        table: commands by name that are imported when they are used.
        examples: printed at the end of the help.
    """

    context_class = Context
    command_class = Command

    def __init__(
        self,
        *words: Any,
        table: Mapping[str, Entry] | None = None,
        examples: Examples = (),
        **settings: Any,
    ) -> None:
        super().__init__(*words, **settings)
        self.table, self.examples = table or {}, examples

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of their definition."""
        return [*self.table, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None if there is none of that name."""
        if (entry := self.table.get(cmd_name)) is None:
            return super().get_command(ctx, cmd_name)
        module, _, name = entry.where.partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command's name. It imports none of them."""
        found = [
            CompletionItem(name, help=summary)
            for name, summary in self._summaries().items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def _summaries(self) -> dict[str, str]:
        own = {name: str(one.short_help or "") for name, one in self.commands.items()}
        return {name: entry.summary for name, entry in self.table.items()} | own

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line a command. It imports none of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._summaries().items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        _write_examples(self.examples, formatter)
        super().format_epilog(ctx, formatter)


def _write_examples(examples: Examples, formatter: click.HelpFormatter) -> None:
    if examples:
        with formatter.section("Examples"):
            formatter.write_dl(examples, col_max=44 if formatter.width > BROAD else 2)


@dataclass(frozen=True, slots=True)
class Target:
    """The PDCluster that a command is about, as the command line names it.

    ``local``: it is one of a running `pdcluster up` of this machine.
    """

    name: str
    namespace: str | None
    context: str | None
    local: bool = False

    @property
    def elsewhere(self) -> str:
        """The options that lead another command to the same place, each after a space."""
        given = {"-n": self.namespace, "--context": self.context}
        words = [f" {option} {shlex.quote(value)}" for option, value in given.items() if value]
        return "".join([*words, " --local" * self.local])


def in_context(command: str, context: str | None) -> str:
    """Return a command that asks the cluster of the same context as the one that prints it.

    A command that asks no cluster, such as ``pdcluster lint``, stays as it is.
    """
    program = command.partition(" ")[0]
    if not context or not (program in ("kubectl", "helm") or " -n " in command):
        return command
    option = {"helm": "--kube-context "}.get(program, "--context ")
    if command.endswith(" --against"):  # which takes the context itself
        option = ""
    return f"{command} {option}{shlex.quote(context)}"


class Namespace(click.ParamType[str, str]):
    """The name of a namespace. An empty one would address all of them."""

    name = "namespace"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse what no namespace can have as its name."""
        for message, _ in namespace_errors(value):
            self.fail(f"{value!r} {message}", param, ctx)
        return value


class Finite(click.FloatRange):
    """A number within bounds. ``nan`` is within all of Click's bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse what is no number."""
        if not math.isfinite(number := super().convert(value, param, ctx)):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


namespace_option = click.option(
    "-n",
    "--namespace",
    type=Namespace(),
    metavar="NAMESPACE",
    help="default: the one of the context",
)
context_option = click.option(
    "--context", metavar="CONTEXT", help="of the kubeconfig; default: its current one"
)


def _complete_name(
    context: click.Context, _: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from pdcluster_operator.cli.completion import names_of

    where = context.params
    names = names_of(where.get("namespace"), where.get("context"), local=bool(where.get("local")))
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def check_name(name: str, *, local: bool = False) -> None:
    """Refuse a NAME that no PDCluster can have: an empty one would address all of them.

    With ``local``, it may be a run's folder.
    """
    for message, _ in name_errors(name):
        if not (local and name):
            raise click.BadParameter(f"{name!r} {message}", param_hint="NAME")


def target(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the argument NAME and the options that say where the PDCluster is.

    They arrive as one argument, ``target``.
    """

    @click.argument("name", metavar="NAME", shell_complete=_complete_name)
    @namespace_option
    @context_option
    @functools.wraps(command)
    def with_target(name: str, namespace: str | None, context: str | None, **options: Any) -> Any:
        check_name(name, local=bool(options.get("local")))
        return command(target=Target(name, namespace, context), **options)

    return with_target


def target_or_run(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command what :func:`target` does, and ``--local``. For commands that only read."""

    @click.option(
        "--local",
        is_flag=True,
        help="NAME runs on this machine: it is a PDCluster of a running pdcluster up, or the "
        "folder of its run",
    )
    @target
    @functools.wraps(command)
    def with_run(target: Target, local: bool, **options: Any) -> Any:
        if local and target.context is not None:
            raise click.UsageError("--local and --context name two different places")
        return command(target=replace(target, local=local), **options)

    return with_run


def _output(document: type[msgspec.Struct]) -> click.Option:
    return click.Option(
        ["-o", "--output"],
        type=click.Choice(FORMATS),
        default=FORMATS[0],
        help=f"json, yaml: one document of kind {document.__name__} for programs (default: text)",
    )


def duration(text: str) -> float:
    """Return the seconds of a time such as 90s, 30m or 1h."""
    number, unit = (text[:-1], text[-1:]) if text[-1:] in UNITS else (text, "s")
    if not number.isdecimal() or int(number) < 1:
        raise click.BadParameter(f"{text!r} is not a time such as 90s, 30m or 1h")
    return int(number) * UNITS[unit]


def positive(text: str) -> int:
    """Return a whole number above 0."""
    if not str(text).isdecimal() or int(text) < 1:
        raise click.BadParameter(f"{text!r} is not a whole number above 0")
    return int(text)
