"""The reconcile loop's port to a real API server: server-side apply, guarded deletes, lists."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pdcluster_operator.adapters.api_server.client import APPLY, MERGE, KubeClient, NotFound
from pdcluster_operator.adapters.api_server.kinds import (
    BY_NAME,
    PDCLUSTER,
    POD,
    SECRET,
    Kind,
    slim,
)
from pdcluster_operator.api.labels import FIELD_MANAGER, STATUS_FIELD_MANAGER, ticket_key_name
from pdcluster_operator.plan.model import Delete, RestartPod, TicketKey, WriteTicketKey
from pdcluster_operator.runtime.errors import ApiError, Invalid
from pdcluster_operator.runtime.queue import Key
from pdcluster_operator.runtime.store import owner_uids
from pdcluster_operator.runtime.ticket_keys import what_is_held, with_a_new_key

Manifest = Mapping[str, Any]
PAGE = "500"
REPAIR_MANAGER = f"{FIELD_MANAGER}-repair"


class NameConflict(ApiError):  # noqa: N818 - what stands in the condition
    """An object of that name exists, and it is not ours to take."""

    def __init__(self, manifest: Manifest) -> None:
        name = manifest["metadata"]["name"]
        super().__init__(
            "NameConflict",
            f"{manifest['kind']} {name} exists and belongs to something else: "
            "rename it, or name the PDCluster otherwise",
        )


class KubeApi:
    """See :class:`pdcluster_operator.runtime.ports.Api`.

    Args:
        remember: is given every object as the server answered it, so that the next reconcile
            does not run behind its own writes.
    """

    def __init__(
        self, client: KubeClient, remember: Callable[[dict[str, Any]], object] | None = None
    ) -> None:
        self._client = client
        self.remember = remember or (lambda _: None)

    async def read_uid(self, key: Key) -> str | None:
        """Return the live cluster's UID; None when it is gone or going."""
        live = await self._read(PDCLUSTER, key.namespace, key.name)
        if live is None or "deletionTimestamp" in live["metadata"]:
            return None
        return str(live["metadata"]["uid"])

    async def read_ticket_key(self, key: Key, uid: str) -> TicketKey | None:
        """Return what the cluster's Secret says beside its keys; None when there is none."""
        name = ticket_key_name(key.name)
        live = await self._read(SECRET, key.namespace, name)
        if live is None:
            return None
        if uid not in owner_uids(live):
            raise NameConflict({"kind": SECRET.name, "metadata": {"name": name}})
        return what_is_held(live)

    async def write_ticket_key(self, step: WriteTicketKey) -> None:
        """Mint a key and write it. A Secret that came or changed meanwhile is a Conflict."""
        metadata = step.manifest["metadata"]
        if not step.rotate:
            path = SECRET.path(metadata["namespace"])
            query = {"fieldManager": FIELD_MANAGER}
            await self._client.call("POST", path, query=query, body=with_a_new_key(step, None))
            return
        path = SECRET.path(metadata["namespace"], metadata["name"])
        live = await self._client.call("GET", path)
        version = {"resourceVersion": live["metadata"]["resourceVersion"]}
        body = with_a_new_key(step, live)
        body["metadata"] = {"annotations": metadata["annotations"], **version}
        query = {"fieldManager": FIELD_MANAGER}
        await self._client.call("PATCH", path, query=query, body=body, content=MERGE)

    async def apply(self, manifest: Manifest) -> None:
        """Apply a child, unless another owner's object has its name.

        The live object's UID goes along: what was made anew in between is a conflict.
        """
        kind = BY_NAME[manifest["kind"]]
        metadata = manifest["metadata"]
        live = await self._read(kind, metadata["namespace"], metadata["name"])
        body = copy.deepcopy(dict(manifest))
        if live is not None:
            if not owner_uids(manifest) <= owner_uids(live):
                raise NameConflict(manifest)
            if "deletionTimestamp" in live["metadata"]:
                name = f"{kind.name} {metadata['name']}"
                raise ApiError("StillBeingDeleted", f"{name} is still being deleted")
            body["metadata"]["uid"] = live["metadata"]["uid"]
        path = kind.path(metadata["namespace"], metadata["name"])
        try:
            answer = await self._apply(path, body)
        except Invalid:
            if live is None or not await self._straighten(path, live, body):
                raise
            answer = await self._apply(path, body)
        self._keep(kind, answer)

    async def delete(self, step: Delete | RestartPod) -> None:
        """Delete what was seen and nothing else; an absent object is no error."""
        kind = BY_NAME[step.kind] if isinstance(step, Delete) else POD
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            # Foreground would add a finalizer; Background lets the collector take the rest.
            "propagationPolicy": "Background",
            "preconditions": {"uid": step.uid, "resourceVersion": step.resource_version},
        }
        try:
            await self._client.call("DELETE", kind.path(step.namespace, step.name), body=body)
        except NotFound:
            return

    async def write_status(self, key: Key, uid: str, status: Manifest) -> None:
        """Apply the status with a field manager of its own, to the very object that was seen.

        The status subresource ignores a UID; it heeds the resourceVersion, which is therefore
        read first. A cluster that is gone or made anew is no error: its events will tell.
        """
        live = await self._read(PDCLUSTER, key.namespace, key.name)
        if live is None or live["metadata"]["uid"] != uid:
            return
        body = {
            "apiVersion": PDCLUSTER.api_version,
            "kind": PDCLUSTER.name,
            "metadata": {
                "name": key.name,
                "namespace": key.namespace,
                "resourceVersion": live["metadata"]["resourceVersion"],
            },
            "status": dict(status),
        }
        path = PDCLUSTER.path(key.namespace, key.name) + "/status"
        try:
            answer = await self._apply(path, body, manager=STATUS_FIELD_MANAGER)
        except NotFound:
            return
        self._keep(PDCLUSTER, answer)

    async def list(self, kind: Kind, namespaces: Iterable[str | None]) -> list[dict[str, Any]]:
        """Return all objects of a kind that concern us; ``None`` is every namespace."""
        found: list[dict[str, Any]] = []
        for namespace in namespaces:
            query = {"limit": PAGE}
            if kind.selector:
                query["labelSelector"] = kind.selector
            while True:
                page = await self._client.call("GET", kind.path(namespace), query=query)
                found += [slim(item, kind) for item in page.get("items") or ()]
                rest = (page.get("metadata") or {}).get("continue")
                if not rest:
                    break
                query["continue"] = rest
        return found

    async def _read(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        try:
            return await self._client.call("GET", kind.path(namespace, name))
        except NotFound:
            return None

    async def _straighten(self, path: str, live: Manifest, body: Manifest) -> bool:
        """Set what somebody bent; whether there was anything to set.

        An apply leaves other managers' list items beside ours, such as a port that was
        changed by hand and has our port's name now. A merge replaces whole lists.
        """
        if "spec" not in body:
            return False
        version = live["metadata"]["resourceVersion"]
        merge = {"metadata": {"resourceVersion": version}, "spec": body["spec"]}
        query = {"fieldManager": REPAIR_MANAGER}
        await self._client.call("PATCH", path, query=query, body=merge, content=MERGE)
        return True

    async def _apply(
        self, path: str, body: Manifest, *, manager: str = FIELD_MANAGER
    ) -> dict[str, Any]:
        query = {"fieldManager": manager, "force": "true"}
        return await self._client.call("PATCH", path, query=query, body=body, content=APPLY)

    def _keep(self, kind: Kind, live: Manifest) -> None:
        self.remember(slim(live, kind))
