"""What a command prints: text for people, or one document for programs.

A document has ``apiVersion: cli.pdcluster.dev/v1`` and a ``kind``, and the same facts as the text.
Fields may be added to ``v1``; none is renamed or removed. Documents go to standard output alone,
and everything else that a command says then goes to standard error.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

API_VERSION = "cli.pdcluster.dev/v1"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class CleanConsole(Console):
    """Prints texts of others, too: what they hold cannot change the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the parts; those that rich itself makes to move the cursor stay as they are."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain(text), style, control)


def console(*, stderr: bool = False) -> Console:
    """Return where people read: no colours in a pipe or with NO_COLOR.

    In a terminal, lines are broken between words; in a pipe, they stay whole.
    """
    stream = sys.stderr if stderr else sys.stdout
    return CleanConsole(file=stream, highlight=False, soft_wrap=not stream.isatty())


def hanging(console: Console, label: str | Text, body: Text) -> None:
    """Print a label and a text beside it, which keeps its column in a terminal."""
    label = Text(label) if isinstance(label, str) else label
    lines = [body]
    if console.is_terminal:
        lines = list(body.wrap(console, max(1, console.width - label.cell_len))) or lines
    for line in lines:
        console.print(label + line, soft_wrap=True)
        label = Text(" " * label.cell_len)


def plain(text: str) -> str:
    """Return a text without colours, and without what else could change a terminal."""
    if text.isprintable():
        return text
    # A byte that is no UTF-8 stays what it is: the stream escapes it.
    return "".join(
        c if c.isprintable() or c in "\t\n" or "\ud800" <= c <= "\udfff" else "?"
        for c in COLOUR.sub("", text)
    )


def document(facts: msgspec.Struct) -> dict[str, Any]:
    """Return what programs read. The kind is the name of the type."""
    fields: dict[str, Any] = msgspec.to_builtins(facts, str_keys=True)
    return {"apiVersion": API_VERSION, "kind": type(facts).__name__, **fields}


def show(
    output: str,
    facts: msgspec.Struct,
    text: Callable[[Console], None],
    *,
    one_of_many: bool = False,
) -> None:
    """Print facts as ``-o`` asks.

    Args:
        output: ``text``, ``json`` or ``yaml``.
        text: prints the same facts for people.
        one_of_many: whether more documents follow: JSON is then one line a document, and each
            document in YAML begins with ``---``.
    """
    if output == "text":
        text(console())
    elif output == "json":
        # Escapes keep half characters, as a file's name may have them.
        print(json.dumps(document(facts), indent=None if one_of_many else 2), flush=True)
    else:
        from pdcluster_operator.api.schema.crd import to_yaml

        begin = "---\n" if one_of_many else ""
        print(f"{begin}{to_yaml(document(facts))}", end="", flush=True)


def schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of a document."""
    [found], parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    envelope = {"apiVersion": {"const": API_VERSION}, "kind": {"const": kind.__name__}}
    shape = parts.pop(found["$ref"].rpartition("/")[2])
    shape["properties"] = envelope | shape["properties"]
    shape["required"] = [*envelope, *shape.get("required", ())]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **shape, "$defs": parts}
