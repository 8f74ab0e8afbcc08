"""Connects a command to the API server of a kubeconfig's context."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pdcluster_operator.adapters.api_server.client import KubeClient, NotFound
from pdcluster_operator.adapters.api_server.cluster_reader import read_cluster
from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER
from pdcluster_operator.adapters.api_server.kubeconfig import (
    NotConnected,
    find_configuration,
    namespace_of_context,
)
from pdcluster_operator.api.remedies import find, next_step
from pdcluster_operator.cli.commands import Target, in_context
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.runs import find_run, is_running
from pdcluster_operator.runtime.interfaces import ApiError, Key

MOST_NAMES = 10
NO_CRD = "install the operator with its chart, as docs/install.md says, or use another context"

# The client's own warnings, as of a kubeconfig that is not there, say what our errors say.
logging.getLogger("kubernetes").addHandler(logging.NullHandler())


def connected(
    context: str | None,
    key: Key,
    command: Callable[[KubeClient], Awaitable[Exit]],
    kubeconfig: str | None = None,
) -> Exit:
    """Run a command with a connection. If the API server refuses, its message ends the command.

    Args:
        context: of the kubeconfig; None is its current one.
        key: what the command is about, for the next command that the message names.
        kubeconfig: of a run of ``pdcluster up`` on this machine; None is the user's own.
    """

    async def run() -> Exit:
        try:
            configuration = await find_configuration(kubeconfig, context)
            if kubeconfig is not None:  # no proxy reaches this machine's loopback address
                configuration.client_session_kwargs = {"trust_env": False}
        except NotConnected as error:
            raise UserError(str(error), Exit.MACHINE) from error
        async with KubeClient(configuration) as client:
            client.context = context
            try:
                return await command(client)
            except ApiError as error:
                hint = _hint(error.reason, context, key, kubeconfig)
                raise UserError(f"the API server: {error}{hint}", Exit.REQUEST_FAILED) from error

    return asyncio.run(run())


def _hint(reason: str, context: str | None, key: Key, kubeconfig: str | None) -> str:
    if kubeconfig is not None:  # other commands ask the same server, or that of another cluster
        return f"; the logs of this run are below {Path(kubeconfig).parent}"
    command = next_step(reason, key.name, key.namespace) if find(reason) else ""
    return command and f"; next: {in_context(command, context)}"


def with_cluster(
    target: Target, command: Callable[..., Awaitable[Exit]], *words: Any, **options: Any
) -> Exit:
    """Run ``command(client, key, ...)`` for the PDCluster that the command line names."""
    run = find_run(target.name) if target.local else None
    kubeconfig = run and run.kubeconfig
    namespace = target.namespace or namespace_of_context(target.context, kubeconfig)
    key = Key(namespace, run.cluster if run else target.name)
    try:
        return connected(
            target.context, key, lambda client: command(client, key, *words, **options), kubeconfig
        )
    except UserError as error:
        if run is None and is_running(target.name):
            here = f"a `pdcluster up` of {target.name} runs on this machine: --local reads it"
            raise UserError(f"{error}; {here}", error.exit) from error
        raise


async def read_named(client: KubeClient, key: Key) -> dict[str, Any]:
    """Return the PDCluster that the command line names.

    Raises:
        UserError: there is none; it says which there are.
        ApiError: the API server refuses.
    """
    if (live := await read_cluster(client, key)) is not None:
        return live
    said = f'there is no PDCluster "{key.name}" in namespace "{key.namespace}"'
    try:
        if names := await names_of_clusters(client, key.namespace):
            said += f"; there are: {', '.join(names)}"
        elif names := await names_of_clusters(client):
            said += f"; other namespaces have {', '.join(names)}: name one with -n"
        else:
            said += ", nor in another one; apply its manifest first"
    except NotFound:
        said = f"the API server does not know {PDCLUSTER.name}s: {NO_CRD}"
    except ApiError:  # whoever may read one may not always list them
        pass
    raise UserError(said, Exit.REQUEST_FAILED)


async def names_of_clusters(client: KubeClient, namespace: str | None = None) -> list[str]:
    """Return the names of some PDClusters; with their namespace, if none is named.

    Raises:
        NotFound: the API server does not know PDClusters.
        ApiError: it refuses.
    """
    query = {"limit": str(MOST_NAMES)}
    listed = await client.call("GET", PDCLUSTER.path(namespace), query=query)
    found = [one["metadata"] for one in (listed.get("items") or ())[:MOST_NAMES]]
    if namespace is not None:
        return [str(one["name"]) for one in found]
    return [f"{one['namespace']}/{one['name']}" for one in found]
