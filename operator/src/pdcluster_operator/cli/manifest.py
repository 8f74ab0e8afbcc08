"""Reading manifests from files, with errors that say where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from pdcluster_operator.api.labels import KIND
from pdcluster_operator.cli.exits import Exit, UserError

MAX_BYTES = 4 << 20


def read_documents(file: str) -> list[Any]:
    """All YAML documents of a file or of standard input, empty ones aside.

    Raises :class:`UserError` when it cannot be read or is no YAML.
    """
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if file == "-" else _read(Path(file))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}", Exit.MANIFEST) from error
    if len(data) > MAX_BYTES:
        raise UserError(f"{file} is larger than {MAX_BYTES >> 20} MiB", Exit.MANIFEST)
    try:
        documents = [document for document in yaml.safe_load_all(data) if document is not None]
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{file} is not YAML: {_first_problem(error)}", Exit.MANIFEST) from error
    if not documents:
        raise UserError(f"{file} is empty", Exit.MANIFEST)
    return documents


def read_cluster(file: str) -> Any:
    """Return the one PDCluster of a file; other kinds beside it are left out.

    Raises :class:`UserError` when there is none, or more than one.
    """
    documents = read_documents(file)
    if len(documents) == 1:
        return documents[0]
    clusters = [
        document
        for document in documents
        if isinstance(document, dict) and document.get("kind") == KIND
    ]
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


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _first_problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error).splitlines()[0]
