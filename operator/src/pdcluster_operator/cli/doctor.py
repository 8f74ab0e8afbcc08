"""``pdcluster doctor``: whether a cluster, or this machine, has what PDClusters need."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from pdcluster_connector.compat.findings import counted
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kubeconfig import namespace_of_context
from pdcluster_operator.api.spec.resources import GPU_RESOURCE
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.cli import (
    cluster_checks,
    cluster_facts,
    fabric_probe,
    lint,
    manifests,
    output,
)
from pdcluster_operator.cli.cluster_checks import Row, Verdict
from pdcluster_operator.cli.columns import Columns
from pdcluster_operator.cli.commands import (
    Command,
    context_option,
    duration,
    in_context,
    namespace_option,
)
from pdcluster_operator.cli.connection import connected
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.fabric_probe import Probe
from pdcluster_operator.cli.plan import shipped_connector
from pdcluster_operator.plan.types import ConnectorBundle
from pdcluster_operator.runtime.interfaces import Key

STYLES = {
    Verdict.OK: "green",
    Verdict.WARNING: "yellow",
    Verdict.MISSING: "bold red",
    Verdict.UNKNOWN: "dim",
}
NEEDED = {"Kubernetes", "CRD", "operator"}
"""Checks of what every PDCluster needs."""
COMMAND = re.compile(r"\b(?:kubectl|helm) .+$")
DETAILS = """\
Says what a cluster has for PDClusters, and what it lacks: versions, the operator and its webhook,
GPUs and RDMA devices, network policies, Pod Security, rights. With -f, also what a manifest needs.
It changes nothing.

With --probe, two Jobs in the namespace move bytes over NIXL, on two nodes if there are two. It says
how fast and over which transport, and removes them. With -f, their pods get the manifest's RDMA
devices and variables. They need the rights to create Jobs and ConfigMaps, and one GPU each if the
nodes have GPUs.

With --machine, the same of this machine, for `pdcluster up`. With -f, --model-dir is that of `up`.

Exit codes: 0 nothing that is needed is missing; 1 the manifest of -f is wrong; 4 the API server
does not say whether Kubernetes, the CRD or the operator is as it must be; 6 something is missing,
or there is no kubeconfig.
"""
EXAMPLES = (
    ("pdcluster doctor", "the cluster of the current context"),
    ("pdcluster doctor -f cluster.yaml", "what this manifest needs of it"),
    ("pdcluster doctor -f cluster.yaml --probe", "also move bytes between two pods, as engines do"),
    ("pdcluster doctor --machine", "this machine, for pdcluster up"),
)


class Doctor(msgspec.Struct, frozen=True, rename="camel"):
    """What was looked at, and what was found.

    Attributes:
        about: ``Cluster`` or ``Machine``.
        missing: how many rows are missing.
        probe: what ``--probe`` measured.
    """

    about: str
    missing: int
    rows: tuple[Row, ...]
    probe: Probe | None = None


@click.command(cls=Command, help=DETAILS, document=Doctor, examples=EXAMPLES)
@click.option("-f", "--file", metavar="FILE", help="a manifest, whose needs are checked too")
@click.option("--machine", is_flag=True, help="look at this machine instead of a cluster")
@click.option(
    "--model-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="with --machine -f: the model in this folder, instead of the one that the manifest names",
)
@click.option("--probe", is_flag=True, help="also run two pods that move bytes over NIXL")
@click.option("--image", metavar="IMAGE", help="of these pods; default: that of the engines")
@click.option(
    "--timeout",
    type=duration,
    default="5m",
    metavar="DURATION",
    help="for these pods, with the pull of their image; default: 5m",
)
@namespace_option
@context_option
def doctor(
    machine: bool, output: str, file: str | None, model_dir: Path | None, probe: bool, **where: Any
) -> Exit:
    """Print what is there and what is missing."""
    if machine and (where["namespace"] or where["context"] or probe):
        raise click.UsageError("--machine has no cluster; leave -n, --context and --probe out")
    if model_dir is not None and not (machine and file):
        raise click.UsageError("--model-dir is for --machine with -f FILE")
    read = manifests.read_cluster(file) if file else None
    if read and model_dir is not None:
        from pdcluster_operator.cli.up import with_model

        read = replace(read, body=with_model(read.body, model_dir))
    document = read.body if read else None
    cluster = _accepted(read) if read else None
    if machine:
        from pdcluster_operator.cli import machine_checks

        rows = machine_checks.check_machine(document, cluster, from_flag=model_dir is not None)
        return _show(output, "Machine", rows)

    connector = shipped_connector() if probe else ConnectorBundle("", b"")
    named = where["namespace"] or (document or {}).get("metadata", {}).get("namespace")
    namespace = named or namespace_of_context(where["context"])

    async def look(client: KubeClient) -> Exit:
        wanted = cluster.spec.operator_class if cluster else None
        facts = await cluster_facts.gather(client, namespace, cluster, wanted)
        rows, measured = cluster_checks.check_cluster(facts, cluster), None
        if probe:
            gpus = any(node.allocatable.get(GPU_RESOURCE) for node in facts.usable_nodes)
            image, seconds = where["image"], where["timeout"]
            order = fabric_probe.order(namespace, cluster, image, gpus, seconds)
            try:
                measured = await fabric_probe.run(client, order, connector, _say)
                rows.append(fabric_probe.row_of(measured, cluster))
            except fabric_probe.ProbeError as error:
                rows.append(fabric_probe.failed_row(error))
        return _show(output, "Cluster", [_there(row, where["context"]) for row in rows], measured)

    key = Key(namespace, cluster.name if cluster else "NAME")
    return connected(where["context"], key, look)


def _there(row: Row, context: str | None) -> Row:
    """Lead the command at the end of a remedy to the same cluster."""
    remedy = COMMAND.sub(lambda found: in_context(found[0], context), row.remedy)
    return msgspec.structs.replace(row, remedy=remedy)


def _accepted(document: manifests.Document) -> Cluster:
    cluster, findings = lint.judge(document)
    if not findings.ok:
        lint.print_findings(output.console(stderr=True), document, findings)
        raise UserError(f"{document.file} has errors; correct them first", Exit.MANIFEST)
    return cluster


def _say(line: str) -> None:
    click.echo(output.plain(f"probe: {line}"), err=True)


def _show(form: str, about: str, rows: list[Row], probe: Probe | None = None) -> Exit:
    missing = sum(row.verdict is Verdict.MISSING for row in rows)
    found = Doctor(about, missing, tuple(rows), probe)
    output.show(form, found, lambda console: _print(console, found))
    unknown = {row.check for row in rows if row.verdict is Verdict.UNKNOWN}
    asked = Exit.REQUEST_FAILED if unknown & NEEDED else Exit.DONE
    return Exit.MACHINE if missing else asked


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
