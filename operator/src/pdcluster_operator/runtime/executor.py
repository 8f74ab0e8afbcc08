"""Carries the steps of a plan out: stage after stage, and the steps of a stage side by side.

It remembers what it wrote into Secrets. They are neither listed nor watched, because nobody is
given that right, and to read one for each plan would be most of what a cluster at rest costs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

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
from pdcluster_operator.plan.shared_connectors.connector_mounts import is_shared_connector
from pdcluster_operator.plan.stages import stages
from pdcluster_operator.runtime.interfaces import Api, Manifest
from pdcluster_operator.runtime.queue import Key
from pdcluster_operator.runtime.rewrite_notes import RewriteNotes
from pdcluster_operator.runtime.shared_creations import SharedCreations
from pdcluster_operator.runtime.ticket_keys import what_is_held

log = logging.getLogger(__name__)

SIDE_BY_SIDE = 8
"""Calls at once for one cluster. Other clusters' changes do not wait for a large one."""
SECRET_SECONDS = 240.0
"""How long a Secret is remembered. After that it is read again, and made again if it is gone.

The operator looks at each cluster less often than that, so it notices each time.
"""


LEASE_CHECK_SECONDS = 1.0
"""How soon a step that is under way notices that the Lease is lost."""
JUST_SECONDS = 5.0
FIRST_SECONDS = 300.0
"""A cluster that the API server reported within this time is not read again."""


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
    """Performs plan steps by calls of ``Api``. It decides nothing."""

    def __init__(
        self,
        api: Api,
        rewrites: RewriteNotes,
        may_write: Callable[[Key], bool],
        clock: Callable[[], float] = time.monotonic,
        held: Callable[[Manifest], Manifest | None] = lambda _: None,
        reported_seconds: Callable[[Key, str], float] = lambda _, __: math.inf,
    ) -> None:
        self._api = api
        self._rewrites = rewrites
        self._may_write = may_write
        self._clock = clock
        self._shared = SharedCreations(api, held)
        self._reported_seconds = reported_seconds
        self._created: dict[Key, str] = {}  # UIDs of the clusters that got children from us
        self._ticket_keys: dict[Key, _Known[TicketKey]] = {}
        self._certificates: dict[Key, _Known[HeldCertificates]] = {}
        self._no_certificates: HeldCertificates | None = None

    def knows(self, key: Key, uid: str) -> bool:
        """Whether what both Secrets say is known, so that nothing has to be read."""
        now = self._clock()
        secrets = self._ticket_keys.get(key), self._certificates.get(key)
        return all(known is not None and known.is_of(uid, now) for known in secrets)

    async def ticket_key(self, key: Key, uid: str, *, new: bool = False) -> TicketKey | None:
        """Return what the cluster's Secret says beside its keys; see ``Api.read_ticket_key``.

        Args:
            new: the cluster has no children yet, so the Secret is not read. The operator only
                creates it, and the API server refuses that if there is one. The next plan sees
                children, and then the Secret is read.
        """
        known = self._ticket_keys.get(key)
        if known and known.is_of(uid, self._clock()):
            return known.content
        if new:
            return None
        return self._note(key, uid, await self._api.read_ticket_key(key, uid))

    async def certificates(self, key: Key, uid: str, *, new: bool = False) -> HeldCertificates:
        """Return what the Secret with the certificates says; see ``Api.read_certificates``.

        It is also remembered that there is no such Secret: most clusters never have one.

        Args:
            new: the cluster has no children yet, so no engine has a certificate.
        """
        known = self._certificates.get(key)
        if known and known.is_of(uid, self._clock()):
            return known.content
        held = self._no_certificates if new else None
        if held is None:
            held = await self._api.read_certificates(key, uid)
        if held.issue is None:
            self._no_certificates = held
        self._certificates[key] = _Known(uid, held, self._clock())
        return held

    def forget(self, key: Key) -> None:
        """Drop what is known of a cluster that is gone."""
        self._created.pop(key, None)
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
        if creating and not await self._is_there(key, str(cluster["metadata"]["uid"])):
            log.info("%s: the cluster is gone, or was created again; nothing was done", key)
            return False
        for stage in todo:
            bound = asyncio.Semaphore(SIDE_BY_SIDE)
            done: list[str] = []
            ended = await self._while_ours(
                key, *(self._one(key, step, bound, events, done) for step in stage)
            )
            if done:  # a line for each of a new cluster's children would cost as much as a request
                log.info("%s: %s", key, "; ".join(done))
            if any(isinstance(one, _LeaseLostError) for one in ended):
                log.warning("%s: the Lease of its namespace is lost; nothing more is done", key)
                return False
            for error in ended:
                if error is not None:
                    raise error
        return True

    async def _while_ours(
        self, key: Key, *steps: Coroutine[Any, Any, None]
    ) -> list[BaseException | None]:
        """Return how each step ended. Without the Lease, they are cancelled.

        A call to an API server that is overloaded may wait for a minute before it is sent.
        """
        work = [asyncio.create_task(step) for step in steps]
        waiting = set(work)
        try:
            while waiting:
                _, waiting = await asyncio.wait(waiting, timeout=LEASE_CHECK_SECONDS)
                if waiting and not self._may_write(key):
                    break
        finally:
            for one in waiting:
                one.cancel()
        ended = await asyncio.gather(*work, return_exceptions=True)
        return [*ended, *(_LeaseLostError() for _ in waiting)]

    async def _is_there(self, key: Key, uid: str) -> bool:
        """Whether the cluster is still there: the store may hold one that is gone.

        The API server is not asked if it has just reported the cluster. For the first children, a
        report of some minutes ago is enough. If it was wrong, Kubernetes' garbage collector deletes
        these children, and the next time the API server is asked.
        """
        limit = JUST_SECONDS if self._created.get(key) == uid else FIRST_SECONDS
        self._created[key] = uid
        return self._reported_seconds(key, uid) < limit or await self._api.read_uid(key) == uid

    async def _one(
        self,
        key: Key,
        step: Step,
        bound: asyncio.Semaphore,
        events: list[Event],
        done: list[str],
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
                known = self._certificates.pop(key, None)
                held = await self._api.write_certificates(step)
                if known is not None:
                    self._certificates[key] = _Known(known.uid, held, self._clock())
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
        done.append(f"{type(step).__name__}: {step.why}")

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
