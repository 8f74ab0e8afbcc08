"""Reads manifests: files, folders and standard input, with several documents in each.

What is read is bounded: ``MAX_BYTES`` a file, ``MAX_FILES`` a folder. The aliases of a document may
stand for ``MAX_EXPANDED`` characters. YAML's nodes are kept beside the values, because a node knows
its line.
"""

import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from pdcluster_operator.api.findings import FieldError, Rule, shown, under
from pdcluster_operator.api.object_names import GROUP, KIND, SCALER_KIND
from pdcluster_operator.cli.exits import Exit, UserError

MAX_BYTES = 4 << 20
MAX_EXPANDED = 2 * MAX_BYTES
"""Without aliases, no file of MAX_BYTES has so many."""
MAX_FILES = 10_000
ENDINGS = (".yaml", ".yml")
_OF_A_MANIFEST = re.compile(r"(apiVersion|kind|metadata|spec|status)\b|[.]$")
_DECIMAL = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)(e[-+]?\d+)?", re.ASCII)
_LEAST_EXPONENT = 1e21
"""JSON of Go writes a smaller number without a fraction as an integer."""
_OUR_KIND = re.compile(f"{KIND}s?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Document:
    """One object of a file.

    Attributes:
        number: of the YAML document in its file, from 1. The objects of a List share one.
        repeated: the keys that a mapping has twice. Of their values, the body has the last.
    """

    file: str
    number: int
    body: Any
    node: yaml.Node
    repeated: tuple[FieldError, ...] = ()

    @property
    def name(self) -> str:
        """``metadata.name``, if it is text."""
        metadata = self.body.get("metadata") if isinstance(self.body, dict) else None
        name = metadata.get("name") if isinstance(metadata, dict) else None
        return name if isinstance(name, str) else ""

    @property
    def namespace(self) -> str:
        """``metadata.namespace``, if it is text."""
        metadata = self.body.get("metadata") if isinstance(self.body, dict) else None
        namespace = metadata.get("namespace") if isinstance(metadata, dict) else None
        return namespace if isinstance(namespace, str) else ""

    @property
    def identity(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def title(self) -> str:
        """What to call it: its file, which document of it, and the name of the object."""
        number = f", document {self.number}" if self.number > 1 else ""
        return f"{self.file}{number} ({self.name})" if self.name else f"{self.file}{number}"

    @property
    def other_kind(self) -> str:
        """The kind of an object that is no PDCluster; empty for one that is, or should be."""
        body = self.body if isinstance(self.body, dict) else {}
        kind, group = body.get("kind"), str(body.get("apiVersion")).partition("/")[0]
        # A misspelt kind of our group is a mistake, and no object of somebody else.
        if not isinstance(kind, str) or _OUR_KIND.fullmatch(kind):
            return ""
        return kind if group != GROUP or kind == SCALER_KIND else ""

    def line(self, path: str) -> int:
        """Return the line of a field, from 1, or of the nearest field around it that is there.

        It is 0 for a path that is no field of a manifest, such as an option of the command.
        """
        return self._reach(path)[0]

    def as_written(self, error: FieldError) -> FieldError:
        """Return an error with the scalar of the file: ``010`` for what is the number 8."""
        _, node, rest = self._reach(error.path)
        if rest or not isinstance(node, yaml.ScalarNode) or not node.value:
            return error
        is_its_value = error.value == shown(_Loader(b"").construct_object(node))
        return replace(error, value=shown(node.value)) if is_its_value else error

    def _reach(self, path: str) -> tuple[int, yaml.Node, str]:
        """Return the line and the node of a field, or of one around it, and the path from there."""
        node, rest = self.node, path
        line = node.start_mark.line + 1 if _OF_A_MANIFEST.match(path) else 0
        while rest and (step := _step(node, rest)) is not None:
            line, node, rest = step
        return line, node, rest


def _step(node: yaml.Node, path: str) -> tuple[int, yaml.Node, str] | None:
    """Follow a path by one key or index: its line, its node and the rest; None if it ends here."""
    if isinstance(node, yaml.SequenceNode) and (found := re.match(r"\[(\d+)\][.]?", path)):
        place = int(found[1])
        if place < len(node.value):
            item = node.value[place]
            return item.start_mark.line + 1, item, path[found.end() :]
    if isinstance(node, yaml.MappingNode):
        # Keys hold dots, too: the longest one that fits is meant. The last one of a name counts.
        fitting = [pair for pair in reversed(node.value) if under(path, str(pair[0].value))]
        if fitting:
            key, value = max(fitting, key=lambda pair: len(pair[0].value))
            return key.start_mark.line + 1, value, path[len(key.value) :].removeprefix(".")
    return None


def files_of(path: str) -> list[str]:
    """Return the files with YAML in a folder and below it, in order; a file alone is itself.

    Folders whose names begin with a dot are left out.

    Raises:
        UserError: the folder cannot be read, holds no such file, or too many.
    """
    if path == "-" or not os.path.isdir(path):
        return [path]
    found: list[str] = []
    try:
        for folder, below, names in os.walk(path, onerror=_raise):
            below[:] = sorted(name for name in below if not name.startswith("."))
            files = (Path(folder, name) for name in sorted(names) if name.endswith(ENDINGS))
            # To open a pipe takes until somebody writes to it.
            found += (str(file) for file in files if file.is_file() or not file.exists())
            if len(found) > MAX_FILES:
                raise UserError(
                    f"{path} holds more than {MAX_FILES:,} files with YAML; name a folder below it",
                    Exit.MANIFEST,
                )
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be read: {error.strerror}", Exit.MANIFEST
        ) from error
    if not found:
        raise UserError(
            f"{path} holds no file that ends with {' or '.join(ENDINGS)}", Exit.MANIFEST
        )
    return found


def read_documents(file: str) -> list[Document]:
    """Return all objects of a file or of standard input, those of a List one by one.

    Raises:
        UserError: it cannot be read, or is no YAML.
    """
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if file == "-" else _read(Path(file))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}", Exit.MANIFEST) from error
    if len(data) > MAX_BYTES:
        raise UserError(f"{file} is larger than {MAX_BYTES >> 20} MiB", Exit.MANIFEST)
    try:
        documents = list(_documents(file, data))
    except UserError:
        raise
    except Exception as error:  # `!!timestamp x` raises AttributeError, `!!bool x` KeyError
        hint = "; render templates first, and lint what comes out" if b"{{" in data else ""
        said = f"{file} is not YAML: {_first_problem(error, data)}{hint}"
        raise UserError(said, Exit.MANIFEST) from error
    if not documents:
        raise UserError(f"{file} is empty", Exit.MANIFEST)
    return documents


def read_cluster(file: str) -> Document:
    """Return the one PDCluster of a file; other kinds beside it are left out.

    Raises:
        UserError: there is none, or more than one.
    """
    clusters = [one for one in read_documents(file) if not one.other_kind]
    if not clusters:
        raise UserError(f"there is no {KIND} in {file}; add one, with kind: {KIND}", Exit.MANIFEST)
    if len(clusters) > 1:
        raise UserError(
            f"{file} holds {len(clusters)} objects of kind {KIND}; put one of them into a file of "
            "its own, and name that file",
            Exit.MANIFEST,
        )
    return clusters[0]


class _Loader(yaml.SafeLoader):
    """Composes nodes, and notes the keys that a mapping has twice.

    Scalars are what they are to kubectl (go-yaml 2): dates are text, and 1e3 is a number.

    ``repeated`` has those of one document by the mapping's ``id``: the key, its first line, and the
    line of another.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own
    bool_values = {**yaml.SafeLoader.bool_values, "y": True, "n": False}  # noqa: RUF012

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.repeated: dict[int, list[tuple[str, int, int]]] = {}

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, and compare its own keys, before others are merged into it."""
        node = super().compose_mapping_node(anchor)
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                before = first.setdefault(key.value, key)
                if before is not key:
                    lines = before.start_mark.line + 1, key.start_mark.line + 1
                    self.repeated.setdefault(id(node), []).append((key.value, *lines))
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float | str:
        """Return the number; text for what only begins as one, such as 1.7.0."""
        text = str(self.construct_scalar(node))
        plain = text.replace("_", "").lower()
        if plain.endswith(("inf", "nan")):
            problem = "a number must be finite"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            whole = int(re.sub(r"^([-+]?)0(?=\d)", r"\g<1>0o", plain), 0)
            if -(1 << 63) <= whole < 1 << 64:
                return whole
        except ValueError:
            pass  # 08 is no octal number, and a decimal one
        number = float(plain) if _DECIMAL.fullmatch(plain) else math.inf
        if not math.isfinite(number):
            return text
        return int(number) if number.is_integer() and abs(number) < _LEAST_EXPONENT else number


_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"[yYnN]|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF|true|True|TRUE|false|False|FALSE",
     "yYnNoOtTfF"),
    ("merge", "<<", "<"),
    ("number", r"[-+]?\.?[0-9][\w.+-]*|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
)  # fmt: skip
"""Tags of scalars without quotes: what they look like, and the characters that they begin with."""
for _tag, _pattern, _first in _SCALARS:
    _whole = re.compile(rf"(?:{_pattern})\Z", re.ASCII)
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _whole, _first)
_Loader.add_constructor("tag:yaml.org,2002:number", _Loader.construct_number)


def _documents(file: str, data: bytes) -> Iterator[Document]:
    loader, number = _Loader(data), 0
    while loader.check_node() and (node := loader.get_node()) is not None:
        number += 1
        if _characters(node, {}) > MAX_EXPANDED:
            raise UserError(
                f"the aliases (*name) in document {number} of {file} stand for more than "
                f"{MAX_EXPANDED >> 20} MiB; write fewer of them",
                Exit.MANIFEST,
            )
        body = loader.construct_document(node)
        if _is_list(body) and (twice := loader.repeated.get(id(node))):
            raise yaml.YAMLError(f"line {twice[0][2]}: {twice[0][0]} is given twice in one List")
        for part, one in _objects(node, body):
            yield Document(file, number, one, part, _repeated(part, loader.repeated))
        loader.repeated.clear()


def _characters(node: yaml.Node, known: dict[int, int]) -> int:
    """Count what a node stands for if each alias were written out: characters, and 1 a node.

    Raises:
        YAMLError: a node holds itself.
    """
    if id(node) not in known:
        known[id(node)] = -1
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        text = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        known[id(node)] = 1 + text + sum(_characters(child, known) for child in children)
    if known[id(node)] < 0:
        line = node.start_mark.line + 1
        raise yaml.YAMLError(f"line {line}: an alias stands inside of what it stands for")
    return known[id(node)]


def _repeated(
    node: yaml.Node, repeated: dict[int, list[tuple[str, int, int]]]
) -> tuple[FieldError, ...]:
    """Return the repeated keys of an object, each once."""
    seen: set[int] = set()

    def look(node: yaml.Node, path: str) -> Iterator[FieldError]:
        if id(node) in seen:
            return
        seen.add(id(node))
        dot = f"{path}." if path else ""
        for key, first, line in repeated.get(id(node), ()):
            message = f"is given twice in one mapping, on lines {first} and {line}"
            yield FieldError(f"{dot}{key}", "", Rule.DUPLICATE, message, "Keep one of them.")
        if isinstance(node, yaml.SequenceNode):
            for place, item in enumerate(node.value):
                yield from look(item, f"{path}[{place}]")
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                yield from look(value, f"{dot}{key.value}")

    return tuple(look(node, "")) if repeated else ()


def _objects(node: yaml.Node, body: Any) -> Iterator[tuple[yaml.Node, Any]]:
    """Yield a document; of a List, as kubectl prints it, each of its items."""
    if _is_list(body):
        [*_, items] = [value.value for key, value in node.value if key.value == "items"]
        yield from zip(items, body["items"], strict=True)
    elif body is not None:
        yield node, body


def _is_list(body: Any) -> bool:
    is_named = isinstance(body, dict) and str(body.get("kind")).endswith("List")
    return is_named and isinstance(body.get("items"), list)


def _raise(error: OSError) -> None:
    raise error


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _first_problem(error: Exception, data: bytes) -> str:
    if isinstance(error, yaml.reader.ReaderError):  # its position counts bytes, or characters
        is_text = error.encoding == "unicode"
        before = data.decode(errors="replace")[: error.position] if is_text else ""
        line = (before.count("\n") if is_text else data.count(b"\n", 0, error.position)) + 1
        hint = "" if is_text else "; save it as UTF-8"
        return f"line {line}: {str(error).splitlines()[0]}{hint}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    if not isinstance(error, yaml.YAMLError | UnicodeDecodeError | RecursionError):
        said = f"a date, a number or a tag has a value that does not exist ({error})"
        return f"{said}; write text in quotes"
    return str(error).splitlines()[0]
