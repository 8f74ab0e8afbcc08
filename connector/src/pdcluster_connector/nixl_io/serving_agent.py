"""The agent through which this worker's KV can be read by its peers.

It makes no transfers of its own. After registration, NIXL's progress thread or the network card
answers the readers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pdcluster_connector.nixl_io.interface import AgentInterface, MemoryRange, NixlError
from pdcluster_connector.nixl_io.lease_word_table import LeaseWordTable
from pdcluster_connector.nixl_io.probe import PROBE_BYTES, pattern
from pdcluster_connector.plan.geometry import Region
from pdcluster_connector.plan.slices import seams
from pdcluster_connector.protocol.messages import ProbeRegion, ShardMetadata


class ServingAgent:
    """Registers this worker's KV memory, a probe buffer and the lease words for others to read.

    Args:
        make_agent: makes a NIXL agent.
        memory: what to register so that every region can be read.
        probe_bytes: size of the probe buffer, in host memory.

    Attributes:
        lease_words: which leases stand.

    Raises:
        NixlError: NIXL is not installed, or refuses the memory.
    """

    def __init__(
        self,
        make_agent: Callable[[], AgentInterface],
        memory: Sequence[MemoryRange],
        *,
        probe_bytes: int = PROBE_BYTES,
    ) -> None:
        self.lease_words = LeaseWordTable()
        self._probe = np.zeros(probe_bytes, np.uint8)
        self._seams = seams(item.span for item in memory)
        self._agent = make_agent()
        try:
            probe = MemoryRange(self._probe.ctypes.data, self._probe.nbytes)
            self._agent.register([*memory, probe, self.lease_words.memory])
        except NixlError:
            self._agent.close()
            raise

    def metadata(
        self, engine_id: str, rank: tuple[int, int], regions: Sequence[Region]
    ) -> ShardMetadata:
        """Fill the probe buffer for ``engine_id`` and return what peers need to read here."""
        self._probe[:] = pattern(engine_id, rank, self._probe.nbytes)
        return ShardMetadata(
            engine_id=engine_id,
            rank=rank,
            agent_name=self._agent.name,
            agent_metadata=self._agent.metadata(),
            regions=tuple(regions),
            probe=ProbeRegion(address=self._probe.ctypes.data, length=self._probe.nbytes),
            lease_words=self.lease_words.place,
            seams=self._seams,
        )

    def close(self) -> None:
        """Stop serving: readers see their transfers fail, or that every lease has ended."""
        self.lease_words.clear()
        self._agent.close()
