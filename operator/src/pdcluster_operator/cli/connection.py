"""Connects a command to the API server of a kubeconfig's context."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kubeconfig import (
    NotConnected,
    find_configuration,
    namespace_of_context,
)
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.runtime.interfaces import ApiError


@dataclass(frozen=True, slots=True)
class Where:
    """Which cluster a command talks to.

    Attributes:
        context: of the kubeconfig; None is its current one.
        namespace: None is the one of the context.
    """

    context: str | None = None
    namespace: str | None = None

    def namespace_or_default(self) -> str:
        """Return the namespace as kubectl would choose it."""
        return self.namespace or namespace_of_context(self.context)


def connected(where: Where, command: Callable[[KubeClient], Awaitable[Exit]]) -> Exit:
    """Run a command with a connection. If the API server refuses, its message ends the command."""
    return asyncio.run(_connected(where, command))


async def _connected(where: Where, command: Callable[[KubeClient], Awaitable[Exit]]) -> Exit:
    try:
        configuration = await find_configuration(context=where.context)
    except NotConnected as error:
        raise UserError(str(error), Exit.MACHINE) from error
    async with KubeClient(configuration) as client:
        try:
            return await command(client)
        except ApiError as error:
            raise UserError(f"the API server: {error}", Exit.REQUEST_FAILED) from error
