"""``pdcluster doctor``: whether a cluster, or this machine, has what PDClusters need."""

from typing import Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from pdcluster_connector.compat.findings import counted
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kubeconfig import namespace_of_context
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.cli import cluster_checks, cluster_facts, lint, manifests, output
from pdcluster_operator.cli.cluster_checks import Row, Verdict
from pdcluster_operator.cli.columns import Columns
from pdcluster_operator.cli.commands import Command, context_option, namespace_option
from pdcluster_operator.cli.connection import connected
from pdcluster_operator.cli.exits import Exit, UserError

STYLES = {
    Verdict.OK: "green",
    Verdict.WARNING: "yellow",
    Verdict.MISSING: "bold red",
    Verdict.UNKNOWN: "dim",
}
DETAILS = """\
Says what a cluster has for PDClusters, and what it lacks: versions, the operator and its webhook,
GPUs and RDMA devices, network policies, Pod Security, rights. With -f, also what a manifest needs.
It changes nothing.

With --machine, the same of this machine, for `pdcluster up`.

Exit codes: 0 nothing that is needed is missing; 1 the manifest of -f is wrong; 4 the API server
refuses to answer; 6 something is missing, or there is no kubeconfig.
"""
EXAMPLES = (
    ("pdcluster doctor", "the cluster of the current context"),
    ("pdcluster doctor -f cluster.yaml", "what this manifest needs of it"),
    ("pdcluster doctor --machine", "this machine, for pdcluster up"),
)


class Doctor(msgspec.Struct, frozen=True, rename="camel"):
    """What was looked at, and what was found.

    Attributes:
        about: ``Cluster`` or ``Machine``.
        missing: how many rows are missing.
    """

    about: str
    missing: int
    rows: tuple[Row, ...]


@click.command(cls=Command, help=DETAILS, document=Doctor, examples=EXAMPLES)
@click.option("-f", "--file", metavar="FILE", help="a manifest, whose needs are checked too")
@click.option("--machine", is_flag=True, help="look at this machine instead of a cluster")
@namespace_option
@context_option
def doctor(machine: bool, output: str, file: str | None, **where: Any) -> Exit:
    """Print what is there and what is missing."""
    if machine and (where["namespace"] or where["context"]):
        raise click.UsageError("--machine looks at this machine; leave -n and --context out")
    document = manifests.read_cluster(file) if file else None
    cluster = _accepted(file, document) if file else None
    if machine:
        from pdcluster_operator.cli import machine_checks

        return _show(output, "Machine", machine_checks.check_machine(document, cluster))

    async def look(client: KubeClient) -> Exit:
        named = where["namespace"] or (document or {}).get("metadata", {}).get("namespace")
        namespace = named or namespace_of_context(where["context"])
        wanted = cluster.spec.operator_class if cluster else None
        facts = await cluster_facts.gather(client, namespace, cluster, wanted)
        return _show(output, "Cluster", cluster_checks.check_cluster(facts, cluster))

    return connected(where["context"], look)


def _accepted(file: str, document: Any) -> Cluster:
    cluster, findings = check_manifest(document)
    if not findings.ok:
        lint.print_findings(output.console(stderr=True), file, findings)
        raise UserError(f"{file} has errors; correct them first", Exit.MANIFEST)
    return cluster


def _show(form: str, about: str, rows: list[Row]) -> Exit:
    missing = sum(row.verdict is Verdict.MISSING for row in rows)
    found = Doctor(about, missing, tuple(rows))
    output.show(form, found, lambda console: _print(console, found))
    return Exit.MACHINE if missing else Exit.DONE


def _print(console: Console, found: Doctor) -> None:
    table = Columns("CHECK", "VERDICT", "FOUND")
    for row in found.rows:
        table.add(row.check, Text(row.verdict, style=STYLES[row.verdict]), row.found)
    console.print(table, soft_wrap=True)
    for row in found.rows:
        if row.verdict is not Verdict.OK:
            console.print()
            console.print(Text.assemble((row.check, "bold"), f": {row.found}"))
            console.print(Text(f"  why: {row.why}"))
            if row.remedy:
                console.print(Text(f"  do:  {row.remedy}"))
    console.print()
    counts = [sum(row.verdict is verdict for row in found.rows) for verdict in Verdict]
    said = ", ".join(f"{count} {verdict}" for count, verdict in zip(counts, Verdict, strict=True))
    console.print(Text(f"{counted(len(found.rows), 'check')}: {said}", style="bold"))
