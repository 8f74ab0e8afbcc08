"""``pdcluster plan``: prints the steps of the operator's own planner, and performs none."""

import argparse
import time
from collections.abc import Mapping
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from pdcluster_operator.adapters.connector_bundle import BundleError, build_connector
from pdcluster_operator.api.conditions import ConditionType, find_condition
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.schema.crd import PlainDumper
from pdcluster_operator.cli import exits, lint
from pdcluster_operator.plan import types
from pdcluster_operator.plan.planner import make_plan

PLACEHOLDER_UID = "00000000-0000-0000-0000-000000000000"


def show_plan(options: argparse.Namespace) -> exits.Exit:
    """Print the operator's steps for a cluster of which nothing exists yet."""
    console = Console(highlight=False, soft_wrap=True)
    document = read_accepted(console, options.file)
    if document is None:
        return exits.Exit.MANIFEST
    metadata = {"namespace": "default", "generation": 1, **document["metadata"]}
    cluster = {**document, "metadata": {**metadata, "uid": PLACEHOLDER_UID}}
    plan = make_plan(types.Observed(cluster, (), (), {}, {}, shipped_connector()), time.time())
    if options.output == "yaml":
        applied = [step for step in plan.steps if isinstance(step, types.Apply | types.TryOut)]
        manifests = [_shortened(step.manifest) for step in applied]
        text = yaml.dump_all(manifests, Dumper=PlainDumper, sort_keys=False, width=100)
        console.print(text, markup=False)
        return exits.Exit.DONE
    for number, step in enumerate(plan.steps, 1):
        show_step(console, number, step)
    accepted = find_condition(plan.status, ConditionType.ACCEPTED)
    text = f"{accepted.get('status')} {accepted.get('reason')} {accepted.get('message', '')}"
    console.print(Text(f"Accepted: {text}".rstrip(), style="dim"))
    return exits.Exit.DONE


def read_accepted(console: Console, file: str) -> dict[str, Any] | None:
    """Return the PDCluster of a file. If it has errors, print all findings, and return None."""
    document: dict[str, Any] = lint.read_cluster(file)
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
