"""``pdcluster plan``: prints the steps of the operator's own planner, and performs none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from pdcluster_operator.adapters.connector_bundle import BuiltConnector, BundleError
from pdcluster_operator.api.conditions import ConditionType, find_condition
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.schema.crd import PlainDumper
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.lint import print_findings, read_cluster
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.types import Apply, Observed, Plan, WriteTicketKey

PLACEHOLDER_UID = "00000000-0000-0000-0000-000000000000"
LONGEST_BINARY = 64


def show_plan(file: str, output: str) -> Exit:
    """Print the operator's steps for a cluster of which nothing exists yet."""
    console = Console(highlight=False, soft_wrap=True)
    document = read_cluster(file)
    _, findings = check_manifest(document)
    if not findings.ok:
        print_findings(console, file, findings)
        return Exit.MANIFEST
    plan = plan_new(document)
    if output == "yaml":
        manifests = [_shortened(step.manifest) for step in plan.steps if isinstance(step, Apply)]
        text = yaml.dump_all(manifests, Dumper=PlainDumper, sort_keys=False, width=100)
        console.print(text, markup=False)
        return Exit.DONE
    for number, step in enumerate(plan.steps, 1):
        if isinstance(step, Apply | WriteTicketKey):
            verb = "apply" if isinstance(step, Apply) else "write"
            metadata = step.manifest["metadata"]
            line = Text(f"{number:3}. {verb} {step.manifest['kind']} ")
            console.print(
                line.append(metadata["name"], style="bold").append(f"  {step.why}", "dim")
            )
    accepted = find_condition(plan.status, ConditionType.ACCEPTED)
    console.print(
        Text(
            f"Accepted: {accepted.get('status')} {accepted.get('reason')} "
            f"{accepted.get('message', '')}".rstrip(),
            style="dim",
        )
    )
    return Exit.DONE


def plan_new(document: Mapping[str, Any]) -> Plan:
    """Return the plan for a cluster of which nothing exists yet."""
    try:
        connector = BuiltConnector().bundle()
    except BundleError as error:
        raise UserError(str(error), Exit.MACHINE) from error
    metadata = {
        "namespace": "default",
        "generation": 1,
        **document["metadata"],
        "uid": PLACEHOLDER_UID,
    }
    observed = Observed(
        cluster={**document, "metadata": metadata},
        children=(),
        pods=(),
        engines={},
        links={},
        connector=connector,
    )
    return make_plan(observed, time.time())


def _shortened(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest for people: the connector's bytes as a note of their length."""
    binary = manifest.get("binaryData")
    if not binary:
        return dict(manifest)
    noted = {
        name: f"({len(data)} characters of base64)" if len(data) > LONGEST_BINARY else data
        for name, data in binary.items()
    }
    return {**manifest, "binaryData": noted}
