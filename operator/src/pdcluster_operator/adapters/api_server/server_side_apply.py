"""Server-side apply of children: only onto the object that was seen, or that is ours.

Another client may change an object so that the API server refuses our apply. Then a second field
manager sets those fields again, and gives up their ownership afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.adapters.api_server.client import APPLY, MERGE, KubeClient
from pdcluster_operator.adapters.api_server.kinds import BY_NAME
from pdcluster_operator.api.labels import FIELD_MANAGER
from pdcluster_operator.plan.children.name_conflicts import why_not_applied
from pdcluster_operator.plan.objects.drift import repair, without_manager
from pdcluster_operator.runtime.errors import ApiError, Conflict, Invalid

Manifest = Mapping[str, Any]
NO_OBJECT = "1"
"""A resourceVersion that no object has: the one of an empty etcd. An apply with it only creates."""
ABSENT = {"resourceVersion": NO_OBJECT}
REPAIR_MANAGER = f"{FIELD_MANAGER}-repair"


class ServerSideApply:
    """Applies objects with the operator's field manager."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def apply(self, manifest: Manifest, uid: str = "") -> dict[str, Any]:
        """Apply a child and return it, unless ``plan/children/name_conflicts.py`` objects.

        The request carries what was seen: the live object's UID, or that there is none. If the
        API server has it otherwise, it answers with a conflict, and only then we look.
        """
        metadata = manifest["metadata"]
        seen = {"uid": uid} if uid else ABSENT
        path = BY_NAME[manifest["kind"]].path(metadata["namespace"], metadata["name"])
        try:
            answer = await self.patch(path, {**manifest, "metadata": {**metadata, **seen}})
        except (Conflict, Invalid):
            answer = await self._apply_to_live(path, manifest)
        if without_manager(answer, REPAIR_MANAGER) is not None:  # a repair that was cut off
            answer = await self._apply_to_live(path, manifest)
        return answer

    async def _apply_to_live(self, path: str, manifest: Manifest) -> dict[str, Any]:
        metadata = manifest["metadata"]
        live = await self._client.read(path)
        if (refusal := why_not_applied(manifest, live)) is not None:
            raise ApiError(refusal.reason, refusal.message)
        if live is None:
            return await self.patch(path, {**manifest, "metadata": {**metadata, **ABSENT}})
        body = {**manifest, "metadata": {**metadata, "uid": live["metadata"]["uid"]}}
        live = await self._disown(path, live)
        try:
            return await self.patch(path, body)
        except Invalid:
            if (patch := repair(live, body)) is None:
                raise
            await self._repair(path, patch)
            return await self._disown(path, await self.patch(path, body))

    async def patch(
        self, path: str, body: Manifest, *, manager: str = FIELD_MANAGER, dry_run: bool = False
    ) -> dict[str, Any]:
        """Send one apply, and take over the fields that another manager has."""
        query = {"fieldManager": manager, "force": "true"}
        if dry_run:
            query["dryRun"] = "All"
        return await self._client.call("PATCH", path, query=query, body=body, content=APPLY)

    async def _disown(self, path: str, live: dict[str, Any]) -> dict[str, Any]:
        """Give up what the repair's manager owns; return the object as it is then."""
        patch = without_manager(live, REPAIR_MANAGER)
        return live if patch is None else await self._repair(path, patch)

    async def _repair(self, path: str, patch: Manifest) -> dict[str, Any]:
        query = {"fieldManager": REPAIR_MANAGER}
        return await self._client.call("PATCH", path, query=query, body=patch, content=MERGE)
