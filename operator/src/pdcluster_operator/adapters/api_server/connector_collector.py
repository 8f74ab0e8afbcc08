"""Deletes the ConfigMaps with a connector that nothing mounts any more.

``plan/connectors.py`` decides which. It needs no Lease, because a
namespace without PDClusters has none. Several operators may do the same at once: each write is only
for the version that was seen.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from pdcluster_operator.adapters.api_server.children import KubeApi
from pdcluster_operator.plan import connectors
from pdcluster_operator.plan.types import Delete, Manifest
from pdcluster_operator.runtime.interfaces import ApiError
from pdcluster_operator.runtime.store import Store

log = logging.getLogger(__name__)

PERIOD_SECONDS = 60.0


class ConnectorCollector:
    """Checks all such ConfigMaps once a period."""

    def __init__(
        self,
        store: Store,
        api: KubeApi,
        *,
        clock: Callable[[], float] = time.time,
        period: float = PERIOD_SECONDS,
        keep: float = connectors.KEEP_SECONDS,
    ) -> None:
        self._store, self._api, self._clock = store, api, clock
        self._period, self._keep = period, keep

    async def run(self) -> None:
        """Collect until the task is cancelled. What failed is tried again in the next period."""
        while True:
            await asyncio.sleep(self._period)
            await self.collect()

    async def collect(self) -> None:
        """Check each ConfigMap once."""
        for live in self._store.all_connectors():
            try:
                await self._one(live)
            except ApiError as error:
                log.info("ConfigMap %s: %s", live["metadata"]["name"], error)
            except Exception:  # of one namespace's objects; the other namespaces go on
                log.exception("ConfigMap %s is left as it is", live["metadata"]["name"])

    async def _one(self, live: Manifest) -> None:
        namespace, name = str(live["metadata"]["namespace"]), str(live["metadata"]["name"])
        step = self._step(live, mounted=self._store.is_mounted(namespace, name))
        if isinstance(step, Delete):  # the store may be stale, and holds only our objects
            there = await self._api.list_mounting(namespace)
            step = self._step(
                live, mounted=any(name in connectors.shared_connectors_of(one) for one in there)
            )
        if step is None:
            return
        if isinstance(step, connectors.MarkConnector):
            await self._api.mark_connector(step)
        else:
            await self._api.delete(step)
        log.info("%s/%s: %s: %s", namespace, name, type(step).__name__, step.why)

    def _step(self, live: Manifest, *, mounted: bool) -> connectors.MarkConnector | Delete | None:
        now = self._clock()
        return connectors.step_for_connector(live, mounted=mounted, now=now, keep=self._keep)
