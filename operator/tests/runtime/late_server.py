"""An API server whose answers, events of watches and lists arrive late and in random orders."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from pdcluster_operator.adapters.api_server.kinds import BY_NAME, WATCHED, Kind, slim
from pdcluster_operator.local.api_server import LocalApi
from pdcluster_operator.plan.name_conflicts import why_not_applied
from pdcluster_operator.plan.objects.ownership import controller_uid
from pdcluster_operator.plan.renewals import rotation_of
from pdcluster_operator.plan.types import (
    ConnectorBundle,
    Delete,
    HeldCertificates,
    TryOut,
    WriteTicketKey,
)
from pdcluster_operator.runtime.cluster_secrets import with_a_new_key
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.interfaces import ApiError, Conflict, Key

NAMESPACE = "ns"
KINDS = [kind for kind in WATCHED if not kind.optional]
CONNECTOR = ConnectorBundle("ab" * 32, b"zip")
CERTIFICATES = HeldCertificates("authority")
DELAYS = (0.0, 0.001, 0.01, 0.1, 1.0)
Manifest = dict[str, Any]


class Server(LocalApi):
    """A deletion has a version of its own, as on a real API server."""

    @property
    def version(self) -> str:
        return str(self._version)

    def _remove(self, live: Manifest) -> None:
        self._version += 1
        metadata = {**live["metadata"], "resourceVersion": self.version}
        super()._remove({**live, "metadata": metadata})

    def everything(self) -> list[Manifest]:
        return [one for kind in KINDS for one in self.list(kind.name)]


class Port:
    """The operator's calls: each takes a while to arrive, and its answer another one."""

    def __init__(self, server: Server, random: Random) -> None:
        self.server, self.random = server, random
        self.loop_of: Callable[[], ControlLoop]

    async def read(self, kind: str, namespace: str, name: str) -> Any:
        return await self._get(kind, name)

    async def read_ticket_key(self, key: Key, uid: str) -> str | None:
        live = await self._get("Secret", f"{key.name}-ticket-key")
        if live is not None and controller_uid(live) != uid:
            raise ApiError("NameConflict", "the Secret of one that is gone")
        return live and rotation_of(live)

    async def write_ticket_key(self, step: WriteTicketKey) -> None:
        live = await self._get("Secret", step.manifest["metadata"]["name"])
        if live is not None:
            raise Conflict("the Secret is there already")
        self.server.apply(with_a_new_key(step, None))

    async def read_certificates(self, key: Key, uid: str) -> HeldCertificates:
        return CERTIFICATES

    async def apply(self, manifest: Mapping[str, Any], uid: str = "") -> Mapping[str, Any]:
        await self._travel()
        live = self.server.get(manifest["kind"], NAMESPACE, manifest["metadata"]["name"])
        refusal = why_not_applied(manifest, live)
        if refusal is not None and uid != (live["metadata"]["uid"] if live else ""):
            raise ApiError(refusal.reason, refusal.message)
        answer = self.server.apply(copy.deepcopy(dict(manifest)))
        await self._remember(answer)
        return answer

    async def try_out(self, step: TryOut) -> None:
        await self._travel()

    async def delete(self, step: Delete) -> None:
        assert isinstance(step, Delete)
        await self._travel()
        seen = {"uid": step.uid, "resource_version": step.resource_version}
        self.server.delete(step.kind, step.namespace, step.name, **seen)
        await self._travel()

    async def write_status(
        self, key: Key, uid: str, status: Mapping[str, Any], version: str = ""
    ) -> None:
        await self._travel()
        if self.server.set_status("PDCluster", *key, dict(status), uid):
            await self._remember(self.server.get("PDCluster", *key))

    async def _get(self, kind: str, name: str) -> Any:
        await self._travel()
        live = self.server.get(kind, NAMESPACE, name)
        await self._travel()
        return live

    async def _remember(self, live: Any) -> None:
        await self._travel()
        self.loop_of().remember(slim(live, BY_NAME[live["kind"]]))

    async def _travel(self) -> None:
        await asyncio.sleep(self.random.choice(DELAYS))


class Watches:
    """One for each kind. Its events come late; in a gap they are lost, and a LIST follows."""

    def __init__(self, server: Server, loop: ControlLoop, random: Random) -> None:
        self.server, self.loop, self.random = server, loop, random
        self.events: dict[str, asyncio.Queue[tuple[str, Manifest]]] = {
            kind.name: asyncio.Queue() for kind in KINDS
        }
        server.watch(self._happened)
        self.tasks = [asyncio.create_task(self._watch(kind)) for kind in KINDS]

    def _happened(self, event: str, manifest: Manifest) -> None:
        if manifest["kind"] in self.events:
            self.events[manifest["kind"]].put_nowait((event, manifest))

    def lose(self, kind: str) -> None:
        self._forget(kind)
        self.events[kind].put_nowait(("GAP", {}))

    def _forget(self, kind: str) -> None:
        while not self.events[kind].empty():
            self.events[kind].get_nowait()

    async def _watch(self, kind: Kind) -> None:
        while True:
            event, manifest = await self.events[kind.name].get()
            await asyncio.sleep(self.random.choice(DELAYS))
            if event == "GAP":
                await self._list(kind)
            else:
                self.loop.see(event, slim(manifest, kind))

    async def _list(self, kind: Kind) -> None:
        self._forget(kind.name)
        items, version = self.server.list(kind.name), self.server.version
        await asyncio.sleep(self.random.choice(DELAYS))
        names = {(NAMESPACE, one["metadata"]["name"]) for one in items}
        for one in items:
            self.loop.see("MODIFIED", slim(one, kind))
        for one in self.loop.store.listed(kind.name, None, names, version):
            self.loop.see("DELETED", one)
