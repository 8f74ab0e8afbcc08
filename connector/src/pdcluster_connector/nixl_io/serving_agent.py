"""The agent through which peers read this worker's memory: KV, a probe region and the lease words.

It makes no transfers of its own. After registration, NIXL's progress thread or the network card
answers the readers.

Decode reads a request's lease word after its data has landed. If it is the ticket's token, then no
block of the lease was written before the data had been read. That holds because of the order in
which vLLM calls the two roles:

* The scheduler makes the token in ``update_state_after_alloc``, and the ticket leaves at the end of
  a later ``update_from_output``. That step's orders have the word in them, and its output is there
  only after every rank has carried them out. So no decode engine can ask for a word too early.
* A lease of which a ticket is out ends on the scheduler side alone (release, expiry). Its blocks
  stay vLLM's until every rank has reported the request as sent. The same step's orders say
  "clear the word" and "report as sent", and a rank does the first before the second. So the word is
  0 on every rank before the scheduler may give a block to another request, and the worker writes
  that block one step later at the earliest, with asynchronous scheduling two.
* A request that is preempted or aborted while it computes loses its blocks at once. No ticket of
  it is out. Its word is replaced or cleared all the same.

vLLM's V2 model runner carries out a step's orders after the step's forward pass, not before it. The
order above is the same there: that pass writes no block whose lease these orders end, because the
block is still its request's until the step's output has come back.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from pdcluster_connector.nixl_io.interface import AgentInterface, NixlError
from pdcluster_connector.nixl_io.probe_memory import HostMemory, ProbeMemory
from pdcluster_connector.plan import descriptors, geometry, slices
from pdcluster_connector.plan.geometry import MemoryRange
from pdcluster_connector.protocol import messages

WARM_UP_BYTES = 4096
PROBE_BYTES = 8 * 1024 * 1024
WORD_BYTES = 8


def one_row(address: int, length: int, device: int = 0, count: int = 1) -> descriptors.Rows:
    """Return a strided descriptor list of ``count`` elements, one behind the other."""
    return np.array([[address, length, device, length, count]], np.uint64)


class ServingAgent:
    """Registers this worker's KV memory, a probe buffer and the lease words for others to read.

    Args:
        make_agent: makes a NIXL agent.
        memory: what to register so that every region can be read.
        probe_bytes: size of the probe buffer.
        probe_memory: where it lies.

    Raises:
        NixlError: NIXL is not installed, or refuses the memory.
    """

    def __init__(
        self,
        make_agent: Callable[[], AgentInterface],
        memory: Sequence[MemoryRange],
        *,
        probe_bytes: int = PROBE_BYTES,
        probe_memory: ProbeMemory | None = None,
    ) -> None:
        self._words = np.zeros(messages.SLOTS, np.uint64)  # 0 in a slot without a lease
        self._probe = (probe_memory or HostMemory()).allocate(probe_bytes)
        self._seams = slices.seams(item.span for item in memory)
        self._agent = make_agent()
        try:
            words = MemoryRange(self._words.ctypes.data, self._words.nbytes)
            self._agent.register([*memory, self._probe.memory, words])
        except NixlError:
            self._agent.close()
            raise

    def metadata(
        self, engine_id: str, rank: tuple[int, int], regions: Sequence[geometry.Region]
    ) -> messages.ShardMetadata:
        """Fill the probe buffer for ``engine_id``. Return what peers need for reads from here."""
        probe = self._probe.memory
        self._probe.write(pattern(engine_id, rank, probe.length))
        return messages.ShardMetadata(
            engine_id=engine_id,
            rank=rank,
            agent_name=self._agent.name,
            agent_metadata=self._agent.metadata(),
            regions=tuple(regions),
            probe=probe,
            lease_words=messages.LeaseWords(self._words.ctypes.data, self._words.size),
            seams=self._seams,
        )

    def write_lease_words(self, words: Mapping[int, int]) -> None:
        """Write lease words by slot."""
        for slot, word in words.items():
            self._words[slot] = word

    def close(self) -> None:
        """Stop serving: readers see their transfers fail, or that every lease has ended."""
        self._words[:] = messages.CLEARED
        self._agent.close()


def pattern(engine_id: str, rank: tuple[int, int], length: int) -> NDArray[np.uint8]:
    """Return the first ``length`` bytes of the pattern of one rank of one incarnation.

    Each page of 4 KiB differs from the others, so a wrong offset is noticed like a wrong peer.
    """
    digest = blake2b(f"{engine_id}/{rank[0]}/{rank[1]}".encode(), digest_size=8).digest()
    words = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(WARM_UP_BYTES // 8)
    pages = -(-length // WARM_UP_BYTES)
    numbers = np.arange(pages, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
    return (words[None, :] ^ numbers).astype("<u8").view(np.uint8).reshape(-1)[:length]


def describe_difference(
    expected: NDArray[np.uint8], found: NDArray[np.uint8], rank: Sequence[int]
) -> str | None:
    """Return one sentence about the first wrong byte; None when all are right."""
    wrong = np.flatnonzero(expected != found)
    if len(wrong) == 0:
        return None
    at = int(wrong[0])
    return (
        f"{len(wrong)} of {len(expected)} probe bytes of rank {tuple(rank)} are wrong, the first"
        f" at offset {at}: {int(found[at])} instead of {int(expected[at])}"
    )
