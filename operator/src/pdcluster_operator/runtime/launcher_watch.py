"""Follows one launcher: what it tells of its engine, and what it should know.

The operator asks a launcher for news, and the launcher answers when it has some. Some numbers are
no news, so the operator also asks once a minute for the whole state. A launcher of an older version
cannot tell when it has news. The operator polls it every period.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from pdcluster_connector.protocol.launcher_documents import (
    ChangesReport,
    EngineReport,
    LinksReport,
    PeersDocument,
)
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.plan.launchers import Target, has_other_peers, is_unreachable
from pdcluster_operator.plan.types import PeerAssignment
from pdcluster_operator.runtime.errors import LauncherError
from pdcluster_operator.runtime.interfaces import Launchers

log = logging.getLogger(__name__)

CHECK_SECONDS = 60.0
"""How often to ask a launcher for its whole state, even if it has no news."""
SLACK_SECONDS = 1.0


class LauncherWatch:
    """What is known of one engine. It is asked at most once a period, if it has no news.

    Args:
        changed: called when what is known has changed. The argument says whether the engine was
            not ready and still is not.
    """

    def __init__(
        self, target: Target, launchers: Launchers, period: float, changed: Callable[[bool], None]
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
        self._told: tuple[str, PeersDocument] | None = None
        self._revision = ""
        self._asked = 0.0  # when it last told all
        self._next = 0.0  # when it may be asked again
        self._cannot_tell_until = 0.0  # a launcher of a version that cannot say when it has news
        self._assigned = asyncio.Event()
        self._waiting: asyncio.Task[ChangesReport | None] | None = None
        self.task = asyncio.create_task(self._run(), name=f"links-{target.engine}")

    def stop(self) -> None:
        """End it."""
        self.task.cancel()
        self.task.add_done_callback(_forget_error)

    def assign(self, peers: PeerAssignment) -> None:
        """Have the launcher told of these peers."""
        if self.peers is None or self.peers.document != peers.document:
            self._assigned.set()
        self.peers = peers

    def route(self, *, routed: bool) -> None:
        """Have the launcher told whether routers may send its engine requests."""
        if self.routed is not routed:
            self._assigned.set()
        self.routed = routed

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._next - time.monotonic())
                before = (self.report, self.links, self.heard)
                try:
                    await (self._wait() if self._tells_news() else self._poll())
                    await self._tell()
                    self._misses, self.heard, self._said = 0, True, ""
                except LauncherError as error:
                    self._missed()
                    self._say(str(error))
                except Exception:
                    # This is a bug of the operator. A task that ended would leave the last report
                    # as it is, also one that says Ready.
                    self._missed()
                    log.exception("%s: its launcher's answer cannot be read", self.target.engine)
                if before != (self.report, self.links, self.heard):
                    self._changed(not any(one and one.ready for one in (before[0], self.report)))
        finally:
            await self._stop_waiting()

    def _tells_news(self) -> bool:
        """Whether it answers, takes what it is told, and told all not long ago."""
        if self.report is None or self._misses or not self._revision or self._refused:
            return False
        return time.monotonic() - self._asked < CHECK_SECONDS - SLACK_SECONDS

    def _knows_other_routes(self, report: EngineReport) -> bool:
        return self.routed is not None and report.routed not in (None, self.routed)

    def _has_other_peers(self) -> bool:
        if self.report is None or self.peers is None or self.target.role is not Role.DECODE:
            return False
        linked = self.links is None or self.links.links
        if self._told is None and not linked and self.peers.document.peers == ():
            return False  # it knows no peer, and there is none yet
        return self._told != (self.report.engine_id, self.peers.document)

    async def _wait(self) -> None:
        """Return when there are news, when it should be told something, or after a while.

        What it is told is sent beside the question for news, which goes on.
        """
        if self._waiting is None:
            question = self._launchers.changes(self.target, self._revision, wait=True)
            self._waiting = asyncio.create_task(question)
        assigned = asyncio.create_task(self._assigned.wait())
        try:
            await asyncio.wait((self._waiting, assigned), return_when=asyncio.FIRST_COMPLETED)
        finally:
            assigned.cancel()
            self._assigned.clear()
        if not self._waiting.done():
            return
        self._rest()
        answered, self._waiting = self._waiting, None
        try:
            news = answered.result()
        except LauncherError as error:
            log.debug("%s: %s", self.target.engine, error)
            await self._poll()
            return
        if news is None:
            await self._poll()
        elif news.revision != self._revision:
            await self._take(news)

    async def _poll(self) -> None:
        """Ask for all that the launcher tells, at once."""
        await self._stop_waiting()
        self._rest()
        news = None
        if time.monotonic() >= self._cannot_tell_until:
            news = await self._launchers.changes(self.target, "", wait=False)
            if news is None:
                self._cannot_tell_until = time.monotonic() + CHECK_SECONDS
        await self._take(news)

    async def _take(self, news: ChangesReport | None) -> None:
        """Take in what the launcher tells; ask for what it does not tell by itself."""
        told = news.readyz if news is not None else None
        report = told if told is not None else await self._launchers.ready(self.target)
        if report.engine != self.target.engine:
            raise LauncherError(f"answers as {report.engine}")
        if self.report is not None and self.report.engine_id != report.engine_id:
            self.links = None  # what the engine's former incarnation said of its links
        self.report = report
        self._revision = news.revision if news is not None else ""
        self._asked = time.monotonic()
        if self.target.role is Role.DECODE:
            await self._take_links(news.links if news is not None else None)

    async def _take_links(self, told: LinksReport | None) -> None:
        self.links = told if told is not None else await self._launchers.links(self.target)
        if self._told is not None and has_other_peers(self._told[1], self.links):
            self._told = None

    def _rest(self) -> None:
        self._next = time.monotonic() + self._period

    async def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)
            self._waiting = None

    def _missed(self) -> None:
        self._rest()
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

    async def _tell(self) -> None:
        """Tell it what it should know. If it refuses routes, its engine is as ready as before."""
        if self.report is None:
            return
        if self._knows_other_routes(self.report):
            await self._tell_routed(self.report, routed=self.routed is True)
        if self.peers is not None and self._has_other_peers():
            sent = self.peers.document  # others may be assigned before the launcher answers
            await self._launchers.put_peers(self.target, sent)
            self._told = (self.report.engine_id, sent)
            if not self._revision:  # it does not say by itself what becomes of them
                await self._take_links(None)

    async def _tell_routed(self, report: EngineReport, *, routed: bool) -> None:
        try:
            await self._launchers.tell_routed(self.target, routed=routed)
            self.report = replace(report, routed=routed)
            self._refused = ""
        except LauncherError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                log.warning(
                    "%s cannot be told whether routers send it requests: %s",
                    self.target.engine,
                    error,
                )


def _forget_error(task: asyncio.Task[None]) -> None:
    """Take the error from a task that has ended, as whoever awaits it does.

    Its traceback holds the watch, and the watch holds the task. Only a garbage collection frees
    such a circle, and the operator makes few.
    """
    with suppress(asyncio.CancelledError):
        task.exception()
