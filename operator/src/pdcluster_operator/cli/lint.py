"""``pdcluster lint``: the admission rules, offline, all findings at once.

Other commands use its functions that read manifests and print findings.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console
from rich.text import Text

from pdcluster_connector.compat.findings import counted
from pdcluster_operator.api.findings import FieldError, Findings
from pdcluster_operator.api.object_names import KIND
from pdcluster_operator.api.rules import engines, validate
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.cli.commands import Command
from pdcluster_operator.cli.exits import Exit, UserError

MAX_BYTES = 4 << 20
DETAILS = """\
Prints every error and warning with JSON path, value, rule and remedy. Each FILE is a manifest in
YAML; - is standard input.

Exits with 1 if there is an error; warnings alone exit with 0.
"""


@click.command(cls=Command, help=DETAILS)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def lint(files: tuple[str, ...]) -> Exit:
    """Check every PDCluster of every file; DONE when none has an error."""
    console = Console(highlight=False, soft_wrap=True)
    wrong = False
    for file in files:
        try:
            documents = read_documents(file)
        except UserError as error:
            console.print(Text(f"{error}", style="red"))
            wrong = True
            continue
        for number, document in enumerate(_clusters(documents) or documents[:1]):
            _, findings = validate.check_manifest(
                document, host_paths=None, mounted_certificates=None, pod_groups=None
            )
            if number:
                console.print()
            name = as_mapping(as_mapping(document).get("metadata")).get("name")
            named = f"{file} ({name})" if isinstance(name, str) else file
            print_findings(console, named, findings)
            wrong = wrong or not findings.ok
    return Exit.MANIFEST if wrong else Exit.DONE


def print_findings(console: Console, title: str, findings: Findings) -> None:
    """Print a headline and every finding: path and value, message, remedy."""
    kinds = ((findings.errors, "error", "red"), (findings.warnings, "warning", "yellow"))
    counts = ", ".join(counted(len(found), kind) for found, kind, _ in kinds if found)
    headline = Text(f"{title}: {counts or 'no errors'}", style="bold")
    console.print(headline, soft_wrap=True)
    for found, kind, style in kinds:
        for finding in found:
            _print(console, kind, style, finding)
    if open_questions := engines.unchecked_message(findings.unchecked):
        console.print(Text(f"  {open_questions}", style="dim"), soft_wrap=True)


def _print(console: Console, kind: str, style: str, finding: FieldError) -> None:
    value = f" = {finding.value}" if finding.value else ""
    lines = [
        Text(f"  {kind:8}", style=style).append(f"{finding.path}{value}", style="bold not dim"),
        Text(f"          {finding.message} [{finding.rule}]"),
    ]
    if finding.remedy:
        lines.append(Text(f"          {finding.remedy}", style="dim"))
    for line in lines:
        console.print(line, soft_wrap=True)


def _clusters(documents: Iterable[Any]) -> list[Any]:
    """Return the PDClusters among the documents of a file."""
    return [one for one in documents if isinstance(one, dict) and one.get("kind") == KIND]


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
    clusters = _clusters(documents)
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
