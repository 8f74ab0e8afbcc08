"""Prints docs/cli-reference.md: the help of each command, and the fields of its documents."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from pdcluster_operator.cli import output
from pdcluster_operator.cli.commands import Command, Context
from pdcluster_operator.cli.main import COMMANDS, pdcluster

WIDTH = 88
HEAD = """\
# Reference of the command line

<!-- Written by dev/cli_page.py from the commands: make generate. -->

[cli.md](cli.md) is the page to begin with.

With `-o json` or `-o yaml`, a command prints one document on standard output. Everything else that
it says goes to standard error. A document has `apiVersion: {version}` and the `kind` that the
command's section names. Fields may be added to this version; none is renamed or removed.
[cli-v1.schema.json](cli-v1.schema.json) is the JSON schema of all kinds.
"""


def every_command() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield each command, and those below it, with the words that call it."""
    root = Context(pdcluster, info_name="pdcluster", terminal_width=WIDTH)
    for name in COMMANDS:
        command = pdcluster.get_command(root, name)
        assert command is not None, name
        context = Context(command, parent=root, info_name=name, help_option_names=["-h", "--help"])
        yield f"pdcluster {name}", command, context
        if isinstance(command, click.Group):
            for verb in command.list_commands(context):
                below = command.get_command(context, verb)
                assert below is not None, verb
                inner = Context(below, parent=context, info_name=verb)
                yield f"pdcluster {name} {verb}", below, inner


def kinds() -> dict[str, type[msgspec.Struct]]:
    """Return the type of each kind of document, by kind."""
    documents = (one.document for _, one, _ in every_command() if isinstance(one, Command))
    return {one.__name__: one for one in documents if one is not None}


def fields(kind: type[msgspec.Struct]) -> Iterator[tuple[str, str]]:
    """Yield the path and the type of each field of a document."""
    schema = output.schema(kind)
    yield from _below("", schema, schema["$defs"])


def _below(path: str, shape: dict[str, Any], parts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, field in shape.get("properties", {}).items():
        where = f"{path}.{name}".lstrip(".")
        yield from _field(where, field, parts)


def _field(path: str, field: dict[str, Any], parts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if path in ("apiVersion", "kind"):
        return
    options = [one for one in field.get("anyOf", [field]) if one.get("type") != "null"]
    may_be_null = ", or null" if len(options) < len(field.get("anyOf", [field])) else ""
    [first, *others] = options or [{}]
    if "$ref" in first and not others:
        part = parts[first["$ref"].rpartition("/")[2]]
        if "properties" in part:
            if may_be_null:
                yield path, "object, or null"
            yield from _below(path, part, parts)
        else:
            yield path, _words(part) + may_be_null
    elif first.get("type") == "array" and "items" in first and not others:
        yield from _field(f"{path}[]", first["items"], parts)
    elif isinstance(first.get("additionalProperties"), dict) and not others:
        yield from _field(f"{path}.*", first["additionalProperties"], parts)
    else:
        yield path, " or ".join(map(_words, options)) + may_be_null


def _words(shape: dict[str, Any]) -> str:
    if "enum" in shape:
        return ", ".join(f"`{one}`" for one in shape["enum"])
    return str(shape.get("type", "any"))


def main() -> None:
    print(HEAD.format(version=output.API_VERSION))
    print("| command | what it does |\n|---|---|")
    for name, entry in COMMANDS.items():
        print(f"| [`pdcluster {name}`](#pdcluster-{name}) | {entry.summary} |")
    for words, command, context in every_command():
        print(f"\n## {words}\n\n```text\n{command.get_help(context)}\n```")
        kind = command.document if isinstance(command, Command) else None
        if kind is not None:
            said = inspect.cleandoc(kind.__doc__ or "").replace("``", "`")
            print(f"\nIts document is of kind `{kind.__name__}`. {said}\n")
            print("| field | type |\n|---|---|")
            for path, shape in fields(kind):
                print(f"| `{path}` | {shape} |")


if __name__ == "__main__":
    main()
