"""Requests of the benchmark itself: a server that is busy for a moment ends no run of an hour."""

from __future__ import annotations

from typing import Any

from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.runtime.interfaces import ApiError

TRIES = 5


async def answered(client: KubeClient, method: str, path: str, **more: Any) -> dict[str, Any]:
    """Return the answer to a request, which is sent again if none came in time.

    Raises:
        ApiError: the server refused it, or did not answer to any of them.
    """
    for _ in range(TRIES - 1):
        try:
            return await client.call(method, path, **more)
        except ApiError as error:
            if error.reason != "ApiServerUnreachable":
                raise
    return await client.call(method, path, **more)
