"""Asks launchers for the state of their engines and links, and tells decode engines their peers.

The planner gets the last answer of each launcher. A launcher that does not answer has no entry:
its engine is unknown, which is not the same as failed. Each launcher is asked by a task of its
own, so one that hangs does not delay the others. A change wakes the cluster's reconcile.

Between two polls the task waits until the launcher says that something changed. A launcher of a
version that cannot say so is polled every period.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.plan.launchers import Target, is_unreachable, knows_other_peers
from pdcluster_operator.plan.model import PeerAssignment
from pdcluster_operator.plan.reports import EngineReport, LinksReport
from pdcluster_operator.runtime.errors import LauncherError
from pdcluster_operator.runtime.interfaces import Launchers
from pdcluster_operator.runtime.queue import Key

log = logging.getLogger(__name__)


CHECK_SECONDS = 60.0
"""How often a launcher that has no news is polled all the same."""


class LauncherMonitor:
    """Polls every target when it has news, at most once a period. Used from one event loop."""

    def __init__(
        self, launchers: Launchers, changed: Callable[[Key], None], *, period: float = 1.0
    ) -> None:
        self._launchers = launchers
        self._changed = changed
        self._period = period
        self._watches: dict[Key, dict[str, _Watch]] = {}
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
            held[engine] = _Watch(
                wanted[engine], self._launchers, self._period, lambda: self._changed(key)
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


class _Watch:
    """The polling of one engine."""

    def __init__(
        self, target: Target, launchers: Launchers, period: float, changed: Callable[[], None]
    ) -> None:
        self.target = target
        self.report: EngineReport | None = None
        self.links: LinksReport | None = None
        self.peers: PeerAssignment | None = None
        self.routed: bool | None = None  # None until a plan says
        self.heard = False  # whether it has answered, or has missed its polls
        self._launchers = launchers
        self._period = period
        self._changed = changed
        self._misses = 0
        self._said = ""  # why it does not answer, as the log has it
        self._refused = ""  # why it was not told of routers, as the log has it
        self._told: tuple[str, Mapping[str, Any]] | None = None
        self._revision = ""
        self._cannot_tell_until = 0.0  # a launcher of a version that cannot say when it has news
        self._assigned = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"links-{target.engine}")

    def stop(self) -> None:
        self.task.cancel()

    def assign(self, peers: PeerAssignment) -> None:
        if self.peers is None or self.peers.body != peers.body:
            self._assigned.set()
        self.peers = peers

    def route(self, *, routed: bool) -> None:
        if self.routed is not routed:
            self._assigned.set()
        self.routed = routed

    async def _run(self) -> None:
        while True:
            before = (self.report, self.links, self.heard)
            try:
                await self._poll()
                self._misses, self.heard, self._said = 0, True, ""
            except LauncherError as error:
                self._missed()
                self._say(str(error))
            except Exception:
                # This is a bug of the operator. A task that ended would leave the last report as
                # it is, also one that says Ready.
                self._missed()
                log.exception("%s: its launcher's answer cannot be read", self.target.engine)
            if before != (self.report, self.links, self.heard):
                self._changed()
            await asyncio.sleep(self._period)
            if self._is_settled():
                await self._wait_for_news()

    def _is_settled(self) -> bool:
        """Whether the launcher answers, was told what it should know, and can tell of news."""
        if self.report is None or self._misses or time.monotonic() < self._cannot_tell_until:
            return False
        if self._knows_other_routes(self.report):
            return False
        return self.peers is None or self._told == (self.report.engine_id, self.peers.body)

    def _knows_other_routes(self, report: EngineReport) -> bool:
        return self.routed is not None and report.routed not in (None, self.routed)

    async def _wait_for_news(self) -> None:
        """Return when a poll may find something new, and after a while in any case."""
        news = asyncio.create_task(self._until_changed())
        assigned = asyncio.create_task(self._assigned.wait())
        try:
            await asyncio.wait(
                (news, assigned), timeout=CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in (news, assigned):
                task.cancel()
            await asyncio.gather(news, assigned, return_exceptions=True)
            self._assigned.clear()

    async def _until_changed(self) -> None:
        try:
            while True:
                told = await self._launchers.changed(self.target, self._revision)
                if told is None or told != self._revision:
                    break
                await asyncio.sleep(self._period)  # in case that it answers at once
        except LauncherError as error:
            log.debug("%s: %s", self.target.engine, error)
        else:
            self._revision = told or ""
            if told is None:
                self._cannot_tell_until = time.monotonic() + CHECK_SECONDS

    def _missed(self) -> None:
        self._misses += 1
        if is_unreachable(self._misses):
            self.heard = True
            self.report = self.links = None
            self._told = None

    def _say(self, problem: str) -> None:
        """Log why an engine cannot be reached: once, and again when the reason is another one."""
        if is_unreachable(self._misses) and problem != self._said:
            self._said = problem
            log.info("%s does not answer: %s", self.target.engine, problem)

    async def _tell_routed(self, report: EngineReport) -> None:
        """Tell it whether routers send it requests. If it refuses, it is as ready as before."""
        if self.routed is None or not self._knows_other_routes(report):
            return
        try:
            await self._launchers.tell_routed(self.target, routed=self.routed)
            self._refused = ""
        except LauncherError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                log.warning(
                    "%s cannot be told whether routers send it requests: %s",
                    self.target.engine,
                    error,
                )

    async def _poll(self) -> None:
        report = await self._launchers.ready(self.target)
        if report.engine != self.target.engine:
            raise LauncherError(f"answers as {report.engine}")
        if self.report is not None and self.report.engine_id != report.engine_id:
            self.links = None  # what the engine's former incarnation said of its links
        self.report = report
        await self._tell_routed(report)
        if self.target.role is not Role.DECODE:
            return
        if self.peers is not None and self._told != (report.engine_id, self.peers.body):
            await self._launchers.put_peers(self.target, self.peers.body)
            self._told = (report.engine_id, self.peers.body)
        self.links = await self._launchers.links(self.target)
        if self._told is not None and knows_other_peers(self._told[1], self.links):
            self._told = None
