"""Marks, and deletes, ConfigMaps with a connector on a real API server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdcluster_operator.adapters.api_server.children import KubeApi
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kinds import BY_NAME, WATCHED
from pdcluster_operator.adapters.api_server.server_side_apply import ServerSideApply
from pdcluster_operator.api.labels import FIELD_MANAGER, UNUSED_ANNOTATION
from pdcluster_operator.plan.model import Delete
from pdcluster_operator.plan.shared_connectors.connector_mounts import MOUNTING_KINDS
from pdcluster_operator.plan.shared_connectors.unused_connectors import MarkConnector

CONFIG_MAP = BY_NAME["ConfigMap"]
MARKER = f"{FIELD_MANAGER}-collector"
"""A field manager that owns the mark alone, so that its applies leave out the content."""


class KubeConnectors:
    """See :class:`pdcluster_operator.runtime.connector_collector.ConnectorApi`."""

    def __init__(self, client: KubeClient, api: KubeApi) -> None:
        self._writes = ServerSideApply(client)
        self._api = api

    async def list_mounting(self, namespace: str) -> list[Mapping[str, Any]]:
        """Return all workloads, stored revisions and pods of a namespace, whoever made them."""
        kinds = [replace(kind, selector="") for kind in WATCHED if kind.name in MOUNTING_KINDS]
        return [one for kind in kinds for one in await self._api.list(kind, (namespace,))]

    async def mark_connector(self, step: MarkConnector) -> None:
        """Write the mark, if the ConfigMap is still the version that was seen."""
        body = {
            "apiVersion": CONFIG_MAP.api_version,
            "kind": CONFIG_MAP.name,
            "metadata": {
                "name": step.name,
                "namespace": step.namespace,
                "uid": step.uid,
                "resourceVersion": step.resource_version,
                "annotations": {UNUSED_ANNOTATION: step.since},
            },
        }
        path = CONFIG_MAP.path(step.namespace, step.name)
        await self._writes.patch(path, body, manager=MARKER)

    async def delete(self, step: Delete) -> None:
        """Delete with UID and resourceVersion preconditions; an absent object is no error."""
        await self._api.delete(step)
