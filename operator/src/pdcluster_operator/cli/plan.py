"""``pdcluster plan``: prints the steps of the operator's own planner, and performs none.

With ``--against`` these are the steps for a cluster that runs.
"""

import argparse
import itertools
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from pdcluster_operator.adapters.api_server import cluster_reader, kube_api
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER, slim
from pdcluster_operator.adapters.api_server.kubeconfig import namespace_of_context
from pdcluster_operator.adapters.connector_bundle import BundleError, build_connector
from pdcluster_operator.api.conditions import ConditionType, find_condition
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.schema.crd import PlainDumper
from pdcluster_operator.cli import lint
from pdcluster_operator.cli.connection import connected
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.plan import types
from pdcluster_operator.plan.forecast.course import Course, forecast, with_rewrites
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.runtime.interfaces import ApiError, Key

PLACEHOLDER_UID = "00000000-0000-0000-0000-000000000000"
LONGEST_BINARY = 64


def show_plan(options: argparse.Namespace) -> Exit:
    """Print the operator's steps for a cluster of which nothing exists yet."""
    console = Console(highlight=False, soft_wrap=True)
    document = read_accepted(console, options.file)
    if document is None:
        return Exit.MANIFEST
    metadata = {"namespace": "default", "generation": 1, **document["metadata"]}
    cluster = {**document, "metadata": {**metadata, "uid": PLACEHOLDER_UID}}
    plan = make_plan(types.Observed(cluster, (), (), {}, {}, shipped_connector()), time.time())
    if options.output == "yaml":
        applied = [step for step in plan.steps if isinstance(step, types.Apply | types.TryOut)]
        manifests = [_shortened(step.manifest) for step in applied]
        text = yaml.dump_all(manifests, Dumper=PlainDumper, sort_keys=False, width=100)
        console.print(text, markup=False)
        return Exit.DONE
    for number, step in enumerate(plan.steps, 1):
        if isinstance(step, types.Apply | types.TryOut | types.WriteTicketKey):
            show_step(console, number, step)
    accepted = find_condition(plan.status, ConditionType.ACCEPTED)
    text = f"{accepted.get('status')} {accepted.get('reason')} {accepted.get('message', '')}"
    console.print(Text(f"Accepted: {text}".rstrip(), style="dim"))
    return Exit.DONE


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
        raise UserError(str(error), Exit.MACHINE) from error


def show_step(console: Console, number: int, step: types.Step) -> None:
    """Print one line: the step's number, what it does to which object, and why."""
    verb, kind, name = in_words(step)
    line = Text(f"{number:3}. {verb} {kind} ")
    console.print(line.append(name, "bold").append(f"  {step.why}", "dim"))


def in_words(step: types.Step) -> tuple[str, str, str]:
    """Return the verb, kind and name of a step."""
    if isinstance(step, types.Delete):
        return "delete", step.kind, step.name
    verb = {types.Apply: "apply", types.TryOut: "try, then apply"}.get(type(step), "write")
    return verb, str(step.manifest["kind"]), str(step.manifest["metadata"]["name"])


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


def show_plan_against(options: argparse.Namespace) -> Exit:
    """Print the steps that would follow if a file were applied now; write nothing."""
    console = Console(highlight=False, soft_wrap=True)
    manifest = read_accepted(console, options.file)
    if manifest is None:
        return Exit.MANIFEST
    context, connector = options.against or None, shipped_connector()
    metadata = manifest["metadata"]
    namespace = options.namespace or metadata.get("namespace") or namespace_of_context(context)
    document = {**manifest, "metadata": {**metadata, "namespace": namespace}}
    key = Key(namespace, str(metadata["name"]))

    async def show(client: KubeClient) -> Exit:
        live = await cluster_reader.read_cluster(client, key)
        try:
            wanted = await cluster_reader.dry_apply(client, document, live)
        except ApiError as error:
            console.print(Text(f"the API server refuses {options.file}: {error}", "red"))
            return Exit.REQUEST_FAILED if cluster_reader.lacks_a_right(error) else Exit.MANIFEST
        now = time.time()
        seen = await cluster_reader.observe(client, key, live or wanted, connector)
        seen, left = with_rewrites(seen, now) if live else (seen, ())
        course = forecast(replace(seen, cluster=slim(wanted, PDCLUSTER)), now)
        console.print(Text(f"PDCluster {namespace}/{key.name}, after {options.file} is applied:"))
        if left:
            console.print(
                Text(
                    f"  The operator still has {len(left)} steps to take for the spec as it is. "
                    "They are among the steps below.",
                    "yellow",
                )
            )
        _show_course(console, course)
        return await _ask(console, cluster_reader.reader(client), course)

    return connected(context, show)


def _show_course(console: Console, course: Course) -> None:
    for one in course.replaced:
        names = ", ".join(name.stateful_set for name in one.engines)
        fields = ", ".join(one.fields) or "the spec"
        console.print(Text(f"  replaces {names}: {fields} changed"))
    if not course.replaced:
        console.print("  replaces no engine")
    numbers = itertools.count(1)
    for turn in course.rounds:
        if turn.after:
            console.print(Text(f"when {turn.after}:", "dim"))
        for step in turn.steps:
            show_step(console, next(numbers), step)
    if not course.rounds:
        console.print("  nothing is left to do")
    before, peak = course.engines
    console.print(Text(f"engines: {before} now, {peak} at the peak"))
    before, peak = course.gpus
    console.print(Text(f"GPUs: {before} now, {peak} at the peak"))
    if course.interrupted:
        console.print(Text("service: interrupted; for a while no request is served", "yellow"))
    elif course.served:
        console.print("service: a verified pair serves all the time")
    console.print(Text(f"the end: {course.end}", "" if course.complete else "yellow"))


async def _ask(console: Console, api: kube_api.KubeApi, course: Course) -> Exit:
    """Let the API server judge the new pods; return how the command ends."""
    trials = [step for one in course.rounds for step in one.steps if isinstance(step, types.TryOut)]
    for trial in trials:
        kinds = " and ".join(manifest["kind"] for manifest in trial.tried)
        about = f"{kinds} of {trial.manifest['metadata']['name']}"
        try:
            await api.try_out(trial)
        except ApiError as error:
            if cluster_reader.lacks_a_right(error):
                why = f"not asked about {about}: this account may not create them"
                console.print(Text(f"API server: {why}", "yellow"))
                continue
            console.print(Text(f"API server: {error}", "red"))
            return Exit.MANIFEST
        console.print(Text(f"API server: would take {about} (dry run)"))
    return Exit.DONE if course.complete else Exit.NOT_READY
