"""Watches the launchers: the state of their engines and links. Sends them peers and routes.

The planner gets the last report of each launcher. A launcher that does not answer has no report:
its engine is unknown, which is not the same as failed. Each launcher has a task of its own, so one
that hangs does not delay the others. A report that differs from the one before queues its cluster.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Set as AbstractSet
from dataclasses import dataclass

from msgspec.structs import replace

from pdcluster_connector.protocol import launcher_documents
from pdcluster_connector.protocol.load_report import LoadReport
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan import peers_and_canaries
from pdcluster_operator.plan.launchers import MISSES, Target
from pdcluster_operator.runtime.interfaces import Key, LauncherError, Launchers

log = logging.getLogger(__name__)

CHECK_SECONDS = 60.0
"""How often the whole state of a launcher is read, also if it reports no change."""
SLACK_SECONDS = 1.0


class LauncherMonitor:
    """Watches the launcher of every target. Used from one event loop.

    Args:
        changed: called with a cluster when a report of one of its launchers differs.
    """

    def __init__(
        self, launchers: Launchers, changed: Callable[[Key], None], *, period: float
    ) -> None:
        self._launchers, self._changed, self._period = launchers, changed, period
        self._watches: dict[Key, dict[str, LauncherWatch]] = {}
        self._since: dict[Key, float] = {}  # when this process began to follow each cluster
        self._releases: set[asyncio.Task[None]] = set()

    def follow(self, key: Key, targets: Iterable[Target]) -> None:
        """Watch exactly these engines of a cluster from now on."""
        wanted = {target.engine: target for target in targets}
        if key not in self._watches:
            self._since[key] = time.monotonic()
        held = self._watches.setdefault(key, {})
        for engine in [name for name, watch in held.items() if wanted.get(name) != watch.target]:
            held.pop(engine).task.cancel()
        for engine in wanted.keys() - held.keys():
            held[engine] = LauncherWatch(
                wanted[engine], self._launchers, self._period, lambda: self._changed(key)
            )

    def followed_seconds(self, key: Key) -> float:
        """Return how long this process has followed a cluster; 0 if it does not."""
        now = time.monotonic()
        return now - self._since.get(key, now)

    def all_heard(self, key: Key) -> bool:
        """Whether each engine has answered, or has missed its polls. Then the cluster is woken."""
        return all(watch.heard for watch in self._watches.get(key, {}).values())

    def forget(self, key: Key) -> None:
        """Stop watching the engines of a cluster."""
        self._since.pop(key, None)
        for watch in self._watches.pop(key, {}).values():
            watch.task.cancel()

    def dismiss(self, key: Key) -> None:
        """Stop watching a cluster that was deleted. Its engines need not wait for routers."""
        for watch in self._watches.get(key, {}).values():
            if watch.report is not None and watch.report.routed:
                task = asyncio.create_task(self._release(watch.target))
                self._releases.add(task)
                task.add_done_callback(self._releases.discard)
        self.forget(key)

    async def _release(self, target: Target) -> None:
        with contextlib.suppress(LauncherError):  # it waits no longer than a minute
            await self._launchers.tell_routed(target, routed=False)

    def assign(
        self,
        key: Key,
        peers: Mapping[str, launcher_documents.PeersDocument],
        routed: AbstractSet[str],
    ) -> None:
        """Send each engine of a cluster what changes, and its peers also when it restarts.

        Args:
            peers: of decode engines, by logical id.
            routed: logical ids of the engines that routers may send requests to.
        """
        for engine, watch in self._watches.get(key, {}).items():
            watch.assign(peers.get(engine, watch.peers), routed=engine in routed)

    def engines(self, key: Key) -> Mapping[str, launcher_documents.EngineReport]:
        """Return the last report of each reachable engine of a cluster."""
        watches = self._watches.get(key, {}).items()
        return {name: one.report for name, one in watches if one.report is not None}

    def links(self, key: Key) -> Mapping[str, launcher_documents.LinksReport]:
        """Return the last report on links of each reachable decode engine of a cluster."""
        watches = self._watches.get(key, {}).items()
        return {name: one.links for name, one in watches if one.links is not None}

    def loads(self, key: Key) -> Mapping[str, LoadReport]:
        """Return what each reachable engine of a cluster did in a minute, where it is known."""
        watches = self._watches.get(key, {}).items()
        return {name: one.load for name, one in watches if one.load is not None}

    async def stop(self) -> None:
        """Stop watching all engines."""
        tasks = [watch.task for watches in self._watches.values() for watch in watches.values()]
        for key in list(self._watches):
            self.forget(key)
        await asyncio.gather(*tasks, *self._releases, return_exceptions=True)


@dataclass(eq=False)
class LauncherWatch:
    """Watches the launcher of one engine, and sends it its peers and routes.

    A launcher answers a long poll when its state changes. Some numbers do not count as a change, so
    its whole state is also read once a minute.

    Args:
        period: the least seconds between two requests for its state.
        changed: called when a report differs from the one before.

    Attributes:
        report, links: the last reports; None while the launcher is unreachable.
        load: what the engine did in the minute before its whole state was read; None as above, and
            while the launcher does not tell. It changes all the time, so it wakes nobody.
        routed: whether routers may send requests to the engine; None until a plan says.
        heard: whether the launcher has answered, or has missed its polls.
    """

    target: Target
    launchers: Launchers
    period: float
    changed: Callable[[], None]

    def __post_init__(self) -> None:
        self.report: launcher_documents.EngineReport | None = None
        self.links: launcher_documents.LinksReport | None = None
        self.load: LoadReport | None = None
        self.peers: launcher_documents.PeersDocument | None = None
        self.routed: bool | None = None
        self.heard = False
        self._misses = 0
        self._logged = ""  # why it does not answer
        # The engine id and the peers that were sent last.
        self._sent: tuple[str, launcher_documents.PeersDocument] | None = None
        self._revision = ""
        self._read_at = 0.0  # when its whole state was last read
        self._next = 0.0  # when it may be polled again
        self._assigned = asyncio.Event()
        self._waiting: asyncio.Task[launcher_documents.ChangesReport] | None = None
        self.task = asyncio.create_task(self._run(), name=f"links-{self.target.engine}")

    def assign(self, peers: launcher_documents.PeersDocument | None, *, routed: bool) -> None:
        """Send the launcher soon its peers, and whether routers may send its engine requests."""
        if (self.peers, self.routed) != (peers, routed):
            self._assigned.set()
        self.peers, self.routed = peers, routed

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._next - time.monotonic())
                before = (self.report, self.links, self.heard)
                try:
                    await (self._long_poll() if self._can_long_poll() else self._poll())
                    await self._send()
                    self._misses, self.heard, self._logged = 0, True, ""
                except LauncherError as error:
                    self._missed(str(error))
                except Exception:
                    # This is a bug of the operator. A task that ended would leave the last report
                    # as it is, also one that says Ready.
                    self._missed()
                    log.exception("%s: its launcher's answer cannot be read", self.target.engine)
                if before != (self.report, self.links, self.heard):
                    self.changed()
        finally:
            await self._stop_waiting()

    def _can_long_poll(self) -> bool:
        """Whether it answers, and its whole state was read lately."""
        if self.report is None or self._misses:
            return False
        return time.monotonic() - self._read_at < CHECK_SECONDS - SLACK_SECONDS

    def _has_other_peers(self) -> bool:
        if self.report is None or self.peers is None or self.target.role is not Role.DECODE:
            return False
        linked = self.links is None or self.links.links
        if self._sent is None and not linked and self.peers.peers == ():
            return False  # it has no peer, and there is none yet
        return self._sent != (self.report.engine_id, self.peers)

    async def _long_poll(self) -> None:
        """Return when its state changed, when something is to be sent, or after a while.

        The long poll goes on while something is sent.
        """
        if self._waiting is None:
            request = self.launchers.changes(self.target, self._revision, wait=True)
            self._waiting = asyncio.create_task(request)
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
        changes = answered.result()
        if changes.revision != self._revision:
            self._take(changes)

    async def _poll(self) -> None:
        """Read the whole state of the launcher."""
        await self._stop_waiting()
        self._rest()
        self._take(await self.launchers.changes(self.target, "", wait=False))

    def _take(self, changes: launcher_documents.ChangesReport) -> None:
        """Store an answer that holds the whole state."""
        report, links = changes.readyz, changes.links
        if report is None:
            raise LauncherError("did not answer with the state of an engine")
        if report.engine != self.target.engine:
            raise LauncherError(f"answers as {report.engine}")
        if self.target.role is Role.DECODE and links is None:
            raise LauncherError("did not answer with a list of links")
        self.report = report
        self.links = links if self.target.role is Role.DECODE else None
        self.load = changes.load
        self._revision = changes.revision
        self._read_at = time.monotonic()
        _, sent = self._sent or ("", None)
        if self.links and sent and peers_and_canaries.has_other_peers(sent, self.links):
            self._sent = None

    def _rest(self) -> None:
        self._next = time.monotonic() + self.period

    async def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)
            self._waiting = None

    def _missed(self, why: str = "") -> None:
        """Count an answer that did not come. Log why if it is another reason than before."""
        self._rest()
        self._misses += 1
        if self._misses >= MISSES:
            self.heard = True
            self.report = self.links = self.load = self._sent = None
            if why not in ("", self._logged):
                self._logged = why
                log.info("%s does not answer: %s", self.target.engine, why)

    async def _send(self) -> None:
        """Send routes and peers that differ."""
        if self.report is None:
            return
        if self.routed is not None and self.report.routed not in (None, self.routed):
            await self.launchers.tell_routed(self.target, routed=self.routed)
            self.report = replace(self.report, routed=self.routed)
        if self.peers is not None and self._has_other_peers():
            sent = self.peers  # others may be assigned before the launcher answers
            await self.launchers.put_peers(self.target, sent)
            self._sent = (self.report.engine_id, sent)
