"""``pdcluster ui``: a read-only page of PDClusters on this machine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import click

from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kubeconfig import (
    find_configuration,
    namespace_of_context,
)
from pdcluster_operator.cli.commands import Command, check_name, context_option, namespace_option
from pdcluster_operator.cli.connection import connected, read_named
from pdcluster_operator.cli.exits import Exit
from pdcluster_operator.cli.runs import find_run
from pdcluster_operator.cli.ui.readers import KubeReader
from pdcluster_operator.cli.ui.server import UiServer
from pdcluster_operator.runtime.interfaces import Key

DETAILS = """\
Serves a page for your browser, on this machine alone, and prints its address. The page shows the
engines of a PDCluster and how far they are, its KV links, its conditions with the next command for
each fault, its timeline, and what its requests do. It changes by itself. Nothing can be changed on
it.

NAME is the PDCluster that is shown first. Without it, the page begins with a list of all.

The address has a token, another one at each start: whoever has it can read the page. To see the
page on another device, forward the port with `ssh -L`, and open the address there.

Objects are read with your rights. What the requests do is read from the metrics of the engines'
pods, as `kubectl port-forward` reaches them.
"""


@click.command(
    cls=Command,
    help=DETAILS,
    examples=(
        ("pdcluster ui", "all PDClusters that you may read"),
        ("pdcluster ui llama -n llm", "one of them"),
        ("pdcluster ui --local", "the newest pdcluster up of this machine"),
    ),
)
@click.argument("name", metavar="[NAME]", required=False)
@namespace_option
@context_option
@click.option(
    "--local",
    is_flag=True,
    help="show a running pdcluster up of this machine; NAME is then its PDCluster or the folder "
    "of its run",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=None,
    metavar="PORT",
    help="of 127.0.0.1 (default: one that is free)",
)
def ui(
    name: str | None, namespace: str | None, context: str | None, *, local: bool, port: int | None
) -> Exit:
    """Serve the page until Ctrl-C."""
    if local and context is not None:
        raise click.UsageError("--local and --context name two different places")
    if name is not None:
        check_name(name, local=local)
    run = find_run(name or "") if local else None
    kubeconfig = run.kubeconfig if run else None
    own = namespace or namespace_of_context(context, kubeconfig)
    named = run.cluster if run else name

    async def command(client: KubeClient) -> Exit:
        reader = KubeReader(client, namespace, own, on_this_machine=local)
        key = Key(own, named) if named is not None else None
        await _check(client, reader, key)
        async with UiServer(reader, key, port or 0) as server:
            print(f"{server.url}\nCtrl-C ends it.", flush=True)
            await asyncio.Event().wait()
        return Exit.DONE

    return connected(context, Key(own, named or "NAME"), command, kubeconfig)


async def _check(client: KubeClient, reader: KubeReader, key: Key | None) -> None:
    """Find out whether there is something to show.

    Raises:
        UserError: there is no such PDCluster.
        ApiError: the API server refuses, or does not answer.
    """
    if key is None:
        await reader.clusters()
    else:
        await read_named(client, key)


@asynccontextmanager
async def page_of_run(kubeconfig: str, key: Key) -> AsyncIterator[str]:
    """Serve the page of a run of this process, and yield its address.

    Args:
        kubeconfig: of the run's own door.
    """
    configuration = await find_configuration(kubeconfig)
    configuration.client_session_kwargs = {"trust_env": False}
    async with KubeClient(configuration) as client:
        reader = KubeReader(client, key.namespace, key.namespace, on_this_machine=True)
        async with UiServer(reader, key) as server:
            yield server.url
