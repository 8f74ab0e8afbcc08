"""Keeps what one page shows up to date while somebody looks at it.

All viewers of a page share one board: what is read and rendered does not grow with them.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from pdcluster_operator.cli.ui import page, series
from pdcluster_operator.cli.ui.readers import MOST_CLUSTERS, Reader
from pdcluster_operator.runtime.interfaces import ApiError, Key

FRESH_SECONDS = 1.0
"""A page that was read within this time is shown as it is."""

Render = Callable[[Mapping[str, Any]], dict[str, str]]
"""Returns the HTML of each section, by its name."""


class Board:
    """The sections of one page.

    Args:
        key: of a PDCluster; None for the list of all.
    """

    def __init__(self, reader: Reader, key: Key | None, render: Render) -> None:
        self._reader, self._key, self._render = reader, key, render
        self._history = series.History()
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._read = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._context: dict[str, Any] = {}
        self.viewers = 0
        self.sections: dict[str, str] = {}

    @property
    def last_used(self) -> float:
        """When it was read last, by the monotonic clock."""
        return self._read

    async def fresh(self) -> bool:
        """Read unless that was done just now; return whether there is such a PDCluster."""
        async with self._lock:
            if time.monotonic() - self._read > FRESH_SECONDS:
                await self._look()
        return bool(self.sections)

    async def news(self, shown: Mapping[str, str], seconds: float) -> dict[str, str]:
        """Wait for sections that differ from those shown; none if nothing changes in this time."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self._unlike(shown))
        except TimeoutError:
            return {}
        return self._unlike(shown)

    def _unlike(self, shown: Mapping[str, str]) -> dict[str, str]:
        return {name: html for name, html in self.sections.items() if shown.get(name) != html}

    async def __aenter__(self) -> Self:
        """Begin to watch: the first viewer starts the polls."""
        self.viewers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._poll(), name="board")
        return self

    async def __aexit__(self, *_: object) -> None:
        """End to watch: the last viewer ends the polls."""
        self.viewers -= 1
        if not self.viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _poll(self) -> None:
        while True:
            await self.fresh()
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(self._reader.period)

    async def _look(self) -> None:
        """Read and render. What cannot be read any more keeps its last state, under a banner."""
        try:
            found = await (self._list() if self._key is None else self._cluster(self._key))
            gone = "" if found or not self._context else "It is gone: somebody deleted it."
            self._show(found or self._context, gone)
        except ApiError as error:
            self._show(self._context, f"The API server: {error}")
        except Exception as error:  # noqa: BLE001 - else the poll ends, and the page stays as it is
            self._show(self._context, f"A fault of pdcluster ui ({type(error).__name__}: {error}).")
        self._read = time.monotonic()

    def _show(self, context: dict[str, Any], problem: str) -> None:
        if context or problem:
            self.sections = self._render({**context, "problem": problem, "now": time.time()})
        self._context = context

    async def _list(self) -> dict[str, Any]:
        clusters, more = await self._reader.clusters()
        rows = sorted(
            (page.row_of(one, time.time()) for one in clusters),
            key=lambda row: (row.namespace, row.name),
        )
        return {"rows": rows, "more": MOST_CLUSTERS if more else 0}

    async def _cluster(self, key: Key) -> dict[str, Any]:
        found, notes = await self._reader.objects(key)
        if found is None:
            return {}
        readings, problem = await self._reader.readings(found.pods)
        self._history.add(time.monotonic(), readings)
        return {
            "page": page.page_of(found, notes),
            "traffic_now": self._history.traffic(),
            "silent": problem,
        }
