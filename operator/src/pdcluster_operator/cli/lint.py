"""``pdcluster lint``: the admission rules, offline, all findings at once.

Other commands use its functions that print findings.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from pdcluster_connector.compat.findings import counted
from pdcluster_operator.api.findings import FieldError, Findings
from pdcluster_operator.api.object_names import KIND, SCALER_KIND
from pdcluster_operator.api.rules import engines, validate
from pdcluster_operator.api.spec import model_config as configs
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.cli.commands import Command
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.manifests import Document, files_of, read_documents
from pdcluster_operator.cli.model_shape import json_of
from pdcluster_operator.cli.output import hanging, show

CONFIG_MAP = (
    "To have admission and the operator check this, too: kubectl create configmap NAME "
    "--from-file={}, and name it in model.configMapRef."
)
NAMED = 5
"""So many objects of other kinds are named in a line."""
DETAILS = """\
Prints every error and warning with file, line, JSON path, value, rule and remedy.

Each FILE is a manifest in YAML, a folder (its *.yaml and *.yml, and those below it), or - for
standard input. A file may hold several documents. PDClusters and PrefillScalers are checked.
Objects of other kinds are named and skipped, so the output of Helm and Kustomize can be checked.
The ConfigMap that a PDCluster's model.configMapRef names is read if it is among them.

Exits with 1 if there is an error, a file that cannot be read, or nothing to check; warnings alone
exit with 0.
"""
EXAMPLES = (
    ("pdcluster lint cluster.yaml", "every mistake of one manifest"),
    ("pdcluster lint clusters/ -o json", "all manifests of a folder, for a program"),
    ("kubectl kustomize overlays/team-a | pdcluster lint -", "what Kustomize renders"),
    ("helm template team-a ./chart | pdcluster lint -", "what Helm renders"),
    ("pdcluster lint cluster.yaml --model-config llama/", "with the rules that need the model"),
)


class Finding(msgspec.Struct, frozen=True, rename="camel"):
    """One mistake or warning.

    ``line``: of the field in the file, from 1. If the file lacks the field, the line is that of the
    nearest field around it.
    """

    file: str
    document: int
    line: int
    name: str
    severity: str
    path: str
    value: str
    rule: str
    message: str
    remedy: str


class Checked(msgspec.Struct, frozen=True, rename="camel"):
    """One PDCluster or PrefillScaler that was checked.

    ``unchecked`` says what only the engines of a PDCluster can check; ``model`` what moves, with
    the model's config.json.
    """

    file: str
    document: int
    name: str
    errors: int
    warnings: int
    unchecked: str
    model: str = ""


class Skipped(msgspec.Struct, frozen=True, rename="camel"):
    """One object of another kind."""

    file: str
    document: int
    kind: str
    name: str


class Lint(msgspec.Struct, frozen=True, rename="camel"):
    """What ``pdcluster lint`` found. ``problems`` say which files could not be read, and why."""

    ok: bool
    checked: list[Checked]
    findings: list[Finding]
    skipped: list[Skipped]
    problems: list[str]


@click.command(cls=Command, help=DETAILS, examples=EXAMPLES, document=Lint)
@click.argument("files", nargs=-1, required=True, type=click.Path(), metavar="FILE...")
@click.option(
    "--model-config",
    type=click.Path(),
    metavar="PATH",
    help="the model's config.json, or its folder: layers, heads and the context are checked too",
)
def lint(files: tuple[str, ...], model_config: str | None, output: str) -> Exit:
    """Check each PDCluster and PrefillScaler of every file; DONE when none has an error."""
    documents, problems = _read(files)
    config = read_config(model_config) if model_config else None
    clusters = [one for one in documents if not one.other_kind]
    maps = {one.identity: one.body for one in documents if one.other_kind == "ConfigMap"}
    checked = [
        (one, _check_scaler(one, clusters) if one.other_kind else check(one, config, maps))
        for one in documents
        if one.other_kind in ("", SCALER_KIND)
    ]
    used = {(one.namespace, configs.named_config_map(one.body)[0]) for one in clusters}
    skipped = [
        one
        for one in documents
        if one.other_kind not in ("", SCALER_KIND)
        and not (one.other_kind == "ConfigMap" and one.identity in used)
    ]
    if not checked and not problems:
        problems = [f"there is no {KIND} in {', '.join(files)}, so nothing was checked"]

    report = show_report(output, checked, skipped, problems)
    if config and output == "text" and not all(name for _, name in used):
        click.echo(CONFIG_MAP.format(model_config), err=True)
    return Exit.DONE if report.ok else Exit.MANIFEST


def show_report(
    output: str,
    checked: Sequence[tuple[Document, Findings]],
    skipped: Sequence[Document] = (),
    problems: Sequence[str] = (),
) -> Lint:
    """Print what was found, in the form that ``-o`` names."""

    def text(console: Console) -> None:
        for problem in problems:
            console.print(Text(problem, "red"))
        for number, (one, findings) in enumerate(checked):
            if number:
                console.print()
            print_findings(console, one, findings)
            if findings.model:
                hanging(console, "  ", Text(findings.model, "dim"))
        if skipped:
            console.print(Text(_skipped(skipped), "dim"))

    report = Lint(
        ok=not problems and all(findings.ok for _, findings in checked),
        checked=[_checked(one, findings) for one, findings in checked],
        findings=[
            _finding(one, severity, error)
            for one, findings in checked
            for severity, errors in (("Error", findings.errors), ("Warning", findings.warnings))
            for error in errors
        ],
        skipped=[Skipped(one.file, one.number, one.other_kind, one.name) for one in skipped],
        problems=list(problems),
    )
    show(output, report, text)
    return report


def read_config(path: str) -> dict[str, Any]:
    """Return what a config.json holds, or that of a model's folder; a UserError if it is none."""
    file = Path(path, "config.json") if os.path.isdir(path) else Path(path)
    try:
        found = json_of(file)
        configs.read_model(found)
    except configs.UnknownModel as error:
        raise UserError(str(error), Exit.USAGE) from error
    return found


def check(
    document: Document,
    config: Mapping[str, Any] | None = None,
    maps: Mapping[tuple[str, str], Any] | None = None,
) -> Findings:
    """Apply the rules of admission, without an operator to ask what it admits.

    Args:
        config: what the model's config.json holds; None if nobody has it.
        maps: the ConfigMaps beside the manifest, by namespace and name.
    """
    admits: dict[str, Any] = dict.fromkeys(("host_paths", "mounted_certificates", "pod_groups"))
    name, key = configs.named_config_map(document.body)
    beside = (maps or {}).get((document.namespace, name))
    found = configs.found_in(beside, key) if beside else None
    found = configs.FoundConfig(config) if config else found
    return judge(document, **admits, found=found)[1]


def _check_scaler(document: Document, clusters: Iterable[Document]) -> Findings:
    """Check a PrefillScaler; its name is that of a PDCluster of its namespace, if any is there."""
    names = {one.name for one in clusters if one.namespace == document.namespace and one.name}
    return _written(document, validate.check_scaler(document.body, names))


def judge(document: Document, **known: Any) -> tuple[Cluster, Findings]:
    """Apply the rules of admission, and that of YAML: each key once in a mapping.

    Args:
        known: what the operator and the API server admit; see ``check_manifest``.
    """
    cluster, findings = validate.check_manifest(document.body, **known)
    return cluster, _written(document, findings)


def _written(document: Document, findings: Findings) -> Findings:
    errors, warnings = (map(document.as_written, f) for f in (findings.errors, findings.warnings))
    return replace(findings, errors=(*document.repeated, *errors), warnings=tuple(warnings))


def print_findings(
    console: Console, document: Document, findings: Findings, where: str = ""
) -> None:
    """Print a headline and every finding: line, path and value, message, remedy."""
    kinds = ((findings.errors, "error", "red"), (findings.warnings, "warning", "yellow"))
    counts = ", ".join(counted(len(found), kind) for found, kind, _ in kinds if found)
    console.print(Text(f"{document.title}{where}: {counts or 'no errors'}", style="bold"))
    for found, kind, style in kinds:
        for finding in found:
            _print(console, kind, style, finding, located(document, finding))
    if open_questions := engines.unchecked_message(findings.unchecked):
        hanging(console, "  ", Text(open_questions, "dim"))


def located(document: Document, finding: FieldError) -> str:
    """Return ``file:line: `` of a finding; empty for what does not come from the file."""
    line = document.line(finding.path)
    return f"{document.file}:{line}: " if line else ""


def _print(console: Console, kind: str, style: str, finding: FieldError, where: str) -> None:
    value = f" = {finding.value}" if finding.value else ""
    hanging(console, Text(f"  {kind:8}", style), Text(f"{where}{finding.path}{value}", "bold"))
    hanging(console, " " * 10, Text(f"{finding.message} [{finding.rule}]"))
    if finding.remedy:
        hanging(console, " " * 10, Text(finding.remedy, "dim"))


def _read(paths: Iterable[str]) -> tuple[list[Document], list[str]]:
    """Return the objects of all files, and what could not be read."""
    documents: list[Document] = []
    problems: list[str] = []
    for path in paths:
        try:
            files = files_of(path)
        except UserError as error:
            problems.append(str(error))
            continue
        for file in files:
            try:
                documents += read_documents(file)
            except UserError as error:
                problems.append(str(error))
    return documents, problems


def _skipped(documents: Sequence[Document]) -> str:
    named = [f"{one.other_kind} {one.name}".strip() for one in documents]
    more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
    return (
        f"skipped {counted(len(named), 'object')} of other kinds: {', '.join(named[:NAMED])}{more}"
    )


def _checked(one: Document, findings: Findings) -> Checked:
    unchecked = engines.unchecked_message(findings.unchecked)
    counts = len(findings.errors), len(findings.warnings)
    return Checked(one.file, one.number, one.name, *counts, unchecked, findings.model)


def _finding(one: Document, severity: str, error: FieldError) -> Finding:
    what = (error.path, error.value, str(error.rule), error.message, error.remedy)
    return Finding(one.file, one.number, one.line(error.path), one.name, severity, *what)
