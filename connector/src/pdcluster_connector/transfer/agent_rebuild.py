"""When the reading agent is destroyed, and what becomes of what ran on it.

Nothing else stops a transfer that hangs. A receive that is healthy has no part in that: the agent
waits a moment for it, and what has not landed then is read again over a new agent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from pdcluster_connector.nixl_io.interface import AgentSurvivedError, NixlError
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive_events import AgentDestroyed, Event, Failed, State
from pdcluster_connector.transfer.connections import Connections
from pdcluster_connector.transfer.reads import Job
from pdcluster_connector.transfer.transfers import Transfers

logger = logging.getLogger(__name__)

HEALTHY_SECONDS = 1.0  # for others to land before the agent is destroyed under them


class AgentRebuild:
    """Destroys the agent when it is due.

    Args:
        tell: takes what happened to a job's machine.
        connect: has a job connect anew.
        fatal: told when the agent cannot be destroyed.

    Attributes:
        by: when the agent is destroyed at the latest; None while nobody asked for it.
        renew: destroy it as soon as nothing runs on it.
        held: jobs that connect over the next agent.
    """

    def __init__(
        self,
        connections: Connections,
        transfers: Transfers,
        *,
        tell: Callable[[Job, Event], None],
        connect: Callable[[Job], None],
        fatal: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.by: float | None = None
        self.renew = False
        self.held: list[Job] = []
        self._connections = connections
        self._transfers = transfers
        self._tell = tell
        self._connect = connect
        self._fatal = fatal
        self._clock = clock

    def ask(self, job: Job) -> None:
        """Have the agent destroyed soon: a transfer of ``job`` hangs."""
        logger.error(
            "request %s still has transfers under way %.1f s after it failed (%s): the reading "
            "agent is rebuilt",
            job.request.request_id,
            job.machine.drain_seconds,
            job.machine.failure,
        )
        if self.by is None:
            self.by = self._clock() + HEALTHY_SECONDS

    def look_at_probes(self, seconds: float) -> None:
        """Renew the agent if a probe has hung for ``seconds``; no KV is at stake."""
        hanging = self._connections.hanging_since
        if hanging is not None and self._clock() >= hanging + seconds:
            self.renew = True

    def is_due(self) -> bool:
        """Whether nothing healthy has to be waited for any more."""
        if self.by is not None:
            return not self._transfers.healthy or self._clock() >= self.by
        return not self._transfers

    def carry_out(self, failure: Failure, jobs: Mapping[int, Job], *, final: bool) -> None:
        """Destroy the agent, and tell every job. ``final``: fail all of them."""
        self.by, self.renew = None, False
        writing = any(job.machine.open for job in jobs.values())
        try:
            cut = self._connections.destroy_agent(failure, writing=writing, final=final)
        except AgentSurvivedError as error:
            self._transfers.unseen = 0
            self._fatal(str(error))
            return
        self._transfers.clear()
        again = [jobs[serial] for connection in cut for serial in connection.waiting or ()]
        again, self.held = again + self.held, []
        for job in list(jobs.values()):
            if final:
                self._tell(job, Failed(failure))
            self._tell(job, AgentDestroyed(failure))
        for job in again:
            if job.machine.state is State.HANDSHAKE:
                self._connect(job)
        if not final:
            with suppress(NixlError):  # the next request tries again, and tells
                _ = self._connections.agent
