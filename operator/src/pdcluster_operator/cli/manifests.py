"""Reads manifests: files, folders and standard input, with several documents in each.

What is read is bounded: ``MAX_BYTES`` a file, ``MAX_FILES`` a folder.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pdcluster_operator.api.object_names import GROUP, KIND, SCALER_KIND
from pdcluster_operator.cli.exits import Exit, UserError

MAX_BYTES = 4 << 20
MAX_FILES = 10_000
ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Document:
    """One object of a file.

    Attributes:
        number: of the YAML document in its file, from 1. The objects of a List share one.
    """

    file: str
    number: int
    body: Any

    @property
    def name(self) -> str:
        """``metadata.name``, if it is text."""
        metadata = self.body.get("metadata") if isinstance(self.body, dict) else None
        name = metadata.get("name") if isinstance(metadata, dict) else None
        return name if isinstance(name, str) else ""

    @property
    def other_kind(self) -> str:
        """The kind of an object that is no PDCluster; empty for one that is, or should be."""
        body = self.body if isinstance(self.body, dict) else {}
        kind, group = body.get("kind"), str(body.get("apiVersion")).partition("/")[0]
        # A misspelt kind of our group is a mistake, and no object of somebody else.
        known = group != GROUP or kind == SCALER_KIND
        return kind if isinstance(kind, str) and kind != KIND and known else ""


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
            found += (str(Path(folder, name)) for name in sorted(names) if name.endswith(ENDINGS))
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
        bodies = list(yaml.safe_load_all(data))
    except Exception as error:  # `2026-02-30` raises ValueError, `!!bool x` KeyError, and so on
        hint = "; render templates first, and lint what comes out" if b"{{" in data else ""
        said = f"{file} is not YAML: {_first_problem(error)}{hint}"
        raise UserError(said, Exit.MANIFEST) from error
    documents = [
        Document(file, number, one)
        for number, body in enumerate(bodies, 1)
        for one in _objects(body)
    ]
    if not documents:
        raise UserError(f"{file} is empty", Exit.MANIFEST)
    return documents


def read_cluster(file: str) -> Any:
    """Return the one PDCluster of a file; other kinds beside it are left out.

    Raises:
        UserError: there is none, or more than one.
    """
    documents = read_documents(file)
    if len(documents) == 1:
        return documents[0].body
    clusters = [one.body for one in documents if not one.other_kind]
    if not clusters:
        raise UserError(
            f"none of the {len(documents)} objects in {file} is a {KIND}; add one, with "
            f"kind: {KIND}",
            Exit.MANIFEST,
        )
    if len(clusters) > 1:
        raise UserError(
            f"{file} holds {len(clusters)} objects of kind {KIND}; put one of them into a file of "
            "its own, and name that file",
            Exit.MANIFEST,
        )
    return clusters[0]


def _objects(body: Any) -> Iterator[Any]:
    """Yield a document; of a List, as kubectl prints it, each of its items."""
    if (
        isinstance(body, dict)
        and body.get("kind") == "List"
        and isinstance(body.get("items"), list)
    ):
        yield from body["items"]
    elif body is not None:
        yield body


def _raise(error: OSError) -> None:
    raise error


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _first_problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    if not isinstance(error, yaml.YAMLError | UnicodeDecodeError | RecursionError):
        said = f"a date, a number or a tag has a value that does not exist ({error})"
        return f"{said}; write text in quotes"
    return str(error).splitlines()[0]
