"""``pdcluster plan``: prints the steps of the operator's own planner, and performs none."""

import time
from collections.abc import Mapping
from typing import Any

import click
import yaml

from pdcluster_operator.adapters.connector_bundle import BundleError, build_connector
from pdcluster_operator.api.conditions import ConditionType, find_condition
from pdcluster_operator.api.schema.crd import PlainDumper
from pdcluster_operator.cli import exits, lint, manifests, output as outputs
from pdcluster_operator.cli.commands import Command, namespace_option
from pdcluster_operator.cli.plan_view import Plan, plan_of, print_plan
from pdcluster_operator.plan import types
from pdcluster_operator.plan.forecast.course import forecast
from pdcluster_operator.plan.planner import make_plan

PLACEHOLDER_UID = "00000000-0000-0000-0000-000000000000"
DETAILS = """\
FILE is a manifest in YAML; - is standard input.

Without --against: the steps for a cluster of which nothing exists yet, without Kubernetes; with
-o yaml, the objects themselves. It ends with the GPUs that the engines hold now, at the peak and
after.

With --against: what would follow if you applied FILE now. Nothing is written. It prints which
engines are replaced, and which field of the spec makes that necessary; every step of the operator,
in order, and what the operator waits for in between; the engines and GPUs now, at the peak and
after; whether requests fail meanwhile; and what the API server says to the new pods, by a dry run.

The steps come from the operator's own planner. The forecast assumes that everything goes well: new
pods find a node, all engines of a role become ready at once, and the operator has this command's
version. What the engines' launchers say is taken from the status. You need the rights to read the
PDCluster and its objects, and to change the PDCluster.

If the manifest has errors, -o json prints a document of kind Lint.

Exit codes with --against: 0 the change would be complete; 1 the manifest or the new pods are
refused; 3 the change would stop before it is complete; 4 the API server refuses the questions.
"""


@click.command(cls=Command, help=DETAILS, document=Plan)
@click.argument("file", type=click.Path(), metavar="FILE")
@click.option(
    "-o",
    "--output",
    type=click.Choice(("text", "steps", "json", "yaml")),
    default="text",
    help="json: one document of kind Plan; yaml: the objects, without the Secrets that the "
    "operator fills (not with --against); steps: the same as text, which is the default",
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
    output = "text" if output == "steps" else output
    if against is None:
        return show_plan(file, output)
    if output == "yaml":
        raise click.UsageError("-o yaml prints the objects of a new cluster; use -o json instead")
    from pdcluster_operator.cli.against import show_plan_against

    return show_plan_against(file, against or None, namespace, output)


def show_plan(file: str, output: str) -> exits.Exit:
    """Print the operator's steps for a cluster of which nothing exists yet."""
    document = read_accepted(file, output)
    if document is None:
        return exits.Exit.MANIFEST
    metadata = {"namespace": "default", "generation": 1, **document["metadata"]}
    cluster = {**document, "metadata": {**metadata, "uid": PLACEHOLDER_UID}}
    observed, now = types.Observed(cluster, (), (), {}, {}, shipped_connector()), time.time()
    made = make_plan(observed, now)
    if output == "yaml":
        applied = [step for step in made.steps if isinstance(step, types.Apply | types.TryOut)]
        objects = [_shortened(step.manifest) for step in applied]
        print(yaml.dump_all(objects, Dumper=PlainDumper, sort_keys=False, width=100))
        return exits.Exit.DONE
    accepted = find_condition(made.status, ConditionType.ACCEPTED)
    said = f"{accepted.get('status')} {accepted.get('reason')} {accepted.get('message', '')}"
    named = metadata["namespace"], metadata["name"]
    found = plan_of(named, forecast(observed, now), said.rstrip())
    outputs.show(output, found, lambda console: print_plan(console, found))
    return exits.Exit.DONE


def read_accepted(file: str, output: str) -> dict[str, Any] | None:
    """Return the PDCluster of a file. If it has errors, print all findings, and return None."""
    document = manifests.read_cluster(file)
    findings = lint.check(document)
    if findings.ok:
        body: dict[str, Any] = document.body
        return body
    lint.show_report(output, [(document, findings)])
    return None


def shipped_connector() -> types.ConnectorBundle:
    """Return the connector that is installed beside this command."""
    try:
        return build_connector()
    except BundleError as error:
        raise exits.UserError(str(error), exits.Exit.MACHINE) from error


def _shortened(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest for people: the connector's bytes as a note of their length."""
    binary = (manifest.get("binaryData") or {}).items()
    noted = {name: f"({len(data)} characters of base64)" for name, data in binary}
    return {**manifest, "binaryData": noted} if noted else dict(manifest)
