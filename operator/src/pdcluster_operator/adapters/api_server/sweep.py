"""Lists all objects from time to time, because a watch can miss a deletion."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection

from pdcluster_operator.adapters.api_server.children import KubeApi
from pdcluster_operator.adapters.api_server.client import NotFound
from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER, WATCHED, Kind
from pdcluster_operator.adapters.api_server.watch_health import WatchHealth
from pdcluster_operator.api.labels import GROUP
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.errors import ApiError

log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0


class Sweeper:
    """Lists every watched kind into the control loop's store.

    Args:
        swept: called after each time.
    """

    def __init__(
        self,
        api: KubeApi,
        loop: ControlLoop,
        health: WatchHealth,
        namespaces: Collection[str],
        period: float,
        swept: Callable[[], None] = lambda: None,
    ) -> None:
        self._api = api
        self._loop = loop
        self._health = health
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._period = period
        self._swept = swept
        self.done = False

    async def first(self) -> None:
        """Fill the store. Wait for the API server and for the CRD as long as it takes."""
        while not self.done:
            try:
                await self._sweep(first=True)
            except NotFound as error:
                log.warning("the CRD of %s is not installed: %s", PDCLUSTER.name, error)
            except ApiError as error:
                log.warning("waiting for the API server: %s", error)
            else:
                self.done = True
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def run(self) -> None:
        """List about once a period. After a failure, wait for the next time."""
        while True:
            await asyncio.sleep(self._period * random.uniform(0.9, 1.1))  # noqa: S311 - no secret
            await self._sweep()

    async def _sweep(self, *, first: bool = False) -> None:
        """List each kind. One that cannot be listed keeps no other from it.

        Raises:
            ApiError: the first sweep cannot list our own kinds, or one that each API server has.
                Without a PrefillScaler that is there, prefill engines would be deleted.
        """
        for kind in WATCHED:
            try:
                await self._list(kind)
            except ApiError as error:
                if first and (kind.group == GROUP or not kind.optional):
                    raise
                log.warning("%s: objects are not listed: %s", kind.name, error)
        self._swept()

    async def _list(self, kind: Kind) -> None:
        self._loop.store.begin(kind.name)
        began = self._health.now()
        served = True
        try:
            listed = await self._api.list(kind, self._namespaces)
        except NotFound:
            if not kind.optional:
                raise
            listed, served = [], False
        self._loop.set_served(kind.name, served=served)
        self._health.listed(kind.name, listed, began)
        self._loop.sweep(kind.name, listed)
