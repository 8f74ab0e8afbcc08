"""``pdcluster plan FILE --against``: the steps of the operator for a cluster that runs."""

import itertools
import time
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from pdcluster_operator.adapters.api_server import cluster_reader, kube_api
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER, slim
from pdcluster_operator.adapters.api_server.kubeconfig import namespace_of_context
from pdcluster_operator.cli import connection, plan
from pdcluster_operator.cli.exits import Exit
from pdcluster_operator.plan.forecast.course import Course, forecast, with_rewrites
from pdcluster_operator.plan.types import TryOut
from pdcluster_operator.runtime.interfaces import ApiError, Key


def show_plan_against(file: str, context: str | None, namespace: str | None) -> Exit:
    """Print the steps that would follow if a file were applied now; write nothing."""
    console = Console(highlight=False, soft_wrap=True)
    manifest = plan.read_accepted(console, file)
    if manifest is None:
        return Exit.MANIFEST
    connector = plan.shipped_connector()
    metadata = manifest["metadata"]
    namespace = namespace or metadata.get("namespace") or namespace_of_context(context)
    document = {**manifest, "metadata": {**metadata, "namespace": namespace}}
    key = Key(namespace, str(metadata["name"]))

    async def show(client: KubeClient) -> Exit:
        live = await cluster_reader.read_cluster(client, key)
        try:
            wanted = await cluster_reader.dry_apply(client, document, live)
        except ApiError as error:
            console.print(Text(f"the API server refuses {file}: {error}", "red"))
            return Exit.REQUEST_FAILED if cluster_reader.lacks_a_right(error) else Exit.MANIFEST
        now = time.time()
        seen = await cluster_reader.observe(client, key, live or wanted, connector)
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
        return await _ask(console, cluster_reader.reader(client), course)

    return connection.connected(context, show)


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
            plan.show_step(console, next(numbers), step)
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
    steps = (step for one in course.rounds for step in one.steps if isinstance(step, TryOut))
    # Before Recreate ends engines, it tries out once more what is stored.
    for trial in {step.manifest["metadata"]["name"]: step for step in steps}.values():
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
