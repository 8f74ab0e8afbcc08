"""Asks launchers for the state of their engines and links, and tells decode engines their peers.

The planner gets the last answer of each launcher. A launcher that does not answer has no entry:
its engine is unknown, which is not the same as failed. Each launcher is asked by a task of its
own, so one that hangs does not delay the others. A change wakes the cluster's reconcile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

from pdcluster_connector.protocol.launcher_documents import EngineReport, LinksReport
from pdcluster_operator.plan.launchers import Target
from pdcluster_operator.plan.types import PeerAssignment
from pdcluster_operator.runtime.errors import LauncherError
from pdcluster_operator.runtime.interfaces import Launchers
from pdcluster_operator.runtime.launcher_watch import LauncherWatch
from pdcluster_operator.runtime.queue import Key


class LauncherMonitor:
    """Follows every target's launcher; see :mod:`.launcher_watch`. Used from one event loop.

    Args:
        changed: called when something else is known of an engine or of its links.
        starting: called instead if the engine was not ready, and is not.
    """

    def __init__(
        self,
        launchers: Launchers,
        changed: Callable[[Key], None],
        *,
        starting: Callable[[Key], None] | None = None,
        period: float = 1.0,
    ) -> None:
        self._launchers = launchers
        self._changed = changed
        self._starting = starting or changed
        self._period = period
        self._watches: dict[Key, dict[str, LauncherWatch]] = {}
        self._since: dict[Key, float] = {}  # when this process began to follow each cluster
        self._unheard: dict[Key, set[str]] = {}  # engines of that moment, not heard yet
        self._releases: set[asyncio.Task[None]] = set()

    def follow(self, key: Key, targets: Iterable[Target]) -> None:
        """Poll exactly these engines of a cluster from now on."""
        wanted = {target.engine: target for target in targets}
        if key not in self._watches:
            self._since[key] = time.monotonic()
            self._unheard[key] = set(wanted)
        held = self._watches.setdefault(key, {})
        for engine in [name for name, watch in held.items() if wanted.get(name) != watch.target]:
            held.pop(engine).stop()
        for engine in wanted.keys() - held.keys():
            held[engine] = LauncherWatch(
                wanted[engine],
                self._launchers,
                self._period,
                lambda starts: (self._starting if starts else self._changed)(key),
            )

    def followed_seconds(self, key: Key) -> float:
        """Return how long this process has followed a cluster; 0 if it does not."""
        now = time.monotonic()
        return now - self._since.get(key, now)

    def all_heard(self, key: Key) -> bool:
        """Whether each engine that was there at the beginning has answered or missed its polls.

        It stays true once it was true: engines that come later are not waited for. The cluster
        is woken when it becomes true.
        """
        watches = self._watches.get(key, {})
        unheard = self._unheard.get(key, set())
        unheard -= {name for name in unheard if name not in watches or watches[name].heard}
        return not unheard

    def forget(self, key: Key) -> None:
        """Stop polling a cluster."""
        self._since.pop(key, None)
        self._unheard.pop(key, None)
        for watch in self._watches.pop(key, {}).values():
            watch.stop()

    def dismiss(self, key: Key) -> None:
        """Stop polling a cluster that was deleted. Its engines need not wait for routers."""
        for watch in self._watches.get(key, {}).values():
            if watch.report is not None and watch.report.routed:
                task = asyncio.create_task(self._release(watch.target))
                self._releases.add(task)
                task.add_done_callback(self._releases.discard)
        self.forget(key)

    async def _release(self, target: Target) -> None:
        with contextlib.suppress(LauncherError):  # it waits no longer than a minute
            await self._launchers.tell_routed(target, routed=False)

    def assign(self, key: Key, peers: Iterable[PeerAssignment]) -> None:
        """Send each decode engine its peers when they change, and when the engine restarts."""
        for assignment in peers:
            if (watch := self._watches.get(key, {}).get(assignment.decode)) is not None:
                watch.assign(assignment)

    def route(self, key: Key, routed: AbstractSet[str]) -> None:
        """Tell each engine of a cluster whether routers may send it requests, when that changes.

        Args:
            routed: logical ids of the engines that may get some.
        """
        for engine, watch in self._watches.get(key, {}).items():
            watch.route(routed=engine in routed)

    def engines(self, key: Key) -> Mapping[str, EngineReport]:
        """Return what each reachable engine of a cluster last said."""
        return {
            engine: watch.report
            for engine, watch in self._watches.get(key, {}).items()
            if watch.report is not None
        }

    def links(self, key: Key) -> Mapping[str, LinksReport]:
        """Return what each reachable decode engine of a cluster last said of its links."""
        return {
            engine: watch.links
            for engine, watch in self._watches.get(key, {}).items()
            if watch.links is not None
        }

    async def stop(self) -> None:
        """End all polling."""
        tasks = [watch.task for watches in self._watches.values() for watch in watches.values()]
        for key in list(self._watches):
            self.forget(key)
        await asyncio.gather(*tasks, *self._releases, return_exceptions=True)
