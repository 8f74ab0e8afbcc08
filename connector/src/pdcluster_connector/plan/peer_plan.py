"""Compiles the plan of one decode shard with one prefill engine: once per peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.plan.bounds import check_region
from pdcluster_connector.plan.descriptors import ClassKey, Rows, Runs, Side, stride_classes
from pdcluster_connector.plan.errors import PlanError
from pdcluster_connector.plan.geometry import Region, Shard
from pdcluster_connector.plan.pairing import LIMIT, Int64
from pdcluster_connector.plan.slices import split_rows
from pdcluster_connector.plan.topology import Assignment, assign_sources
from pdcluster_connector.plan.transfer import IndexedSide, PeerPlan, SourcePlan, StrideClass


def plan_peer(decode: Shard, prefill: Sequence[Shard]) -> PeerPlan:
    """Compile the plan of a decode shard with all shards of a prefill engine.

    Args:
        decode: the shard that needs every byte of its regions' heads.
        prefill: the engine's shards, all ranks; layers that decode lacks are left out.

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
        found = stride_classes(assignments)
        prefill_rows = _rows([(key.prefill, runs.prefill, runs) for key, runs in found.items()])
        decode_rows = _rows([(key.decode, runs.decode, runs) for key, runs in found.items()])
        sources.append(
            SourcePlan(
                rank=prefill[index].rank,
                prefill_rows=split_rows(prefill_rows, prefill[index].seams, "prefill"),
                decode_rows=split_rows(decode_rows, decode.seams, "decode"),
                prefill_memory=_memory([item.prefill for item in assignments], "prefill"),
                decode_memory=_memory([item.decode for item in assignments], "decode"),
                classes=_indexed(found),
            )
        )
    return PeerPlan(tuple(sources))


def _rows(sides: Sequence[tuple[Side, Int64, Runs]]) -> Rows:
    return np.concatenate([side.rows(address, runs.length) for side, address, runs in sides])


def _memory(regions: Sequence[Region], side: str) -> Memory:
    kinds = {region.memory for region in regions}
    if len(kinds) > 1:
        message = f"{side} keeps one shard's KV in {' and '.join(sorted(kinds))}"
        raise PlanError(Reason.MEMORY_TYPE_UNSUPPORTED, message)
    return kinds.pop()


def _indexed(found: Mapping[ClassKey, Runs]) -> tuple[StrideClass, ...]:
    """Give every descriptor of one source its index, class by class.

    Raises:
        PlanError: LayoutUnsupported, for more descriptors than int32 can count.
    """
    made = []
    used = {"prefill": 0, "decode": 0}
    for key, runs in found.items():
        sides = {}
        for name, side in (("prefill", key.prefill), ("decode", key.decode)):
            number = np.arange(runs.length.size, dtype=np.int64)
            first = used[name] + number * side.elements
            used[name] += number.size * side.elements
            sides[name] = IndexedSide(name, side.num_blocks, side.block_tokens, first, *side.steps)
        unit_bytes = int(runs.length.sum())
        made.append(
            StrideClass(
                key.groups, key.unit, unit_bytes, key.by_token, sides["prefill"], sides["decode"]
            )
        )
    if max(used.values()) > LIMIT:
        message = f"{max(used.values())} descriptors are more than NIXL can index"
        raise PlanError(Reason.LAYOUT_UNSUPPORTED, message)
    return tuple(made)
