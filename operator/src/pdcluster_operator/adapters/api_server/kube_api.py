"""Reads and writes a cluster's objects on a real API server.

Writes are server-side applies, and only onto the object that was seen or that is ours. Another
client may change an object so that the API server refuses our apply. Then a second field manager
sets those fields again, and gives up their ownership afterwards. A deletion names the UID and the
resourceVersion that were seen.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pdcluster_operator.adapters import engine_authority
from pdcluster_operator.adapters.api_server import kinds
from pdcluster_operator.adapters.api_server.client import APPLY, MERGE, KubeClient, NotFound
from pdcluster_operator.api import conditions, object_names
from pdcluster_operator.plan import types
from pdcluster_operator.plan.connectors import MOUNTING_KINDS
from pdcluster_operator.plan.name_conflicts import name_conflict, why_not_applied
from pdcluster_operator.plan.objects import drift, ownership, shared_parts
from pdcluster_operator.plan.rollout.wanted_children import refusal
from pdcluster_operator.runtime.cluster_secrets import held_ticket_key, with_a_new_key
from pdcluster_operator.runtime.interfaces import ApiError, Conflict, Invalid, Key

Manifest = Mapping[str, Any]
ABSENT = {"resourceVersion": "1"}
"""A version that no object has: the one of an empty etcd. An apply with it only creates."""
REPAIR_MANAGER = f"{object_names.FIELD_MANAGER}-repair"
MARKER = f"{object_names.FIELD_MANAGER}-collector"
"""A field manager that owns the mark alone, so that its applies leave out the content."""


@dataclass(eq=False)
class KubeApi:
    """See :class:`pdcluster_operator.runtime.interfaces.ApiServer`.

    Args:
        authority: signs the engines' certificates.
        remember: called with every object that the server answers to a write. So the next
            reconcile knows our own writes before the watch reports them.
    """

    client: KubeClient
    authority: engine_authority.EngineAuthority
    remember: Callable[[dict[str, Any]], object] = lambda _: None

    async def read(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        """Return an object as the server has it now; None if there is none."""
        of = kinds.BY_NAME[kind]
        live = await self.client.read(of.path(namespace, name))
        return live and kinds.slim(live, of)

    async def read_ticket_key(self, key: Key, uid: str) -> str | None:
        """Return what the cluster's Secret says beside its keys; None if it does not hold them."""
        name = object_names.ticket_key_name(key.name)
        return held_ticket_key(await self._own_secret(key.namespace, name, uid))

    async def read_certificates(self, key: Key, uid: str) -> types.HeldCertificates:
        """Return what the Secret with the engines' certificates says beside their keys."""
        live = await self._own_secret(key.namespace, object_names.certificates_name(key.name), uid)
        return engine_authority.held_certificates(live, self.authority)

    async def write_certificates(self, step: types.WriteCertificates) -> types.HeldCertificates:
        """Sign the certificates and apply the Secret; return what it says then."""
        secret = await asyncio.to_thread(engine_authority.with_certificates, step, self.authority)
        answer = await self.apply(secret, step.uid)
        return engine_authority.held_certificates(answer, self.authority)

    async def _own_secret(self, namespace: str, name: str, uid: str) -> dict[str, Any] | None:
        """Return a Secret of the cluster ``uid``; None if there is none."""
        live = await self.client.read(kinds.SECRET.path(namespace, name))
        if live is not None and ownership.controller_uid(live) != uid:
            refusal = name_conflict(kinds.SECRET.name, name)
            raise ApiError(refusal.reason, refusal.message)
        return live

    async def write_ticket_key(self, step: types.WriteTicketKey) -> None:
        """Mint a key and write it. A Secret that came or changed meanwhile is a Conflict."""
        namespace, name = (step.manifest["metadata"][part] for part in ("namespace", "name"))
        query = {"fieldManager": object_names.FIELD_MANAGER}
        conflict = Conflict(f"Secret {name} was deleted before its key was rotated")
        if not step.rotate:
            try:
                path, body = kinds.SECRET.path(namespace), with_a_new_key(step, None)
                await self.client.call("POST", path, query=query, body=body)
                return
            except Conflict as error:
                conflict = error
        path = kinds.SECRET.path(namespace, name)
        live = await self.client.read(path)
        if (refusal := why_not_applied(step.manifest, live)) is not None:
            raise ApiError(refusal.reason, refusal.message)
        if live is None or (not step.rotate and held_ticket_key(live) is not None):
            raise conflict
        body = with_a_new_key(step, live)
        version = live["metadata"]["resourceVersion"]
        annotations = body["metadata"]["annotations"]
        body["metadata"] = {"annotations": annotations, "resourceVersion": version}
        await self.client.call("PATCH", path, query=query, body=body, content=MERGE)

    async def apply(self, manifest: Manifest, uid: str = "") -> dict[str, Any]:
        """Apply a child and return it, unless ``plan/name_conflicts.py`` objects.

        The request carries what was seen: the live object's UID, or that there is none. If the
        API server has it otherwise, it answers with a conflict, and only then we look.
        """
        kind, metadata = kinds.BY_NAME[manifest["kind"]], manifest["metadata"]
        seen = {"uid": uid} if uid else ABSENT
        path = kind.path(metadata["namespace"], metadata["name"])
        try:
            answer = await self._patch(path, {**manifest, "metadata": {**metadata, **seen}})
        except (Conflict, Invalid):
            answer = await self._apply_to_live(path, manifest)
        if drift.without_manager(answer, REPAIR_MANAGER) is not None:  # a repair that was cut off
            answer = await self._apply_to_live(path, manifest)
        if kind is not kinds.SECRET:  # whose content is not for the store
            self.remember(kinds.slim(answer, kind))
        return answer

    async def try_out(self, step: types.TryOut) -> None:
        """Ask the API server whether it would take the objects; it writes nothing."""
        # A create costs the API server less than an apply, which refuses unknown fields, too.
        query = {"dryRun": "All", "fieldManager": object_names.FIELD_MANAGER}
        query["fieldValidation"] = "Strict"
        for manifest in step.tried:
            kind = kinds.BY_NAME[manifest["kind"]]
            try:
                path = kind.path(manifest["metadata"]["namespace"])
                await self.client.call("POST", path, query=query, body=manifest)
            except Conflict:  # somebody else's is there: the apply says so
                continue
            except ApiError as error:
                if not error.refuses:
                    raise
                if (found := refusal(step, kind.name, str(error))) is not None:
                    raise ApiError(conditions.StatusReason.TEMPLATE_REFUSED, found) from error

    async def delete(self, step: types.Delete) -> None:
        """Delete the very object that was seen. An object that is gone already is no error."""
        kind = kinds.BY_NAME[step.kind]
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            # Foreground would add a finalizer. With Background the garbage collector deletes the
            # object's own children later.
            "propagationPolicy": "Background",
            "preconditions": {"uid": step.uid, "resourceVersion": step.resource_version},
        }
        with suppress(NotFound):
            await self.client.call("DELETE", kind.path(step.namespace, step.name), body=body)

    async def write_status(
        self, key: Key, uid: str, status: Manifest, version: str = "", kind: str = object_names.KIND
    ) -> None:
        """Apply the status to the very object that was seen, with a field manager of its own.

        The API server ignores the UID in a change of the status, but it checks the
        resourceVersion. No two objects ever have the same one. An object that changed since is read
        again. One that is gone, or was created again, is no error: its watch events start another
        reconcile.
        """
        of = kinds.BY_NAME[kind]
        if version:
            with suppress(Conflict):
                return await self._apply_status(of, key, status, version)
        live = await self.client.read(of.path(key.namespace, key.name))
        if live is not None and live["metadata"]["uid"] == uid:
            await self._apply_status(of, key, status, live["metadata"]["resourceVersion"])
        return None

    async def scale(self, key: Key, step: types.Scale) -> None:
        """Set the number of engines, if nobody changed the object since it was seen."""
        path = kinds.BY_NAME[step.kind].path(key.namespace, key.name) + "/scale"
        metadata = {"resourceVersion": step.version}
        body = {"metadata": metadata, "spec": {"replicas": step.replicas}}
        query = {"fieldManager": object_names.SCALE_FIELD_MANAGER}
        with suppress(NotFound):
            await self.client.call("PATCH", path, query=query, body=body, content=MERGE)

    async def _apply_status(
        self, kind: kinds.Kind, key: Key, status: Manifest, version: str
    ) -> None:
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {"name": key.name, "namespace": key.namespace, "resourceVersion": version},
            "status": dict(status),
        }
        path = kind.path(key.namespace, key.name) + "/status"
        try:
            answer = await self._patch(path, body, manager=object_names.STATUS_FIELD_MANAGER)
        except NotFound:
            return
        self.remember(kinds.slim(answer, kind))

    async def list(self, kind: kinds.Kind, namespace: str) -> list[dict[str, Any]]:
        """Return all objects of a kind and namespace that concern us."""
        # Parts are shared now, because a list of all objects is large.
        return [
            shared_parts.with_shared_parts(kinds.slim(item, kind))
            async for page in self.client.pages(kind.path(namespace), kind.selection, kind.page)
            for item in page.get("items") or ()
        ]

    async def list_mounting(self, namespace: str) -> Iterable[Manifest]:
        """Return all workloads, stored revisions and pods of a namespace, whoever made them."""
        mounting = [
            replace(kind, selector="") for kind in kinds.WATCHED if kind.name in MOUNTING_KINDS
        ]
        return [one for kind in mounting for one in await self.list(kind, namespace)]

    async def mark_connector(self, step: types.Apply) -> None:
        """Mark a ConfigMap with a connector, if it is still the version that was seen."""
        metadata = step.manifest["metadata"]
        path = kinds.BY_NAME["ConfigMap"].path(metadata["namespace"], metadata["name"])
        await self._patch(path, step.manifest, manager=MARKER)

    async def _apply_to_live(self, path: str, manifest: Manifest) -> dict[str, Any]:
        metadata = manifest["metadata"]
        live = await self.client.read(path)
        if (refusal := why_not_applied(manifest, live)) is not None:
            raise ApiError(refusal.reason, refusal.message)
        if live is None:
            return await self._patch(path, {**manifest, "metadata": {**metadata, **ABSENT}})
        body = {**manifest, "metadata": {**metadata, "uid": live["metadata"]["uid"]}}
        if manifest["kind"] == "ControllerRevision":  # it lost its labels; its data is immutable
            body["data"] = live["data"]
        live = await self._disown(path, live)
        try:
            return await self._patch(path, body)
        except Invalid:
            if (patch := drift.repair(live, body)) is None:
                raise
            await self._repair(path, patch)
            return await self._disown(path, await self._patch(path, body))

    async def _patch(
        self, path: str, body: Manifest, *, manager: str = object_names.FIELD_MANAGER
    ) -> dict[str, Any]:
        """Send one apply, and take over the fields that another manager has."""
        query = {"fieldManager": manager, "force": "true"}
        return await self.client.call("PATCH", path, query=query, body=body, content=APPLY)

    async def _disown(self, path: str, live: dict[str, Any]) -> dict[str, Any]:
        """Give up what the repair's manager owns; return the object as it is then."""
        patch = drift.without_manager(live, REPAIR_MANAGER)
        return live if patch is None else await self._repair(path, patch)

    async def _repair(self, path: str, patch: Manifest) -> dict[str, Any]:
        query = {"fieldManager": REPAIR_MANAGER}
        return await self.client.call("PATCH", path, query=query, body=patch, content=MERGE)
