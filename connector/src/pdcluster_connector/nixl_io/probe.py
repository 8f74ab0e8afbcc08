"""Probes: reads that show that a peer's memory is the right one, and how fast it can be read.

Each serving agent registers a probe region with a pattern that only its engine and rank have. A
read of it shows that the link reaches that very process and that bytes arrive unchanged. The time
of the read gives the bandwidth. A probe touches no KV block.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from pdcluster_connector.nixl_io.interface import MemoryRange
from pdcluster_connector.plan.descriptors import Rows
from pdcluster_connector.protocol.failure import Failure

WARM_UP_BYTES = 4096
PROBE_BYTES = 8 * 1024 * 1024
WARM_UP_SLOTS = 1024
PROBE_SLOTS = 2

_WORDS = WARM_UP_BYTES // 8


def pattern(engine_id: str, rank: tuple[int, int], length: int) -> NDArray[np.uint8]:
    """Return the first ``length`` bytes of the pattern of one rank of one incarnation.

    Each page of 4 KiB differs from the others, so a wrong offset is noticed like a wrong peer.
    """
    digest = blake2b(f"{engine_id}/{rank[0]}/{rank[1]}".encode(), digest_size=8).digest()
    words = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(_WORDS)
    pages = -(-length // WARM_UP_BYTES)
    numbers = np.arange(pages, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
    return (words[None, :] ^ numbers).astype("<u8").view(np.uint8).reshape(-1)[:length]


@dataclass(frozen=True, slots=True)
class SourceProbe:
    """What reading one prefill shard's probe region gave; ``seconds`` from post to done."""

    rank: tuple[int, int]
    nbytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Return the bandwidth; 0 when nothing was read."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A probe of one peer, shard by shard.

    Attributes:
        engine_id: the peer's incarnation.
        sources: the shards that were read and found right, in the plan's order.
        failure: why the probe ended early; None when all shards were right.
        notice: what makes the link slow though it works.
    """

    engine_id: str
    sources: tuple[SourceProbe, ...]
    failure: Failure | None = None
    notice: str = ""

    @property
    def nbytes(self) -> int:
        """Return the bytes read over all shards."""
        return sum(source.nbytes for source in self.sources)

    @property
    def bytes_per_second(self) -> float:
        """Return the bandwidth over all shards, which are read one after the other."""
        seconds = sum(source.seconds for source in self.sources)
        return self.nbytes / seconds if seconds > 0 else 0.0


class Scratch:
    """Registered host memory that warm-ups and probes are read into, in slots.

    A slot is given back only when no transfer can write into it any more.
    """

    def __init__(self) -> None:
        # Zeros of the kernel's, which cost no time before they are used.
        size = WARM_UP_SLOTS * WARM_UP_BYTES + PROBE_SLOTS * PROBE_BYTES
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._bytes = np.frombuffer(mmap.mmap(-1, size, flags=private), np.uint8)
        self.reset()

    @property
    def memory(self) -> MemoryRange:
        """Return the range to register."""
        return MemoryRange(self._bytes.ctypes.data, self._bytes.nbytes)

    def reset(self) -> None:
        """Take all slots back: the agent that could write into them is destroyed."""
        probes = WARM_UP_SLOTS * WARM_UP_BYTES
        self._free = {
            WARM_UP_BYTES: list(range(0, probes, WARM_UP_BYTES)),
            PROBE_BYTES: list(range(probes, self._bytes.nbytes, PROBE_BYTES)),
        }

    def take(self, size: int) -> int | None:
        """Return the offset of a free slot of ``size`` bytes; None when all are taken."""
        free = self._free[size]
        return free.pop() if free else None

    def give_back(self, size: int, offset: int) -> None:
        """Return a slot."""
        self._free[size].append(offset)

    def view(self, offset: int, length: int) -> NDArray[np.uint8]:
        """Return the bytes of a slot."""
        return self._bytes[offset : offset + length]

    def row(self, offset: int, length: int) -> Rows:
        """Return the descriptor list of a slot."""
        return one_row(self._bytes.ctypes.data + offset, length, 0)


def one_row(address: int, length: int, device: int) -> Rows:
    """Return a strided descriptor list of one element."""
    return np.array([[address, length, device, length, 1]], np.uint64)


FIRST: NDArray[np.int32] = np.zeros(1, np.int32)


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
