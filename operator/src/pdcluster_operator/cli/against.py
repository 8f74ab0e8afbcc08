"""``pdcluster plan FILE --against``: the steps of the operator for a cluster that runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from pdcluster_operator.adapters.api_server.children import KubeApi
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.cluster_reader import (
    dry_apply,
    lacks_a_right,
    observe,
    read_cluster,
    reader,
)
from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER, slim
from pdcluster_operator.adapters.connector_bundle import BuiltConnector, BundleError
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.cli.connection import Where, connected
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.lint import print_findings
from pdcluster_operator.cli.lint import read_cluster as read_file
from pdcluster_operator.plan.forecast.course import Course, Round, forecast, with_rewrites
from pdcluster_operator.plan.types import Apply, Delete, RestartPod, Step, TryOut
from pdcluster_operator.runtime.interfaces import ApiError, Key


def show_plan_against(file: str, where: Where) -> Exit:
    """Print the steps that would follow if a file were applied now; write nothing."""
    document = read_file(file)
    console = Console(highlight=False, soft_wrap=True)
    _, findings = check_manifest(document)
    if not findings.ok:
        print_findings(console, file, findings)
        return Exit.MANIFEST
    try:
        connector = BuiltConnector().bundle()
    except BundleError as error:
        raise UserError(str(error), Exit.MACHINE) from error
    metadata = document["metadata"]
    namespace = where.namespace or metadata.get("namespace") or where.namespace_or_default()
    document = {**document, "metadata": {**metadata, "namespace": namespace}}
    key = Key(namespace, str(metadata["name"]))

    async def show(client: KubeClient) -> Exit:
        live = await read_cluster(client, key)
        try:
            wanted = await dry_apply(client, document, live)
        except ApiError as error:
            console.print(Text(f"the API server refuses {file}: {error}", "red"))
            return Exit.REQUEST_FAILED if lacks_a_right(error) else Exit.MANIFEST
        now = time.time()
        seen = await observe(client, key, live or wanted, connector)
        seen, left = with_rewrites(seen, now) if live else (seen, ())
        course = forecast(replace(seen, cluster=slim(wanted, PDCLUSTER)), now)
        console.print(Text(f"PDCluster {namespace}/{key.name}, after {file} is applied:"))
        if left:
            console.print(
                Text(
                    f"  The operator still has {len(left)} steps to take for the spec as it is. "
                    "They are among the steps below.",
                    "yellow",
                )
            )
        _show_course(console, course)
        return await _ask(console, reader(client), course)

    return connected(where, show)


def _show_course(console: Console, course: Course) -> None:
    for one in course.replaced:
        names = ", ".join(name.stateful_set for name in one.engines)
        fields = ", ".join(one.fields) or "the spec"
        console.print(Text(f"  replaces {names}: {fields} changed"))
    if not course.replaced:
        console.print("  replaces no engine")
    number = 0
    for turn in course.rounds:
        number = _show_round(console, turn, number)
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


def _show_round(console: Console, turn: Round, number: int) -> int:
    """Print the steps of a round; return the number of the last step."""
    if turn.after:
        console.print(Text(f"when {turn.after}:", "dim"))
    for step in turn.steps:
        number += 1
        verb, kind, name = in_words(step)
        line = Text(f"{number:3}. {verb} {kind} ")
        console.print(line.append(name, "bold").append(f"  {step.why}", "dim"))
    return number


def in_words(step: Step) -> tuple[str, str, str]:
    """Return the verb, kind and name of a step."""
    if isinstance(step, Delete):
        return "delete", step.kind, step.name
    if isinstance(step, RestartPod):
        return "delete", "Pod", step.name
    manifest: Mapping[str, Any] = step.stored if isinstance(step, TryOut) else step.manifest
    verb = {Apply: "apply", TryOut: "try, then apply"}.get(type(step), "write")
    return verb, str(manifest["kind"]), str(manifest["metadata"]["name"])


async def _ask(console: Console, api: KubeApi, course: Course) -> Exit:
    """Let the API server judge the new pods; return how the command ends."""
    trials = [step for one in course.rounds for step in one.steps if isinstance(step, TryOut)]
    for trial in trials:
        kinds = " and ".join(manifest["kind"] for manifest in trial.manifests)
        about = f"{kinds} of {trial.stored['metadata']['name']}"
        try:
            await api.try_out(trial)
        except ApiError as error:
            if lacks_a_right(error):
                why = f"not asked about {about}: this account may not create them"
                console.print(Text(f"API server: {why}", "yellow"))
                continue
            console.print(Text(f"API server: {error}", "red"))
            return Exit.MANIFEST
        console.print(Text(f"API server: would take {about} (dry run)"))
    return Exit.DONE if course.complete else Exit.NOT_READY
