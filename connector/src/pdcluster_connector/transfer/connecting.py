"""How a receive gets a connection when none is ready.

The peer source is asked for a handshake. Its answer opens a connection, which begins with a warm-up
read. A receive waits here for the answer, for the warm-up, or for a broken connection to close. It
also ends here when its peer is gone. Everything here runs on the transfer thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.reading_agent import Connection
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.sidechannel.peer_source import PeerSource
from pdcluster_connector.transfer.connections import Closed, Connections, Warmed
from pdcluster_connector.transfer.job import Job, Tell, guarded
from pdcluster_connector.transfer.receive import Connected, Failed, State

logger = logging.getLogger(__name__)

Answer = Callable[[int, EngineMetadata | Failure], None]


class Connecting:
    """Connects receives.

    Args:
        make_connections: makes the connections, given who hears of warm-ups and of ends.
        peers: where handshakes come from.
        jobs: all receives under way, by serial.
        tell: takes what happened to a job's machine.
        connect: has a job connect anew.
        hold: keeps a job for the next agent if the present one is about to be destroyed; returns
            whether it is.
        answer: takes a handshake's answer for one job to the transfer thread's queue.

    Attributes:
        connections: what was made.
    """

    def __init__(
        self,
        make_connections: Callable[[Warmed, Closed], Connections],
        peers: PeerSource,
        jobs: Mapping[int, Job],
        *,
        tell: Tell,
        connect: Callable[[Job], None],
        hold: Callable[[Job], bool],
        answer: Answer,
    ) -> None:
        self.connections = make_connections(self._warmed, self._closed)
        self._peers = peers
        self._jobs = jobs
        self._tell = tell
        self._connect = connect
        self._hold = hold
        self._answer = answer

    def shake_hands(self, job: Job) -> None:
        """Ask the peer source for a handshake; its answer comes to :meth:`answered`."""
        ticket = job.request.ticket
        host, port = ticket.side_channel
        done = partial(self._answer, job.serial)
        machine = job.machine  # its lease is renewed while the peer takes its time
        self._peers.connect(ticket.engine_id, host, port, lambda: machine.deadline, done)

    def answered(self, serial: int, answer: EngineMetadata | Failure) -> None:
        """Take in how a handshake ended."""
        job = self._jobs.get(serial)
        if job is None or job.machine.state is not State.HANDSHAKE:
            return
        if isinstance(answer, Failure):
            self._tell(job, Failed(answer))
            return
        with guarded(job, self._tell):
            if answer.engine_id != job.request.ticket.engine_id:
                message = f"{answer.engine_id} answered for {job.request.ticket.engine_id}"
                self._tell(job, Failed(Failure(Reason.PEER_RESTARTED, message)))
            elif not self._hold(job):
                self.connections.peer_answered(answer.engine_id)
                self.join(job, self.connections.open(answer))

    def join(self, job: Job, connection: Connection) -> None:
        """Go on over ``connection``, or wait for it."""
        job.connection = connection
        if connection.broken is not None and not connection.closing:
            self._tell(job, Failed(connection.broken))
        elif connection.broken is not None or connection.waiting is not None:
            connection.waiting = [*(connection.waiting or ()), job.serial]
        else:
            self._tell(job, Connected())

    def gone(self, engine_id: str, failure: Failure) -> None:
        """Take in that a peer's incarnation has vanished, or does not answer any more.

        Only another incarnation in its place proves that it is dead: until then what is
        posted may end well.
        """
        connection = self.connections.by_engine.get(engine_id)
        if connection is not None:
            self.connections.break_off(connection, failure)
        dead = failure.reason is Reason.PEER_RESTARTED
        for job in list(self._jobs.values()):
            if dead and job.request.ticket.engine_id == engine_id:
                self._tell(job, Failed(failure))

    def broken(self, connection: Connection, failure: Failure) -> None:
        """Take in that a transfer found a connection broken; the next receive shakes hands."""
        self.connections.break_off(connection, failure)
        self._peers.forget(connection.engine_id, failure)

    def _warmed(self, connection: Connection, failure: Failure | None) -> None:
        """Let those go on that waited for a warm-up, or fail them with it."""
        if failure is not None:
            logger.warning("the connection to %s failed: %s", connection.engine_id, failure)
            self._peers.forget(connection.engine_id, failure)
        for serial in connection.waiting or ():
            job = self._jobs.get(serial)
            if job is not None:
                self._tell(job, Connected() if failure is None else Failed(failure))

    def _closed(self, connection: Connection) -> None:
        """Let those connect anew that waited for a broken connection to close."""
        waiting, connection.waiting = connection.waiting or (), None
        for serial in waiting:
            job = self._jobs.get(serial)
            if job is not None:
                self._connect(job)
