"""What one decode shard exchanges with one prefill engine, and each request's part of it.

The plan is compiled once per peer (:mod:`peer_plan`): descriptor rows for both sides. A request
then needs only indices into them. They are computed here without a loop over descriptors, and this
is where block ids from a peer become addresses. Every id and offset is checked against the cache's
bounds before that.

A plan says which bytes correspond. It does not say who moves them: a read and a write would use the
same plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.plan.descriptors import Rows
from pdcluster_connector.plan.errors import CoverageError, PlanError
from pdcluster_connector.plan.pairing import Int32, Int64, Pairs


@dataclass(frozen=True, slots=True, eq=False)
class SourceIndices:
    """One request's descriptors with one prefill shard.

    Attributes:
        source: index in ``PeerPlan.sources``.
        rank: the prefill shard's (pipeline, tensor) rank.
        prefill_indices, decode_indices: flattened indices into the source's rows; index i
            of one side pairs with index i of the other.
        nbytes: bytes that they move.
    """

    source: int
    rank: tuple[int, int]
    prefill_indices: Int32
    decode_indices: Int32
    nbytes: int


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

    @property
    def units(self) -> dict[tuple[int, int], int]:
        """Return the unit of each (prefill, decode) pair of KV cache groups that share layers.

        An interval of tokens may start at multiples of the unit only.
        """
        found: dict[tuple[int, int], int] = {}
        for source in self.sources:
            for item in source.classes:
                found[item.groups] = math.lcm(found.get(item.groups, 1), item.unit)
        return found

    def indices(self, pairs: Pairs, groups: tuple[int, int] = (0, 0)) -> list[SourceIndices]:
        """Return one request's descriptors in one (prefill, decode) KV cache group, by source.

        Pairs are sorted by prefill block, so that neighbours in memory become neighbours in
        the list and NIXL merges them. The last unit is always moved whole: what it holds behind
        the interval lies in the request's own last block.

        Raises:
            PlanError: TicketInvalid for a prefill block outside its region; otherwise
                CoverageIncomplete, for a decode block outside its region or an interval
                that starts inside of a unit.
        """
        found = []
        for number, source in enumerate(self.sources):
            chosen = [item for item in source.classes if item.groups == groups]
            if not chosen:
                continue
            columns = [_class_indices(item, pairs) for item in chosen]
            found.append(
                SourceIndices(
                    source=number,
                    rank=source.rank,
                    prefill_indices=np.concatenate([column[0] for column in columns]),
                    decode_indices=np.concatenate([column[1] for column in columns]),
                    nbytes=sum(column[2] for column in columns),
                )
            )
        return found


def _class_indices(item: StrideClass, pairs: Pairs) -> tuple[Int32, Int32, int]:
    """Return prefill indices, decode indices and the bytes that they move."""
    prefill, decode = item.prefill, item.decode
    first = {
        "prefill": _first_unit(
            prefill, item.unit, pairs, pairs.prefill_block, pairs.prefill_offset
        ),
        "decode": _first_unit(decode, item.unit, pairs, pairs.decode_block, pairs.decode_offset),
    }
    order = np.argsort(pairs.prefill_block, kind="stable")
    counts = -(-pairs.tokens[order].astype(np.int64) // item.unit)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    inner = np.arange(before.size) - before
    indices = []
    for side in (prefill, decode):
        elements = np.repeat(first[side.name][order], counts) + inner * side.per_unit
        indices.append(np.add.outer(side.first, elements).ravel().astype(np.int32))
    return indices[0], indices[1], item.unit_bytes * int(before.size)


def _first_unit(side: IndexedSide, unit: int, pairs: Pairs, blocks: Int32, offsets: Int32) -> Int64:
    """Return each pair's first element within a run, after the checks that bound it."""
    prefill = side.name == "prefill"
    size = pairs.prefill_block_tokens if prefill else pairs.decode_block_tokens
    if size != side.block_tokens:
        message = f"{side.name} blocks were paired as {size} tokens and have {side.block_tokens}"
        raise CoverageError(message)
    if not len(blocks):
        return np.empty(0, np.int64)
    low, high = int(blocks.min()), int(blocks.max())
    if low < 0 or high >= side.num_blocks:
        reason = Reason.TICKET_INVALID if prefill else Reason.COVERAGE_INCOMPLETE
        block = low if low < 0 else high
        message = f"{side.name} block {block} is outside of the cache's {side.num_blocks} blocks"
        raise PlanError(reason, message)
    end = offsets.astype(np.int64) + pairs.tokens
    if int(offsets.min()) < 0 or int(pairs.tokens.min()) < 1 or int(end.max()) > size:
        raise CoverageError(f"{side.name} tokens reach out of their block of {size}")
    units, rest = np.divmod(offsets.astype(np.int64), unit)
    if rest.any():
        message = f"tokens start inside of a {side.name} block's unit of {unit} tokens, "
        raise CoverageError(message + "which can only be moved whole")
    first: Int64 = blocks.astype(np.int64) * side.per_block + units * side.per_unit
    return first
