"""Lists all objects from time to time, because a watch can miss a deletion."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable

from pdcluster_operator.adapters.api_server.children import KubeApi
from pdcluster_operator.adapters.api_server.client import NotFound
from pdcluster_operator.adapters.api_server.kinds import WATCHED, Kind
from pdcluster_operator.adapters.api_server.watch_health import WatchHealth
from pdcluster_operator.api.labels import GROUP
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.errors import ApiError

log = logging.getLogger(__name__)

Namespace = str | None
"""A namespace; None for all of them."""

RETRY_SECONDS = 2.0
"""How long to wait before the next try, while nothing can be done yet."""
UNLISTED_SECONDS = 30.0
"""How often to try to list namespaces that could not be listed so far."""


class Sweeper:
    """Lists every watched kind into the control loop's store.

    Nothing is done in a namespace whose objects are not known yet: engines that a PrefillScaler
    has added would be deleted. One namespace that cannot be listed keeps no other from being worked
    in. Somebody may have deleted it, and the operator's rights with it.

    Args:
        namespaces: that are watched; all if there is none.
        swept: called each time when all namespaces were listed.
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
        self._namespaces: tuple[Namespace, ...] = tuple(namespaces) or (None,)
        self._unlisted: dict[Namespace, str] = dict.fromkeys(self._namespaces, "")  # and why
        self._period = period
        self._swept = swept
        self.done = False

    async def first(self) -> None:
        """Fill the store. Wait for the API server and for the CRD as long as it takes."""
        while not self.done:
            await self._sweep(list(self._unlisted))
            self.done = len(self._unlisted) < len(self._namespaces)
            if not self.done:
                await asyncio.sleep(RETRY_SECONDS)
        self._swept()

    async def run(self) -> None:
        """List about once a period. After a failure, wait for the next time."""
        clock = asyncio.get_running_loop().time
        due = clock() + self._pause()
        while True:
            left = due - clock()
            await asyncio.sleep(min(left, UNLISTED_SECONDS) if self._unlisted else left)
            if clock() < due:
                await self._sweep(list(self._unlisted))
                continue
            await self._sweep(self._namespaces)
            self._swept()
            due = clock() + self._pause()

    def _pause(self) -> float:
        return self._period * random.uniform(0.9, 1.1)  # noqa: S311 - no secret

    async def _sweep(self, namespaces: Iterable[Namespace]) -> None:
        for namespace in namespaces:
            try:
                await self._list_all(namespace)
            except ApiError as error:
                where = "" if namespace is None else f" in namespace {namespace}"
                if (why := str(error)) != self._unlisted[namespace]:
                    log.warning(
                        "Nothing is done for PDClusters%s until all objects are listed: %s",
                        where,
                        why,
                    )
                self._unlisted[namespace] = why
            else:
                self._unlisted.pop(namespace, None)
        self._loop.set_unlisted({one for one in self._unlisted if one is not None})

    async def _list_all(self, namespace: Namespace) -> None:
        """List each kind. One that cannot be listed keeps no other from it.

        Raises:
            ApiError: not all objects have ever been listed, and it is one of our own kinds, or one
                that each API server has.
        """
        for kind in WATCHED:
            try:
                await self._list(kind, namespace)
            except ApiError as error:
                if namespace in self._unlisted and (kind.group == GROUP or not kind.optional):
                    raise
                log.warning("%s: objects are not listed: %s", kind.name, error)

    async def _list(self, kind: Kind, namespace: Namespace) -> None:
        self._loop.store.begin(kind.name)
        began = self._health.now()
        served = True
        try:
            listed = await self._api.list(kind, (namespace,))
        except NotFound as error:
            if not kind.optional:
                raise NotFound(f"the CRD of {kind.name} is not installed: {error}") from error
            listed, served = [], False
        self._loop.set_served(kind.name, served=served)
        if namespace not in self._unlisted:  # else its watches are not started, or list it now, too
            self._health.listed(kind.name, listed, began, namespace)
        self._loop.sweep(kind.name, listed, namespace)
