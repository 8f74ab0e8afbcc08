"""Reads and writes Kubernetes' Lease objects on a real API server, one a namespace."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from typing import Any

from pdcluster_operator.adapters.api_server.client import KubeClient, NotFound
from pdcluster_operator.adapters.api_server.kinds import LEASE

Manifest = Mapping[str, Any]


class KubeLeases:
    """See :class:`pdcluster_operator.runtime.namespace_leases.LeaseApi`."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def read_lease(self, namespace: str, name: str) -> Manifest | None:
        """Return the Lease; None if there is none."""
        try:
            return await self._client.call("GET", LEASE.path(namespace, name))
        except NotFound:
            return None

    async def write_lease(self, manifest: Manifest) -> None:
        """Create the Lease, or replace the version that was read."""
        metadata = manifest["metadata"]
        if "resourceVersion" not in metadata:
            await self._client.call("POST", LEASE.path(metadata["namespace"]), body=manifest)
            return
        path = LEASE.path(metadata["namespace"], metadata["name"])
        await self._client.call("PUT", path, body=manifest)


def own_identity() -> str:
    """Return who this process is: its pod, whose earlier process has ended, or a random name."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{secrets.token_hex(4)}"
