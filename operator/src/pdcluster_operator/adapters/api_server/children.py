"""Reads and writes a cluster's objects on a real API server.

It writes with :mod:`.server_side_apply`, and deletes only the object that was seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pdcluster_operator.adapters.api_server.client import MERGE, KubeClient, NotFound
from pdcluster_operator.adapters.api_server.kinds import (
    BY_NAME,
    PDCLUSTER,
    POD,
    PREFILL_SCALER,
    SECRET,
    Kind,
    Same,
    as_kept,
    nothing_is_kept,
    slim,
)
from pdcluster_operator.adapters.api_server.server_side_apply import ServerSideApply
from pdcluster_operator.adapters.tls.certificate_secret import (
    held_certificates,
    with_certificates,
)
from pdcluster_operator.adapters.tls.engine_authority import EngineAuthority
from pdcluster_operator.api.conditions import StatusReason
from pdcluster_operator.api.labels import FIELD_MANAGER, STATUS_FIELD_MANAGER
from pdcluster_operator.api.object_names import certificates_name, ticket_key_name
from pdcluster_operator.plan.children.name_conflicts import name_conflict
from pdcluster_operator.plan.model import (
    Delete,
    HeldCertificates,
    RestartPod,
    ScalerStatus,
    TicketKey,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
)
from pdcluster_operator.plan.objects.ownership import controller_uid, is_being_deleted
from pdcluster_operator.plan.objects.shared_parts import with_shared_parts
from pdcluster_operator.plan.rollout.try_out import REFUSALS, refusal
from pdcluster_operator.runtime.errors import ApiError, Conflict
from pdcluster_operator.runtime.queue import Key
from pdcluster_operator.runtime.ticket_keys import what_is_held, with_a_new_key

Manifest = Mapping[str, Any]


class KubeApi:
    """See :class:`pdcluster_operator.runtime.interfaces.Api`.

    Args:
        authority: signs the engines' certificates.
        remember: called with every object that the server answers to a write. So the next
            reconcile knows our own writes before the watch reports them.
        same: returns what is remembered already.
    """

    def __init__(
        self,
        client: KubeClient,
        authority: EngineAuthority,
        remember: Callable[[dict[str, Any]], object] | None = None,
        same: Same = nothing_is_kept,
    ) -> None:
        self._client = client
        self._writes = ServerSideApply(client)
        self._authority = authority
        self.remember = remember or (lambda _: None)
        self.same = same

    async def read_uid(self, key: Key) -> str | None:
        """Return the live cluster's UID; None if it is gone or is being deleted."""
        live = await self._read(PDCLUSTER, key.namespace, key.name)
        if live is None or is_being_deleted(live):
            return None
        return str(live["metadata"]["uid"])

    async def read_ticket_key(self, key: Key, uid: str) -> TicketKey | None:
        """Return what the cluster's Secret says beside its keys; None when there is none."""
        live = await self._own_secret(key.namespace, ticket_key_name(key.name), uid)
        return None if live is None else what_is_held(live)

    async def read_certificates(self, key: Key, uid: str) -> HeldCertificates:
        """Return what the Secret with the engines' certificates says beside their keys."""
        live = await self._own_secret(key.namespace, certificates_name(key.name), uid)
        return held_certificates(live, self._authority)

    async def write_certificates(self, step: WriteCertificates) -> HeldCertificates:
        """Sign the certificates and apply the Secret; return what it says then."""
        secret = await asyncio.to_thread(with_certificates, step, self._authority)
        return held_certificates(await self.apply(secret, step.uid), self._authority)

    async def _own_secret(self, namespace: str, name: str, uid: str) -> dict[str, Any] | None:
        """Return a Secret of the cluster ``uid``; None if there is none."""
        live = await self._read(SECRET, namespace, name)
        if live is not None and controller_uid(live) != uid:
            refusal = name_conflict(SECRET.name, name)
            raise ApiError(refusal.reason, refusal.message)
        return live

    async def write_ticket_key(self, step: WriteTicketKey) -> None:
        """Mint a key and write it. A Secret that came or changed meanwhile is a Conflict."""
        metadata = step.manifest["metadata"]
        if not step.rotate:
            path = SECRET.path(metadata["namespace"])
            query = {"fieldManager": FIELD_MANAGER}
            await self._client.call("POST", path, query=query, body=with_a_new_key(step, None))
            return
        path = SECRET.path(metadata["namespace"], metadata["name"])
        uid = controller_uid(step.manifest)
        live = await self._own_secret(metadata["namespace"], metadata["name"], uid)
        if live is None:
            raise Conflict(f"Secret {metadata['name']} was deleted before its key was rotated")
        version = {"resourceVersion": live["metadata"]["resourceVersion"]}
        body = with_a_new_key(step, live)
        body["metadata"] = {"annotations": metadata["annotations"], **version}
        query = {"fieldManager": FIELD_MANAGER}
        await self._client.call("PATCH", path, query=query, body=body, content=MERGE)

    async def apply(self, manifest: Manifest, uid: str = "") -> Manifest:
        """Apply a child; see :meth:`ServerSideApply.apply`."""
        answer = await self._writes.apply(manifest, uid)
        self._keep(BY_NAME[manifest["kind"]], answer)
        return answer

    async def try_out(self, step: TryOut) -> None:
        """Ask the API server whether it would take the objects; it writes nothing."""
        for manifest in step.manifests:
            kind, metadata = BY_NAME[manifest["kind"]], manifest["metadata"]
            try:
                if kind is POD:  # no right to patch pods is needed, and the name is generated
                    query = {"dryRun": "All", "fieldManager": FIELD_MANAGER}
                    path = kind.path(metadata["namespace"])
                    await self._client.call("POST", path, query=query, body=manifest)
                else:
                    path = kind.path(metadata["namespace"], metadata["name"])
                    await self._writes.patch(path, manifest, dry_run=True)
            except ApiError as error:
                if (found := refusal(step, kind.name, error.reason, str(error))) is not None:
                    raise ApiError(StatusReason.TEMPLATE_REFUSED, found) from error
                if error.reason not in REFUSALS:
                    raise

    async def delete(self, step: Delete | RestartPod) -> None:
        """Delete the very object that was seen. An object that is gone already is no error."""
        kind = BY_NAME[step.kind] if isinstance(step, Delete) else POD
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            # Foreground would add a finalizer. With Background the garbage collector deletes the
            # object's own children later.
            "propagationPolicy": "Background",
            "preconditions": {"uid": step.uid, "resourceVersion": step.resource_version},
        }
        try:
            await self._client.call("DELETE", kind.path(step.namespace, step.name), body=body)
        except NotFound:
            return

    async def write_status(self, key: Key, uid: str, status: Manifest, version: str = "") -> None:
        """Apply the status to the very object that was seen, with a field manager of its own.

        The API server ignores the UID in a change of the status, but it checks the
        resourceVersion. No two objects ever have the same one. A cluster that changed since is read
        again. One that is gone, or was created again, is no error: its watch events start another
        reconcile.
        """
        if version:
            try:
                return await self._apply_status(PDCLUSTER, key, status, version)
            except Conflict:
                pass
        await self._status_of_live(PDCLUSTER, key, uid, status)
        return None

    async def write_scaler_status(self, key: Key, scaler: ScalerStatus) -> None:
        """Apply the status of a PrefillScaler, if it is still the one that was seen."""
        await self._status_of_live(PREFILL_SCALER, key, scaler.uid, scaler.status)

    async def _status_of_live(self, kind: Kind, key: Key, uid: str, status: Manifest) -> None:
        live = await self._read(kind, key.namespace, key.name)
        if live is not None and live["metadata"]["uid"] == uid:
            await self._apply_status(kind, key, status, live["metadata"]["resourceVersion"])

    async def _apply_status(self, kind: Kind, key: Key, status: Manifest, version: str) -> None:
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {
                "name": key.name,
                "namespace": key.namespace,
                "resourceVersion": version,
            },
            "status": dict(status),
        }
        path = kind.path(key.namespace, key.name) + "/status"
        try:
            answer = await self._writes.patch(path, body, manager=STATUS_FIELD_MANAGER)
        except NotFound:
            return
        self._keep(kind, answer)

    async def list(self, kind: Kind, namespaces: Iterable[str | None]) -> list[dict[str, Any]]:
        """Return all objects of a kind that concern us; ``None`` is every namespace."""
        found: list[dict[str, Any]] = []
        for namespace in namespaces:
            query = {"limit": str(kind.page)}
            if kind.selector:
                query["labelSelector"] = kind.selector
            while True:
                page = await self._client.call("GET", kind.path(namespace), query=query)
                for item in page.get("items") or ():
                    # Parts are shared now, because a list of all objects is large.
                    known = self.same(kind.name, item)
                    found.append(known or with_shared_parts(slim(item, kind)))
                rest = (page.get("metadata") or {}).get("continue")
                if not rest:
                    break
                query["continue"] = rest
        return found

    async def _read(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        return await self._client.read(kind.path(namespace, name))

    def _keep(self, kind: Kind, live: Manifest) -> None:
        if kind is SECRET:  # whose content is not for the store
            return
        self.remember(as_kept(live, kind, self.same))
