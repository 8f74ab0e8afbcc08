"""``pdcluster lint``: the admission rules, offline, all findings at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from pdcluster_operator.api.findings import FieldError, Findings
from pdcluster_operator.api.labels import KIND
from pdcluster_operator.api.rules.engines import unchecked_message
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.manifest import read_documents


def lint(files: Sequence[str]) -> Exit:
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
        for number, document in enumerate(_clusters(documents)):
            _, findings = check_manifest(
                document, host_paths=None, mounted_certificates=None, pod_groups=None
            )
            if number:
                console.print()
            print_findings(console, f"{file}{_named(document)}", findings)
            wrong = wrong or not findings.ok
    return Exit.MANIFEST if wrong else Exit.DONE


def print_findings(console: Console, title: str, findings: Findings) -> None:
    """Print a headline and every finding: path and value, what is wrong, the remedy."""
    counts = [_count(findings.errors, "error"), _count(findings.warnings, "warning")]
    headline = Text(f"{title}: {', '.join(filter(None, counts)) or 'no errors'}", style="bold")
    console.print(headline, soft_wrap=True)
    for finding in findings.errors:
        _print(console, "error", "red", finding)
    for finding in findings.warnings:
        _print(console, "warning", "yellow", finding)
    if open_questions := unchecked_message(findings.unchecked):
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


def _count(findings: Sequence[FieldError], name: str) -> str:
    return f"{len(findings)} {name}{'s' * (len(findings) != 1)}" if findings else ""


def _clusters(documents: Iterable[Any]) -> list[Any]:
    """Return the PDClusters of a file. If it has none, return its first document."""
    documents = list(documents)
    clusters = [
        document
        for document in documents
        if isinstance(document, dict) and document.get("kind") == KIND
    ]
    return clusters or documents[:1]


def _named(document: Any) -> str:
    metadata = document.get("metadata") if isinstance(document, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f" ({name})" if isinstance(name, str) else ""
