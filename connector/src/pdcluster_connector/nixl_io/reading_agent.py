"""The NIXL agent that reads, and what it holds of each peer.

Another agent serves this engine's memory to peers, so this one can be destroyed at any time. Only
that stops a transfer that is under way.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.nixl_io import interface
from pdcluster_connector.nixl_io.serving_agent import WORD_BYTES, one_row
from pdcluster_connector.plan import descriptors, geometry, peer_plan
from pdcluster_connector.protocol import messages
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.load_report import ReceiveRate

FIRST: NDArray[np.int32] = np.zeros(1, np.int32)


@dataclass(eq=False, slots=True)
class Source:
    """One prefill shard, ready to be read.

    Attributes:
        rank: its (pipeline, tensor) rank.
        agent: the agent that reads it.
        peer: the shard's own agent, by name.
        probe: its probe region.
        local, remote: descriptor lists of both sides, of that agent.
        local_words, remote_words: descriptor lists of the lease words, in the memory that they
            are read into and in the shard's table.
        word_slots: how many the shard's table has.
        moved_at: when KV of it last landed, in seconds of the receiver's clock.
        newest_landed: the highest number of a transfer of KV that has landed.
        under_way: how many transfers of KV run.
    """

    rank: tuple[int, int]
    agent: interface.AgentInterface
    peer: str
    probe: geometry.MemoryRange
    local: interface.Dlist
    remote: interface.Dlist
    local_words: interface.Dlist
    remote_words: interface.Dlist
    word_slots: int
    moved_at: float = -inf
    newest_landed: int = -1
    under_way: int = 0


@dataclass(eq=False, slots=True)
class Connection:
    """One prefill engine, ready to be read over the reading agent.

    Attributes:
        metadata: what the handshake returned.
        plan: which bytes correspond, compiled once.
        sources: in the order of ``plan.sources``.
        transfers: how many transfers may still run over it.
        broken: why no new transfer may start; it closes when ``transfers`` is 0.
        stalled: why new receives fail: a probe is late. None once it, or KV after it, has landed.
        notice: what makes the link slow though it works; empty if nothing is known to.
        descriptors: how many the KV of 1,000 tokens takes.
        waiting: called when the warm-up has ended, with its failure, or when the broken connection
            has closed; None when there is nothing to wait for.
        wanted: whether somebody checks or probes it; receives wait for it by ``waiting``.
    """

    metadata: messages.EngineMetadata
    plan: peer_plan.PeerPlan
    sources: list[Source] = field(default_factory=list)
    transfers: int = 0
    broken: Failure | None = None
    stalled: Failure | None = None
    waiting: list[Callable[[Failure | None], None]] | None = field(default_factory=list)
    notice: str = ""
    descriptors: int = 0
    wanted: bool = False

    @property
    def engine_id(self) -> str:
        """Return the peer's incarnation."""
        return self.metadata.engine_id


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A probe of one peer, whose shards are read one after the other.

    Attributes:
        failure: why the probe ended early; None when all shards were right.
        nbytes: bytes that were read and found right, over all shards.
        seconds: from post to done, over all shards.
        notice: what makes the link slow though it works.
        descriptors: how many the KV of 1,000 tokens takes.
        receives: how fast KV came from the peer, if enough came.
    """

    failure: Failure | None
    nbytes: int = 0
    seconds: float = 0.0
    notice: str = ""
    descriptors: int = 0
    receives: ReceiveRate | UnsetType = UNSET

    @property
    def bytes_per_second(self) -> float:
        """Return the bandwidth; 0 when nothing was read."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


class ReadingAgent:
    """Owns one NIXL agent. Every method may raise NixlError; one thread calls them.

    Args:
        memory: what to register for reading into.
        fence_words: the descriptor list of the memory that lease words are read into.
        synchronize: returns when nothing that was handed to the device still writes.
    """

    def __init__(
        self,
        make_agent: Callable[[], interface.AgentInterface],
        memory: Sequence[geometry.MemoryRange],
        fence_words: descriptors.Rows,
        synchronize: Callable[[], None],
    ) -> None:
        self._synchronize = synchronize
        self._nixl = make_agent()
        try:
            self._nixl.register(memory)
            self._words = self._nixl.prepare(None, fence_words, Memory.DRAM)
        except interface.NixlError:
            self._nixl.close()
            raise

    def open(self, metadata: messages.EngineMetadata, plan: peer_plan.PeerPlan) -> Connection:
        """Load the peer's agents and prepare the descriptor lists, once per peer."""
        shards = {shard.rank: shard for shard in metadata.shards}
        connection = Connection(metadata, plan)
        try:
            for source in plan.sources:
                connection.sources.append(self._open_source(shards[source.rank], source))
        except BaseException:
            self.close_connection(connection)
            raise
        return connection

    def _open_source(self, shard: messages.ShardMetadata, source: peer_plan.SourcePlan) -> Source:
        peer = self._nixl.add_peer(shard.agent_metadata)
        words = shard.lease_words
        prepared: list[interface.Dlist] = []
        try:
            if words is None:
                raise interface.NixlError(
                    interface.NixlErrorKind.INVALID, f"rank {shard.rank} has no lease words"
                )
            for owner, rows, memory in (
                (None, source.decode_rows, source.decode_memory),
                (peer, source.prefill_rows, source.prefill_memory),
                (peer, one_row(words.address, WORD_BYTES, count=words.slots), Memory.DRAM),
            ):
                prepared.append(self._nixl.prepare(owner, rows, memory))
        except BaseException:
            self._forget(peer, prepared)
            raise
        local, remote, remote_words = prepared
        return Source(
            source.rank,
            self._nixl,
            peer,
            shard.probe,
            local,
            remote,
            self._words,
            remote_words,
            words.slots,
        )

    def close_connection(self, connection: Connection) -> None:
        """Release what a connection holds; only when no transfer runs over it. Does not raise."""
        for source in connection.sources:
            self._forget(source.peer, [source.local, source.remote, source.remote_words])
        connection.sources.clear()

    def _forget(self, peer: str, dlists: Sequence[interface.Dlist]) -> None:
        self.release_dlists(dlists)
        with suppress(interface.NixlError):  # NIXL drops a peer by itself if its transport failed
            self._nixl.remove_peer(peer)

    def probe_lists(
        self, source: Source, into: geometry.MemoryRange
    ) -> tuple[interface.Dlist, interface.Dlist]:
        """Prepare a read of the first probe bytes, as many as ``into`` has; it is registered.

        Returns the local and the remote list; the caller releases them.
        """
        region = source.probe
        row = one_row(region.address, into.length, region.device)
        remote = self._nixl.prepare(source.peer, row, region.memory)
        try:
            row = one_row(into.address, into.length, into.device)
            local = self._nixl.prepare(None, row, into.memory)
        except interface.NixlError:
            self.release_dlists([remote])
            raise
        return local, remote

    def release_dlists(self, dlists: Sequence[interface.Dlist]) -> None:
        """Free descriptor lists that nothing uses any more. Does not raise."""
        for dlist in dlists:
            with suppress(interface.NixlError):
                self._nixl.release_dlist(dlist)

    def destroy(self) -> None:
        """Destroy the agent: afterwards none of its transfers can write any more.

        Raises:
            AgentSurvivedError: it could not be destroyed, or the device cannot say whether it
                still writes.
        """
        self._nixl.close()
        try:
            self._synchronize()
        except Exception as error:
            message = f"the device cannot be synchronized: {type(error).__name__}: {error}"
            raise interface.AgentSurvivedError(
                interface.NixlErrorKind.INTERNAL, message, flying=True
            ) from error
