"""What one decode shard exchanges with one prefill engine.

The plan is compiled once per peer (:mod:`peer_plan`): descriptor rows for both sides. A request
then needs only indices into them (:mod:`request`).

A plan says which bytes correspond. It does not say who moves them: a read and a write would use the
same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.plan.descriptors import Rows
from pdcluster_connector.plan.pairing import Int64


@dataclass(frozen=True, slots=True, eq=False)
class IndexedSide:
    """One side of a stride class, ready to be indexed.

    Attributes:
        name: ``prefill`` or ``decode``.
        num_blocks, block_tokens: of the cache.
        first: flattened index of each run's first descriptor.
        per_block, per_unit: how far the flattened index moves with a block and with a unit.
    """

    name: str
    num_blocks: int
    block_tokens: int
    first: Int64
    per_block: int
    per_unit: int


@dataclass(frozen=True, slots=True, eq=False)
class StrideClass:
    """Runs of bytes that repeat with the same strides, and are indexed together.

    Attributes:
        groups: (prefill's, decode's) KV cache group.
        unit: tokens that one descriptor covers.
        unit_bytes: bytes of one unit over all runs.
        by_token: whether each token of a unit has a descriptor of its own.
    """

    groups: tuple[int, int]
    unit: int
    unit_bytes: int
    by_token: bool
    prefill: IndexedSide
    decode: IndexedSide


@dataclass(frozen=True, slots=True, eq=False)
class SourcePlan:
    """What one decode shard exchanges with one prefill shard.

    Attributes:
        rank: the prefill shard's (pipeline, tensor) rank.
        prefill_rows, decode_rows: (n, 5) uint64 ``(addr, len, device, stride, count)``, a
            strided NIXL list; flattened, element k of row r has the index
            ``counts[:r].sum() + k``. Rows of the two sides correspond one to one only
            when every block is moved whole. In general, only indices pair them.
        prefill_memory, decode_memory: NIXL memory types.
        classes: how the rows are indexed.
    """

    rank: tuple[int, int]
    prefill_rows: Rows
    decode_rows: Rows
    prefill_memory: Memory
    decode_memory: Memory
    classes: tuple[StrideClass, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PeerPlan:
    """Everything that one decode shard exchanges with one prefill engine."""

    sources: tuple[SourcePlan, ...]
