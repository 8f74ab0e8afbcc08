"""Holds the Lease of each namespace that has PDClusters of this operator's class.

``plan/namespace_lease.py`` has the rules. A PDCluster is reconciled only while the Lease
of its namespace is held.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kinds import LEASE
from pdcluster_operator.plan import namespace_lease
from pdcluster_operator.runtime.interfaces import ApiError

log = logging.getLogger(__name__)

Manifest = Mapping[str, Any]
RETRY_SECONDS = 2.0


@dataclass(slots=True)
class _Claim:
    """The Lease of one namespace, as this process last read and wrote it."""

    namespace: str
    until: float = 0.0  # until when we may act
    version: str | None = None  # of the Lease as it was read last
    seen: float = 0.0  # when that version was first read
    held: namespace_lease.Holding = field(default_factory=namespace_lease.Holding)  # who had it
    other: str = ""  # the holder that was named in the log
    task: asyncio.Task[None] | None = None


@dataclass(eq=False)
class NamespaceLeases:
    """The Leases of one process. Used from one event loop.

    Args:
        client: for Leases alone. Behind a burst on a slow API server, or behind calls that hang,
            a renewal would come too late.
        me: the holder's name, which differs between processes that may run at the same time.
        renew: seconds between two renewals; as ``plan/namespace_lease.py`` says if None.
        needed: returns whether a namespace has PDClusters of this operator's class.
        acquired: called with a namespace when this process begins to hold its Lease.
    """

    client: KubeClient
    name: str
    me: str
    _: KW_ONLY
    needed: Callable[[str], bool] = lambda _: True
    acquired: Callable[[str], object] = lambda _: None
    renew: float | None = None
    retry: float = RETRY_SECONDS
    clock: Callable[[], float] = time.monotonic
    _claims: dict[str, _Claim] = field(default_factory=dict, init=False)

    def holds(self, namespace: str) -> bool:
        """Whether this process holds a namespace's Lease. The first call begins to acquire it."""
        claim = self._claims.get(namespace)
        if claim is None:
            claim = self._claims[namespace] = _Claim(namespace)
            claim.task = asyncio.create_task(self._keep(claim), name=f"lease-{namespace}")
        return self.clock() < claim.until

    async def stop(self) -> None:
        """Release all Leases, so that the next process need not wait."""
        claims = list(self._claims.values())
        tasks = [claim.task for claim in claims if claim.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._give_back(claim) for claim in claims))
        self._claims.clear()

    async def _keep(self, claim: _Claim) -> None:
        while self.needed(claim.namespace):
            try:
                await self._try(claim)
            except ApiError as error:
                log.warning("the Lease of namespace %s: %s", claim.namespace, error)
            except Exception:  # its PDClusters would be left to nobody for ever
                log.exception("the Lease of namespace %s cannot be read", claim.namespace)
            held = self.clock() < claim.until
            renew = self.renew or namespace_lease.renew_seconds(self._term())
            await asyncio.sleep(renew if held else self.retry)
            if not self.needed(claim.namespace):
                # If a PDCluster is created meanwhile, the loop goes on: nobody reconciles it yet.
                await self._give_back(claim)
        del self._claims[claim.namespace]

    async def _try(self, claim: _Claim) -> None:
        began = self.clock()
        live = await self.client.read(LEASE.path(claim.namespace, self.name))
        version = None if live is None else str(live["metadata"]["resourceVersion"])
        if version != claim.version:
            claim.version, claim.seen = version, began
        if live is not None:
            claim.held = namespace_lease.holding_of(live)
        # If somebody deleted it, its last holder may still act until its term ends.
        held = claim.held
        if not namespace_lease.may_hold(held, self.me, began - claim.seen):
            claim.until = 0.0
            if claim.other != held.holder:
                claim.other = held.holder
                log.warning(
                    "namespace %s: its PDClusters are left to the operator %s, which holds the "
                    "Lease %s. If both should work there, give one of them an operator class",
                    claim.namespace, held.holder, self.name,
                )  # fmt: skip
            return
        term = self._term()
        # If only the answer of this write is lost, others may act after the new term.
        claim.until = min(claim.until, began + namespace_lease.act_seconds(term))
        await self._write(claim, live, self.me, term)
        claim.held = namespace_lease.Holding(self.me, term)
        had = self.clock() < claim.until  # a slow renewal may have come too late
        claim.until, claim.other = began + namespace_lease.act_seconds(term), ""
        if not had:
            log.info("namespace %s: this operator works on its PDClusters now", claim.namespace)
            self.acquired(claim.namespace)

    async def _give_back(self, claim: _Claim) -> None:
        claim.until = 0.0
        try:
            live = await self.client.read(LEASE.path(claim.namespace, self.name))
            if namespace_lease.holding_of(live).holder == self.me:
                await self._write(claim, live, "", self._term())
        except ApiError as error:
            log.warning("the Lease of namespace %s is not given back: %s", claim.namespace, error)

    def _term(self) -> int:
        return namespace_lease.term_of(len(self._claims))

    async def _write(self, claim: _Claim, live: Manifest | None, holder: str, term: int) -> None:
        lease = namespace_lease.lease_manifest(
            live, claim.namespace, self.name, holder, time.time(), term
        )
        is_new = live is None  # else the API server compares the version that was read
        path = LEASE.path(claim.namespace, None if is_new else self.name)
        await self.client.call("POST" if is_new else "PUT", path, body=lease)
