"""Carries the steps of a plan out: stage after stage, and the steps of a stage side by side.

It remembers what it wrote into Secrets. They are neither listed nor watched, because nobody is
given that right, and to read one for each plan would be most of what a cluster at rest costs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from pdcluster_operator.plan.connector_mounts import is_shared_connector
from pdcluster_operator.plan.model import (
    Apply,
    Event,
    HeldCertificates,
    Step,
    TicketKey,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
)
from pdcluster_operator.plan.stages import stages
from pdcluster_operator.runtime.interfaces import Api, Manifest
from pdcluster_operator.runtime.queue import Key
from pdcluster_operator.runtime.rewrite_notes import RewriteNotes
from pdcluster_operator.runtime.shared_creations import SharedCreations
from pdcluster_operator.runtime.ticket_keys import what_is_held

log = logging.getLogger(__name__)

SIDE_BY_SIDE = 8
"""Calls at once for one cluster. Other clusters' changes do not wait for a large one."""
SECRET_SECONDS = 60.0
"""How long a Secret is believed to be as it was read. One that somebody deletes is made again."""


class _LeaseLostError(Exception):
    """Another operator may have begun to write."""


T = TypeVar("T")


class _Known(NamedTuple, Generic[T]):
    uid: str
    content: T
    since: float

    def is_of(self, uid: str, now: float) -> bool:
        return self.uid == uid and now - self.since < SECRET_SECONDS


class Executor:
    """Performs steps through the port, and decides nothing."""

    def __init__(
        self,
        api: Api,
        rewrites: RewriteNotes,
        may_write: Callable[[Key], bool],
        clock: Callable[[], float] = time.monotonic,
        held: Callable[[Manifest], Manifest | None] = lambda _: None,
    ) -> None:
        self._api = api
        self._rewrites = rewrites
        self._may_write = may_write
        self._clock = clock
        self._shared = SharedCreations(api, held)
        self._ticket_keys: dict[Key, _Known[TicketKey]] = {}
        self._certificates: dict[Key, _Known[HeldCertificates]] = {}

    async def ticket_key(self, key: Key, uid: str) -> TicketKey | None:
        """Return what the cluster's Secret says beside its keys; see ``Api.read_ticket_key``."""
        known = self._ticket_keys.get(key)
        if known and known.is_of(uid, self._clock()):
            return known.content
        return self._note(key, uid, await self._api.read_ticket_key(key, uid))

    async def certificates(self, key: Key, uid: str) -> HeldCertificates:
        """Return what the Secret with the certificates says; see ``Api.read_certificates``.

        It is also remembered that there is no such Secret: most clusters never have one.
        """
        known = self._certificates.get(key)
        if known and known.is_of(uid, self._clock()):
            return known.content
        held = await self._api.read_certificates(key, uid)
        self._certificates[key] = _Known(uid, held, self._clock())
        return held

    def forget(self, key: Key) -> None:
        """Drop what is known of a cluster that is gone."""
        self._ticket_keys.pop(key, None)
        self._certificates.pop(key, None)

    async def perform(
        self, key: Key, cluster: Mapping[str, Any], steps: Iterable[Step], events: list[Event]
    ) -> bool:
        """Perform the steps; return False if the cluster is no longer ours, or the one observed.

        Events of the steps themselves are added to ``events``.

        Raises:
            ApiError: of the first step that failed. The other steps of its stage were tried.
        """
        todo = stages(steps)
        if todo and not self._may_write(key):
            return False
        creating = any(_creates(step) for stage in todo for step in stage)
        # The store may still hold a cluster that is gone. Its children would be created again.
        if creating and await self._api.read_uid(key) != cluster["metadata"]["uid"]:
            log.info("%s: the cluster is gone, or was created again; nothing was done", key)
            return False
        for stage in todo:
            bound = asyncio.Semaphore(SIDE_BY_SIDE)
            ended = await asyncio.gather(
                *(self._one(key, step, bound, events) for step in stage), return_exceptions=True
            )
            if any(isinstance(one, _LeaseLostError) for one in ended):
                log.warning("%s: the Lease of its namespace is lost; nothing more is done", key)
                return False
            for error in ended:
                if error is not None:
                    raise error
        return True

    async def _one(
        self, key: Key, step: Step, bound: asyncio.Semaphore, events: list[Event]
    ) -> None:
        async with bound:
            if not self._may_write(key):
                raise _LeaseLostError
            if isinstance(step, WriteTicketKey):
                self._ticket_keys.pop(key, None)
                await self._api.write_ticket_key(step)
                uid = str(step.manifest["metadata"]["ownerReferences"][0]["uid"])
                self._note(key, uid, what_is_held(step.manifest))
            elif isinstance(step, WriteCertificates):
                self._certificates.pop(key, None)  # the next plan reads what was written
                await self._api.write_certificates(step)
            elif isinstance(step, Apply):
                answer = await self._apply(step)
                if answer is None:
                    return
                if (news := self._rewrites.note(key, step.manifest, answer)) is not None:
                    events.append(news)
            elif isinstance(step, TryOut):
                await self._api.try_out(step)
                await self._api.apply(step.stored)
            else:
                await self._api.delete(step)
        log.info("%s: %s: %s", key, type(step).__name__, step.why)

    async def _apply(self, step: Apply) -> Manifest | None:
        """Apply a child; return it, or None if it has come meanwhile."""
        if not step.uid and is_shared_connector(step.manifest):
            return await self._shared.create(step.manifest)
        return await self._api.apply(step.manifest, step.uid)

    def _note(self, key: Key, uid: str, ticket_key: TicketKey | None) -> TicketKey | None:
        if ticket_key is None:
            self._ticket_keys.pop(key, None)
        else:
            self._ticket_keys[key] = _Known(uid, ticket_key, self._clock())
        return ticket_key


def _creates(step: Step) -> bool:
    if isinstance(step, Apply):
        return not step.uid
    return isinstance(step, WriteTicketKey | WriteCertificates | TryOut)
