"""The connections of one worker: which prefill engines can be read right now.

A connection is opened when a peer has answered a handshake. A warm-up read shows that it works. It
closes when it is broken and no transfer runs over it any more. When the reading agent is destroyed,
all connections end. Receives wait here for the warm-up, or for a broken connection to close.
Everything here runs on the transfer thread.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import AgentInterface, AgentSurvivedError
from pdcluster_connector.nixl_io.probe_memory import ProbeMemory
from pdcluster_connector.nixl_io.reading_agent import Connection, ProbeResult, ReadingAgent
from pdcluster_connector.plan import geometry, peer_plan, slices
from pdcluster_connector.plan.geometry import MemoryRange
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.sidechannel.peers import PeerBook
from pdcluster_connector.transfer import measures, planned_reads, probing
from pdcluster_connector.transfer.options import ReceiverOptions

logger = logging.getLogger(__name__)

SILENT = frozenset({Reason.SIDE_CHANNEL_UNREACHABLE, Reason.AUTHENTICATION_FAILED})
"""Failures that are over when the peer answers a handshake.

With TLS, a connection that breaks can also look like the second one.
"""


class Connections:
    """Owns the reading agent and the connections over it.

    Args:
        options: limits.
        clock: seconds.
        shard: this rank's KV.
        memory: what to register for reading into.
        probe_memory: what probes are read into.

    Attributes:
        peers: where handshakes come from.
        by_engine: every connection, whatever its state, by the peer's engine id.
        closing: those that an error of NIXL broke and that are still open, and since when.
        probing: its warm-ups, probes and checks.
        fence_words: the memory that lease words are read into.
        rates: how fast receives were over each.
    """

    def __init__(
        self,
        options: ReceiverOptions,
        clock: Callable[[], float],
        shard: geometry.Shard,
        memory: Sequence[MemoryRange],
        make_agent: Callable[[], AgentInterface],
        peers: PeerBook,
        probe_memory: ProbeMemory,
    ) -> None:
        self._shard = replace(shard, seams=slices.seams(item.span for item in memory))
        self._memory = memory
        self._make_agent = make_agent
        self.peers = peers
        self._agent: ReadingAgent | None = None
        self.by_engine: dict[str, Connection] = {}
        self.closing: dict[Connection, float] = {}
        self.rates = measures.ReceiveRates()
        self.probing = probing.Probing(self, options, clock, probe_memory)
        self._synchronize = probe_memory.synchronize
        self.fence_words = planned_reads.FenceWords()

    @property
    def agent(self) -> ReadingAgent:
        """Return the reading agent; made when there is none. Raises NixlError."""
        if self._agent is None:
            self._agent = ReadingAgent(
                self._make_agent,
                [
                    *self._memory,
                    self.fence_words.memory,
                    *(slots.memory for slots in self.probing.scratch.values()),
                ],
                self.fence_words.rows,
                self._synchronize,
            )
        return self._agent

    def open(self, metadata: EngineMetadata) -> Connection:
        """Return the peer's connection; a new one begins with its warm-up.

        Raises:
            PlanError: the shards do not fit together.
            NixlError: NIXL refused the peer.
        """
        if (connection := self.by_engine.get(metadata.engine_id)) is not None:
            return connection
        plan = peer_plan.plan_peer(self._shard, [shard.shard for shard in metadata.shards])
        connection = self.agent.open(metadata, plan)
        layout, groups = metadata.shape.layout, metadata.shape.groups or ()
        connection.notice = peer_plan.cost_notice(plan, layout, groups)
        connection.descriptors, _ = peer_plan.descriptors(plan, peer_plan.NOTICE_TOKENS, groups)
        if connection.notice:
            logger.warning("%s: %s", metadata.engine_id, connection.notice)
        self.probing.start(connection, self._warm_up_done)
        self.by_engine[metadata.engine_id] = connection  # now that somebody warms it up
        return connection

    def break_off(self, connection: Connection, failure: Failure) -> None:
        """Start nothing new over ``connection``; it closes when its last transfer has ended."""
        if connection.broken is None or failure.reason not in SILENT:
            connection.broken = failure
        if failure.reason is Reason.BACKEND_ERROR:
            self.closing.setdefault(connection, self.probing.clock())
        else:  # a warm-up may never end
            for go_on in connection.waiting or ():
                go_on(failure)
        self.settle(connection)

    def settle(self, connection: Connection) -> None:
        """Close ``connection`` if it is broken and no transfer runs over it."""
        if connection.broken is not None and connection.transfers == 0 and self._agent is not None:
            if self.by_engine.get(connection.engine_id) is connection:
                del self.by_engine[connection.engine_id]
                self.rates.forget(connection.engine_id)
            self.closing.pop(connection, None)
            self._agent.close_connection(connection)
            waiting, connection.waiting = connection.waiting or (), None
            for go_on in waiting:
                go_on(None)

    def probe_failed(self, connection: Connection, failure: Failure) -> None:
        """Take in that a connection has failed its warm-up, a probe or a check."""
        logger.warning("the connection to %s failed: %s", connection.engine_id, failure)
        self.broken(connection, failure)

    def _warm_up_done(self, connection: Connection, result: ProbeResult) -> None:
        if connection.stalled is not None:
            return  # it is late, which proves nothing: those that wait go on waiting
        failure = connection.broken or result.failure
        if failure is not None:
            self.probe_failed(connection, failure)
            self.probing.not_warmed(connection.engine_id, failure)
        for go_on in connection.waiting or ():
            go_on(failure)
        connection.waiting = None

    def destroy_agent(
        self, failure: Failure, *, writing: bool, final: bool = False
    ) -> list[Callable[[Failure | None], None]]:
        """Destroy the agent and every connection; return the calls of all that waited for one.

        What was stalled is opened again at once: until its read lands, new receives fail.

        Args:
            failure: the answer to its probes.
            writing: whether transfers into KV blocks may be under way.
            final: also end the probes that have not begun, and refuse further ones.

        Raises:
            AgentSurvivedError: nothing was changed, and its transfers may still write.
        """
        if final:
            self.probing.over = failure
        try:
            if self._agent is not None:
                self._agent.destroy()
        except AgentSurvivedError:
            if writing:
                raise
            logger.exception("a reading agent could not be destroyed; it writes no KV")
        self._agent = None
        connections, self.by_engine = list(self.by_engine.values()), {}
        self.closing.clear()
        cut = [go_on for connection in connections for go_on in connection.waiting or ()]
        stalled = [(one.metadata, one.stalled) for one in connections if not one.broken]
        for connection in connections:
            connection.broken = connection.broken or failure
            connection.sources.clear()
            self.rates.forget(connection.engine_id)
        self.probing.cut(failure, final=final)
        self.fence_words.reset()
        for metadata, why in stalled:
            if why and not final:
                with suppress(Exception):  # of one peer; the next request tries again
                    self.open(metadata).stalled = why
        return cut

    def answered(self, metadata: EngineMetadata) -> Connection:
        """Return the connection to a peer that has answered a handshake; see :meth:`open`."""
        connection = self.by_engine.get(metadata.engine_id)
        if connection and connection.broken and connection.broken.reason in SILENT:
            connection.broken = None
        return self.open(metadata)

    def broken(self, connection: Connection, failure: Failure) -> None:
        """Take in that a transfer found a connection broken; the next receive shakes hands."""
        self.break_off(connection, failure)
        self.peers.forget(connection.engine_id, failure)
