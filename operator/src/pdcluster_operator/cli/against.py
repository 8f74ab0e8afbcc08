"""``pdcluster plan FILE --against``: the steps of the operator for a cluster that runs."""

import time
from dataclasses import replace

import msgspec
from rich.console import Console

from pdcluster_operator.adapters.api_server import cluster_reader, kube_api
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER, slim
from pdcluster_operator.adapters.api_server.kubeconfig import namespace_of_context
from pdcluster_operator.cli import connection, plan, plan_view
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.output import show
from pdcluster_operator.cli.plan_view import Answer
from pdcluster_operator.plan.forecast.course import Course, forecast, with_rewrites
from pdcluster_operator.plan.types import TryOut
from pdcluster_operator.runtime.interfaces import ApiError, Key


def show_plan_against(file: str, context: str | None, namespace: str | None, output: str) -> Exit:
    """Print the steps that would follow if a file were applied now; write nothing."""
    manifest = plan.read_accepted(file, output)
    if manifest is None:
        return Exit.MANIFEST
    connector = plan.shipped_connector()
    metadata = manifest["metadata"]
    namespace = namespace or metadata.get("namespace") or namespace_of_context(context)
    document = {**manifest, "metadata": {**metadata, "namespace": namespace}}
    key = Key(namespace, str(metadata["name"]))

    async def command(client: KubeClient) -> Exit:
        live = await cluster_reader.read_cluster(client, key)
        try:
            wanted = await cluster_reader.dry_apply(client, document, live)
        except ApiError as error:
            lacks = cluster_reader.lacks_a_right(error)
            code = Exit.REQUEST_FAILED if lacks else Exit.MANIFEST
            raise UserError(f"the API server refuses {file}: {error}", code) from error
        now = time.time()
        seen = await cluster_reader.observe(client, key, live or wanted, connector)
        seen, left = with_rewrites(seen, now) if live else (seen, ())
        course = forecast(replace(seen, cluster=slim(wanted, PDCLUSTER)), now)
        answers, code = await ask(cluster_reader.reader(client), course)
        found = msgspec.structs.replace(
            plan_view.plan_of(key, course, "", against=True),
            pending=len(left),
            api_server=answers,
        )

        def text(console: Console) -> None:
            console.print(f"PDCluster {namespace}/{key.name}, after {file} is applied:")
            plan_view.print_plan(console, found)

        show(output, found, text)
        return code

    return connection.connected(context, key, command)


async def ask(api: kube_api.KubeApi, course: Course) -> tuple[list[Answer], Exit]:
    """Let the API server judge the new pods; return what it says, and how the command ends."""
    steps = (step for one in course.rounds for step in one.steps if isinstance(step, TryOut))
    answers: list[Answer] = []
    # Before Recreate ends engines, it tries out once more what is stored.
    for trial in {step.manifest["metadata"]["name"]: step for step in steps}.values():
        kinds = " and ".join(manifest["kind"] for manifest in trial.tried)
        about = f"{kinds} of {trial.manifest['metadata']['name']}"
        try:
            await api.try_out(trial)
        except ApiError as error:
            if not cluster_reader.lacks_a_right(error):
                return [*answers, Answer(about, False, str(error))], Exit.MANIFEST
            why = f"not asked about {about}: this account may not create them"
            answers.append(Answer(about, None, why))
            continue
        answers.append(Answer(about, True, f"would take {about} (dry run)"))
    return answers, Exit.DONE if course.complete else Exit.NOT_READY
