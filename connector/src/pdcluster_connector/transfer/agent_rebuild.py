"""Destroys the reading agent and begins again over a new one.

Nothing else stops a transfer that hangs. Other receives must not suffer from it: the agent is kept
for a moment until their transfers land. What has not landed then is read again over a new agent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import AgentSurvivedError, NixlError
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.transfer import planned_reads, receive_machine

if TYPE_CHECKING:
    from pdcluster_connector.transfer.receive_executor import ReceiveExecutor

logger = logging.getLogger(__name__)

HEALTHY_SECONDS = 1.0  # for others to land before the agent is destroyed under them
RENEWAL_SECONDS = 5.0  # new receives wait this long at most for a renewal
RETRY_SECONDS = 30.0  # between the first two attempts at a renewal


class AgentRebuild:
    """Destroys the agent when it is due.

    Attributes:
        by: when the agent is destroyed at the latest; None if it is not asked for.
        renew_by: when a renewal is put off: until then, the agent is destroyed as soon as nothing
            runs on it. None while no renewal is wanted.
        held: called when jobs that wait for the next agent may connect.
    """

    def __init__(self, executor: ReceiveExecutor) -> None:
        self.by: float | None = None
        self.renew_by: float | None = None
        self.held: list[Callable[[Failure | None], None]] = []
        self._retry_at = -inf
        self._pause = RETRY_SECONDS
        self._executor = executor
        self._stall_seconds = executor.options.transfer_stall_seconds
        self._patience = self._stall_seconds  # before a hanging probe cuts receives under way
        self._cut_again_at = -inf

    def ask(self, job: planned_reads.Job) -> None:
        """Have the agent destroyed soon: a transfer of ``job`` hangs."""
        logger.error(
            "request %s still has transfers under way %.1f s after it failed (%s): the reading "
            "agent is rebuilt",
            job.request.request_id,
            job.machine.drain_seconds,
            job.machine.failure,
        )
        if self.by is None:
            self.by = self._executor.clock() + HEALTHY_SECONDS

    def look_at_probes(self, seconds: float) -> None:
        """Renew the agent if a probe has hung for ``seconds``; no KV is at stake.

        The agent may never be without a transfer. So at last those under way are cut, and read
        again. Each time that happens, the next time comes twice as late: slow reads come to an end.

        A peer may be cut off for hours. Each renewal costs all others their connections, and may
        hold them up. So each pause is twice as long as the one before, up to ``stall_seconds``,
        until nothing has hung for a whole pause.
        """
        hanging, now = self._executor.connections.probing.hanging_since, self._executor.clock()
        if hanging is None:
            return
        if now >= hanging + seconds + self._patience and self.by is None:
            self._patience *= 2
            self.by = now + HEALTHY_SECONDS
        elif now >= max(hanging + seconds, self._retry_at) and self.renew_by is None:
            if hanging > self._retry_at:
                self._pause = RETRY_SECONDS
            self.renew_by = now + RENEWAL_SECONDS

    def look_at_broken(self, seconds: float) -> None:
        """Cut the reads over a broken connection that receives wait for: they keep it from closing.

        That is done when none of them has landed for ``seconds``. All are read again over the next
        agent. Two cuts lie half of ``stall_seconds`` apart, and reads that were cut come to an end
        between them, unless they run over such a connection again. So a peer that fails again and
        again cuts a slow read of another peer only once.
        """
        now, closing = self._executor.clock(), self._executor.connections.closing
        jobs = self._executor.jobs.values()
        waited_for = {
            job.connection for job in jobs if job.machine.state is receive_machine.State.HANDSHAKE
        }
        again = [job for job in jobs if job.machine.is_repeated and job.machine.open]
        if any(job.connection not in closing for job in again):
            return
        for connection, since in closing.items():
            moved = max([since, *(source.moved_at for source in connection.sources)])
            is_due = now >= max(moved + seconds, self._cut_again_at)
            if (connection.wanted or connection in waited_for) and is_due and self.by is None:
                logger.error("receives wait for %s, over which a read hangs", connection.engine_id)
                self.by, self._cut_again_at = now + HEALTHY_SECONDS, now + self._stall_seconds / 2

    def carry_out_if_due(self) -> bool:
        """Destroy the agent if it is due; returns whether it was."""
        if self._executor.transfers.unseen and self.by is None:
            self.by = self._executor.clock() + RENEWAL_SECONDS
        if not self._is_due():
            if self.renew_by is not None and self._executor.clock() >= self.renew_by:
                # Let those connect that wait for a renewal: a transfer may be slow for minutes.
                self.renew_by = None
                self._pause_renewals()
                held, self.held = self.held, []
                for go_on in held:
                    go_on(None)
            return False
        if self.by is None:
            self._patience = self._stall_seconds
            self._pause_renewals()
        message = "the reading agent was rebuilt to stop a transfer that hung"
        self.carry_out(Failure(Reason.BACKEND_ERROR, message))
        return True

    def _is_due(self) -> bool:
        """Whether nothing healthy has to be waited for any more."""
        if self.by is not None:
            return not self._executor.transfers.healthy or self._executor.clock() >= self.by
        return not self._executor.transfers

    def _pause_renewals(self) -> None:
        self._retry_at = self._executor.clock() + self._pause
        self._pause = max(self._pause, min(2 * self._pause, self._stall_seconds))

    def carry_out(self, failure: Failure, *, crashed: bool = False, final: bool = False) -> None:
        """Destroy the agent; healthy receives that ran on it begin again over a new one.

        Args:
            crashed: whether the thread failed. A receive begins again only a few times then.
            final: fail everything instead, now and from now on.
        """
        self.by, self.renew_by = None, None
        jobs = self._executor.jobs
        writing = any(job.machine.open for job in jobs.values())
        try:
            cut = self._executor.connections.destroy_agent(failure, writing=writing, final=final)
        except AgentSurvivedError as error:
            self._executor.transfers.unseen = 0
            self._executor.options.fatal(str(error))
            return
        for job in jobs.values():  # what waited in a queue that moved has not waited in vain
            job.machine.queue_moved(self._executor.transfers.queue_moved_at(job))
        self._executor.transfers.clear()
        again, self.held = [*cut, *self.held], []
        for job in list(jobs.values()):
            if final:
                self._executor.dispatch(job, receive_machine.Failed(failure))
            self._executor.dispatch(job, receive_machine.AgentDestroyed(failure, crashed))
        for go_on in again:
            go_on(None)
        if not final:
            with suppress(NixlError):  # the next request tries again, and fails
                _ = self._executor.connections.agent
