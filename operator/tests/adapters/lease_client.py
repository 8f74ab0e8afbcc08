"""The two calls for Leases, as a client of the API server has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.adapters.api_server.kinds import LEASE


class LeaseClient:
    """A client whose answers come from ``read_lease`` and ``write_lease``."""

    async def read(self, path: str) -> Any:
        namespace, _, name = path.split("/")[-3:]
        assert path == LEASE.path(namespace, name)
        return await self.read_lease(namespace, name)

    async def call(self, method: str, path: str, *, body: Mapping[str, Any]) -> None:
        metadata = body["metadata"]
        is_new = "resourceVersion" not in metadata
        assert method == ("POST" if is_new else "PUT")
        assert path == LEASE.path(metadata["namespace"], None if is_new else metadata["name"])
        await self.write_lease(body)

    async def read_lease(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        raise AssertionError(namespace, name)

    async def write_lease(self, manifest: Mapping[str, Any]) -> None:
        raise AssertionError(manifest)
