"""The plan of one decode shard with one prefill engine, and each request's part of it.

Compiled once per peer: descriptor rows for both sides. Per request, only indices into them.
A plan says which bytes correspond, not who moves them: a reader and a writer carry out the
same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.plan.bounds import check_region
from pdcluster_connector.plan.descriptors import Rows, Side, families, rows_nx3
from pdcluster_connector.plan.errors import PlanError
from pdcluster_connector.plan.geometry import Region, Shard
from pdcluster_connector.plan.indexing import Family, family_indices, index_families
from pdcluster_connector.plan.pairing import Int32, Int64, Pairs
from pdcluster_connector.plan.slices import split_rows
from pdcluster_connector.plan.topology import Assignment, assign_sources

__all__ = [
    "PeerPlan",
    "PlanError",
    "SourcePlan",
    "TransferSlice",
    "plan_peer",
    "rows_nx3",
]


@dataclass(frozen=True, slots=True, eq=False)
class TransferSlice:
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
class SourcePlan:
    """What one decode shard exchanges with one prefill shard.

    Attributes:
        rank: the prefill shard's (pipeline, tensor) rank.
        prefill_rows, decode_rows: (n, 5) uint64 ``(addr, len, device, stride, count)``, a
            strided NIXL list; flattened, element k of row r has the index
            ``counts[:r].sum() + k``. The sides' rows correspond one to one only when every
            block is moved whole; in general it is indices that pair.
        prefill_memory, decode_memory: NIXL memory types.
    """

    rank: tuple[int, int]
    prefill_rows: Rows
    decode_rows: Rows
    prefill_memory: Memory
    decode_memory: Memory
    families: tuple[Family, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PeerPlan:
    """Everything that one decode shard exchanges with one prefill engine."""

    sources: tuple[SourcePlan, ...]

    @property
    def grains(self) -> dict[tuple[int, int], int]:
        """Return the (prefill, decode) KV cache groups with layers in common, with the tokens
        in whose multiples an interval of theirs may start.
        """
        found: dict[tuple[int, int], int] = {}
        for source in self.sources:
            for family in source.families:
                groups, grain = family.key.groups, family.key.grain
                found[groups] = math.lcm(found.get(groups, 1), grain)
        return found

    def indices(self, pairs: Pairs, groups: tuple[int, int] = (0, 0)) -> list[TransferSlice]:
        """Return one request's descriptors in one (prefill, decode) KV cache group, by source.

        Pairs are sorted by prefill block, so that neighbours in memory become neighbours in
        the list and NIXL merges them. The last grain is moved whole, whatever the interval's
        end: its rest lies in the request's own last block.

        Raises:
            PlanError: TicketInvalid for a prefill block outside its region; otherwise
                CoverageIncomplete, for a decode block outside its region or an interval
                that starts inside of a grain.
        """
        slices = []
        for number, source in enumerate(self.sources):
            chosen = [family for family in source.families if family.key.groups == groups]
            if not chosen:
                continue
            columns = [family_indices(family, pairs) for family in chosen]
            slices.append(
                TransferSlice(
                    source=number,
                    rank=source.rank,
                    prefill_indices=np.concatenate([column[0] for column in columns]),
                    decode_indices=np.concatenate([column[1] for column in columns]),
                    nbytes=sum(column[2] for column in columns),
                )
            )
        return slices


def plan_peer(decode: Shard, prefill: Sequence[Shard], *, grain: int | None = None) -> PeerPlan:
    """Compile the plan of a decode shard with all shards of a prefill engine.

    Args:
        decode: the shard that needs every byte of its regions' heads.
        prefill: the engine's shards, all ranks; layers that decode lacks are left out.
        grain: tokens in a descriptor, a divisor of both block sizes; default the largest.

    Raises:
        PlanError: a layer, a head or a shard is missing, or the layouts do not correspond.
    """
    by_source: dict[int, list[Assignment]] = {}
    for shard, side in ((decode, "decode"), *((shard, "prefill") for shard in prefill)):
        for region in shard.regions:
            check_region(region, side)
    for assignment in assign_sources(decode, prefill):
        by_source.setdefault(assignment.source, []).append(assignment)
    sources = []
    for index, assignments in sorted(by_source.items()):
        parts = families(assignments, grain)
        sources.append(
            SourcePlan(
                rank=prefill[index].rank,
                prefill_rows=split_rows(
                    _rows(
                        [(key.prefill, part.prefill, part.length) for key, part in parts.items()]
                    ),
                    prefill[index].seams,
                    "prefill",
                ),
                decode_rows=split_rows(
                    _rows([(key.decode, part.decode, part.length) for key, part in parts.items()]),
                    decode.seams,
                    "decode",
                ),
                prefill_memory=_memory([item.prefill for item in assignments], "prefill"),
                decode_memory=_memory([item.decode for item in assignments], "decode"),
                families=index_families(parts),
            )
        )
    return PeerPlan(tuple(sources))


def _rows(blocks: Sequence[tuple[Side, Int64, Int64]]) -> Rows:
    return np.concatenate([side.rows(address, length) for side, address, length in blocks])


def _memory(regions: Sequence[Region], side: str) -> Memory:
    kinds = {region.memory for region in regions}
    if len(kinds) > 1:
        message = f"{side} keeps one shard's KV in {' and '.join(sorted(kinds))}"
        raise PlanError(Reason.MEMORY_TYPE_UNSUPPORTED, message)
    return kinds.pop()
