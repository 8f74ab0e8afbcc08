"""Carries out the steps of a plan: stage after stage, and the steps of one stage concurrently.

A step that fails stops only those that need it. The executor decides nothing: the planner says what
to do, and the reconciler whether it may be done.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.plan import types
from pdcluster_operator.plan.objects.drift import rewrite_of, rewritten_event
from pdcluster_operator.runtime.cluster_secrets import ClusterSecrets
from pdcluster_operator.runtime.interfaces import ApiError, ApiServer, Key

log = logging.getLogger(__name__)

Manifest = Mapping[str, Any]
SIDE_BY_SIDE = 4
"""Concurrent calls for one cluster. With those of all clusters that are reconciled at once, there
are at most 96: the API server has other clients, too."""
LEASE_CHECK_SECONDS = 1.0
"""How soon a step that is under way is cancelled after the Lease was lost."""
STOP_ALL = frozenset({"ApiServerUnreachable", "NamespaceTerminating", "TooManyRequests"})
"""Reasons for which every other step would fail, too."""


class _LeaseLostError(Exception):
    """Another operator may have begun to write."""


@dataclass(eq=False)
class Executor:
    """Performs plan steps by calls of ``ApiServer``.

    Args:
        may_write: whether this process holds the Lease of a cluster's namespace.
    """

    api_server: ApiServer
    secrets: ClusterSecrets
    may_write: Callable[[Key], bool]

    def __post_init__(self) -> None:
        self._rewrites: dict[Key, dict[tuple[str, str], types.Rewrite]] = {}

    def rewrites(self, key: Key) -> types.Rewrites:
        """Return what something else, such as a webhook, changed in the children it applied.

        They are remembered for as long as the process runs. A process that has just started applies
        each such child once more. A policy may then write another value, which ends no engine.
        """
        return dict(self._rewrites.get(key, {}))

    def forget(self, key: Key) -> None:
        """Forget the rewrites of a cluster that is gone."""
        self._rewrites.pop(key, None)

    async def perform(
        self, key: Key, steps: Iterable[types.Step], events: list[types.Event]
    ) -> bool:
        """Perform the steps; return False if the Lease is not held, or was lost meanwhile.

        Events of the steps themselves are added to ``events``.

        Raises:
            ApiError: of the first step that failed, or that a revision is refused: the planner
                reads it. Others were tried unless they need it, or the server or namespace is gone.
        """
        failed: list[ApiError] = []
        missing: list[types.Step] = []  # those that failed, and those that were left out
        todo = types.stages(steps)
        if todo and not self.may_write(key):
            return False
        for planned in todo:
            out = [one for one in planned if any(types.needs(one, of) for of in missing)]
            stage = [one for one in planned if one not in out]
            missing += out
            bound = asyncio.Semaphore(SIDE_BY_SIDE)
            done: list[str] = []
            ended = await self._while_lease_is_held(
                key, *(self._one(key, step, bound, events, done) for step in stage)
            )
            if done:  # a line for each of a new cluster's children would cost as much as a request
                log.info("%s: %s", key, "; ".join(done))
            if any(isinstance(one, _LeaseLostError) for one in ended):
                log.warning("%s: the Lease of its namespace is lost; nothing more is done", key)
                return False
            for step, error in zip(stage, ended, strict=True):
                if isinstance(error, ApiError) and error.reason not in STOP_ALL:
                    failed.append(error)
                    missing.append(step)
                elif error is not None:
                    raise error
        if failed:
            error = min(failed, key=lambda one: (one.passing, one.reason != "TemplateRefused"))
            error.lacks = types.creates(missing)
            raise error
        return True

    async def _while_lease_is_held(
        self, key: Key, *steps: Coroutine[Any, Any, None]
    ) -> list[BaseException | None]:
        """Return how each step ended. When the Lease is lost, the others are cancelled.

        A call to an API server that is overloaded may wait for a minute before it is sent.
        """
        work = [asyncio.create_task(step) for step in steps]
        waiting = set(work)
        try:
            while waiting:
                _, waiting = await asyncio.wait(waiting, timeout=LEASE_CHECK_SECONDS)
                if waiting and not self.may_write(key):
                    break
        finally:
            for one in waiting:
                one.cancel()
        ended = await asyncio.gather(*work, return_exceptions=True)
        return [*ended, *(_LeaseLostError() for _ in waiting)]

    async def _one(
        self,
        key: Key,
        step: types.Step,
        bound: asyncio.Semaphore,
        events: list[types.Event],
        done: list[str],
    ) -> None:
        async with bound:
            if not self.may_write(key):
                raise _LeaseLostError
            if isinstance(step, types.WriteTicketKey):
                await self.secrets.write_ticket_key(key, step)
            elif isinstance(step, types.WriteCertificates):
                await self.secrets.write_certificates(key, step)
            elif isinstance(step, types.Apply):
                answer = await self.api_server.apply(step.manifest, step.uid)
                events += self._note(key, step.manifest, answer)
            elif isinstance(step, types.TryOut):
                await self.api_server.try_out(step)
                if not step.uid:
                    await self.api_server.apply(step.manifest)
            else:
                await self.api_server.delete(step)
        done.append(f"{type(step).__name__}: {step.why}")

    def _note(self, key: Key, desired: Manifest, answer: Manifest) -> Iterator[types.Event]:
        """Compare an apply with its answer; yield an event if other fields were rewritten."""
        held = self._rewrites.setdefault(key, {})
        child = str(desired["kind"]), str(desired["metadata"]["name"])
        before, found = held.pop(child, None), rewrite_of(answer, desired)
        if found is None:
            return
        held[child] = found
        paths = [path for path, _ in found.fields]
        if before is None or [path for path, _ in before.fields] != paths:
            yield rewritten_event(desired, found)
