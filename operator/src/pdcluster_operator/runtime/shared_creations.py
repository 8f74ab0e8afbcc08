"""An object that several PDClusters share is created once, although many need it at one moment.

A thousand PDClusters that are created together all need the connector's ConfigMap. It is large, and
the API server takes only the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdcluster_operator.plan.shared_connectors.connector_mounts import is_shared_connector
from pdcluster_operator.runtime.interfaces import Api, Manifest

Name = tuple[str, str]

MOST_REMEMBERED = 1000
"""Objects that were made here. Namespaces come and go; one that is forgotten costs a request."""


class SharedCreations:
    """What is being created now, and what was. Used from one event loop.

    Args:
        held: returns the object of this kind and name as it was last seen; None if there is none.
    """

    def __init__(self, api: Api, held: Callable[[Manifest], Manifest | None]) -> None:
        self._api = api
        self._held = held
        self._running: dict[Name, asyncio.Task[Manifest]] = {}
        self._made: dict[Name, str] = {}

    async def create(self, manifest: Manifest) -> Manifest | None:
        """Create the object, or wait until another call has; return it, or None if it was there.

        An object that is there counts only if it is the one that was made here. Whoever made
        another may have put something else into it, and the API server is asked.

        Raises:
            ApiError: it could not be created. All who wait get this error.
        """
        name = str(manifest["metadata"]["namespace"]), str(manifest["metadata"]["name"])
        if (running := self._running.get(name)) is None:
            if self._is_as_made(name, manifest):
                return None
            running = self._running[name] = asyncio.create_task(self._create(name, manifest))
            running.add_done_callback(lambda _: self._running.pop(name, None))
        return await asyncio.shield(running)  # who waits may be cancelled alone

    def _is_as_made(self, name: Name, manifest: Manifest) -> bool:
        """Whether it is there; not if somebody took its labels away, which has to be mended."""
        made, held = self._made.get(name), self._held(manifest)
        if not made or held is None or not is_shared_connector(held):
            return False
        return bool(held["metadata"].get("uid") == made)

    async def _create(self, name: Name, manifest: Manifest) -> Manifest:
        live = await self._api.apply(manifest)
        self._made[name] = str(live["metadata"].get("uid") or "")
        if len(self._made) > MOST_REMEMBERED:
            del self._made[next(iter(self._made))]
        return live
