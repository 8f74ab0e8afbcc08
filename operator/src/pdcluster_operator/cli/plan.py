"""``pdcluster plan``: prints the steps of the operator's own planner, and performs none."""

import time
from collections.abc import Mapping
from typing import Any

import click
import yaml
from rich.console import Console
from rich.text import Text

from pdcluster_operator.adapters.connector_bundle import BundleError, build_connector
from pdcluster_operator.api.conditions import ConditionType, find_condition
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.schema.crd import PlainDumper
from pdcluster_operator.cli import exits, lint, manifests
from pdcluster_operator.cli.commands import Command, namespace_option
from pdcluster_operator.plan import types
from pdcluster_operator.plan.planner import make_plan

PLACEHOLDER_UID = "00000000-0000-0000-0000-000000000000"
DETAILS = """\
FILE is a manifest in YAML; - is standard input.

Without --against: the steps for a cluster of which nothing exists yet, without Kubernetes; with
-o yaml, the objects themselves.

With --against: what would follow if you applied FILE now. Nothing is written. It prints which
engines are replaced, and which field of the spec makes that necessary; every step of the operator,
in order, and what the operator waits for in between; the engines and GPUs at the peak; whether
requests fail meanwhile; and what the API server says to the new pods, by a dry run.

The steps come from the operator's own planner. The forecast assumes that everything goes well: new
pods find a node, all engines of a role become ready at once, and the operator has this command's
version. What the engines' launchers say is taken from the status. You need the rights to read the
PDCluster and its objects, and to change the PDCluster.

Exit codes with --against: 0 the change would be complete; 1 the manifest or the new pods are
refused; 3 the change would stop before it is complete; 4 the API server refuses the questions.
"""


@click.command(cls=Command, help=DETAILS)
@click.argument("file", metavar="FILE")
@click.option(
    "-o",
    "--output",
    type=click.Choice(("steps", "yaml")),
    default="steps",
    help="yaml: the objects, without the Secrets that the operator fills (not with --against)",
)
@click.option(
    "--against",
    is_flag=False,
    flag_value="",
    metavar="[CONTEXT]",
    help="plan the change of the PDCluster that runs there; default: the current context",
)
@namespace_option
def plan(file: str, output: str, against: str | None, namespace: str | None) -> exits.Exit:
    """Print the steps for a new cluster, or for the one that runs."""
    if against is None:
        return show_plan(file, output)
    from pdcluster_operator.cli.against import show_plan_against

    return show_plan_against(file, against or None, namespace)


def show_plan(file: str, output: str) -> exits.Exit:
    """Print the operator's steps for a cluster of which nothing exists yet."""
    console = Console(highlight=False, soft_wrap=True)
    document = read_accepted(console, file)
    if document is None:
        return exits.Exit.MANIFEST
    metadata = {"namespace": "default", "generation": 1, **document["metadata"]}
    cluster = {**document, "metadata": {**metadata, "uid": PLACEHOLDER_UID}}
    made = make_plan(types.Observed(cluster, (), (), {}, {}, shipped_connector()), time.time())
    if output == "yaml":
        applied = [step for step in made.steps if isinstance(step, types.Apply | types.TryOut)]
        manifests = [_shortened(step.manifest) for step in applied]
        text = yaml.dump_all(manifests, Dumper=PlainDumper, sort_keys=False, width=100)
        console.print(text, markup=False)
        return exits.Exit.DONE
    for number, step in enumerate(made.steps, 1):
        show_step(console, number, step)
    accepted = find_condition(made.status, ConditionType.ACCEPTED)
    text = f"{accepted.get('status')} {accepted.get('reason')} {accepted.get('message', '')}"
    console.print(Text(f"Accepted: {text}".rstrip(), style="dim"))
    return exits.Exit.DONE


def read_accepted(console: Console, file: str) -> dict[str, Any] | None:
    """Return the PDCluster of a file. If it has errors, print all findings, and return None."""
    document: dict[str, Any] = manifests.read_cluster(file)
    _, findings = check_manifest(document)
    if findings.ok:
        return document
    lint.print_findings(console, file, findings)
    return None


def shipped_connector() -> types.ConnectorBundle:
    """Return the connector that is installed beside this command."""
    try:
        return build_connector()
    except BundleError as error:
        raise exits.UserError(str(error), exits.Exit.MACHINE) from error


def show_step(console: Console, number: int, step: types.Step) -> None:
    """Print one line: the step's number, what it does to which object, and why."""
    verb, kind, name = in_words(step)
    line = Text(f"{number:3}. {verb} {kind} ")
    console.print(line.append(name, "bold").append(f"  {step.why}", "dim"))


def in_words(step: types.Step) -> tuple[str, str, str]:
    """Return the verb, kind and name of a step."""
    if isinstance(step, types.Delete):
        return "delete", step.kind, step.name
    trial = "try" if isinstance(step, types.TryOut) and step.uid else "try, then apply"
    verb = {types.Apply: "apply", types.TryOut: trial}.get(type(step), "write")
    return verb, str(step.manifest["kind"]), str(step.manifest["metadata"]["name"])


def _shortened(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest for people: the connector's bytes as a note of their length."""
    binary = (manifest.get("binaryData") or {}).items()
    noted = {name: f"({len(data)} characters of base64)" for name, data in binary}
    return {**manifest, "binaryData": noted} if noted else dict(manifest)
