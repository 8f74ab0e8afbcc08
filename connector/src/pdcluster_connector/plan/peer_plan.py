"""The plan of one decode shard with one prefill engine: which bytes of the two correspond.

It is compiled once per peer: descriptor rows for both sides. A request then needs only indices into
them (``request_descriptors.py``). The plan does not say who moves the bytes: a read and a write
would use the same one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import GroupShape, Memory
from pdcluster_connector.plan import PlanError, block_pairs, geometry, rank_pairs, slices
from pdcluster_connector.plan.descriptors import ClassKey, Rows, Runs, Side, stride_classes


@dataclass(frozen=True, slots=True, eq=False)
class StrideClass:
    """Runs of bytes that repeat with the same strides, and are indexed together.

    Attributes:
        key: how they repeat on both sides.
        unit_bytes: bytes of one unit over all runs.
        prefill_first, decode_first: flattened index of each run's first descriptor, by side.
    """

    key: ClassKey
    unit_bytes: int
    prefill_first: block_pairs.Int64
    decode_first: block_pairs.Int64


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


@dataclass(frozen=True, eq=False)
class PeerPlan:
    """Everything that one decode shard exchanges with one prefill engine."""

    sources: tuple[SourcePlan, ...]

    @cached_property
    def units(self) -> dict[tuple[int, int], int]:
        """The unit of each (prefill, decode) pair of KV cache groups that share layers.

        An interval of tokens may start at multiples of the unit only.
        """
        found: dict[tuple[int, int], int] = {}
        for source in self.sources:
            for item in source.classes:
                key = item.key
                found[key.groups] = math.lcm(found.get(key.groups, 1), key.unit)
        return found


def plan_peer(decode: geometry.Shard, prefill: Sequence[geometry.Shard]) -> PeerPlan:
    """Compile the plan of a decode shard with all shards of a prefill engine.

    Args:
        decode: the shard that needs every byte of its regions' heads.
        prefill: the engine's shards, all ranks; layers that decode lacks are left out.

    Raises:
        PlanError: a layer, a head or a shard is missing, or the layouts do not correspond.
    """
    by_source: dict[int, list[rank_pairs.Assignment]] = {}
    for shard, side in ((decode, "decode"), *((shard, "prefill") for shard in prefill)):
        for region in shard.regions:
            if (fault := geometry.region_fault(region)) is not None:
                message = f"{side} layer {region.layer}: {fault}"
                raise PlanError(Reason.LAYOUT_UNSUPPORTED, message)
    for assignment in rank_pairs.assign_sources(decode, prefill):
        by_source.setdefault(assignment.source, []).append(assignment)
    sources = []
    for index, assignments in sorted(by_source.items()):
        found = stride_classes(assignments)
        _check_rows("prefill", [(key.prefill, runs) for key, runs in found.items()])
        _check_rows("decode", [(key.decode, runs) for key, runs in found.items()])
        prefill_rows = [key.prefill.rows(runs.prefill, runs.length) for key, runs in found.items()]
        decode_rows = [key.decode.rows(runs.decode, runs.length) for key, runs in found.items()]
        sources.append(
            SourcePlan(
                rank=prefill[index].rank,
                prefill_rows=slices.split_rows(
                    np.concatenate(prefill_rows), prefill[index].seams, "prefill"
                ),
                decode_rows=slices.split_rows(np.concatenate(decode_rows), decode.seams, "decode"),
                prefill_memory=_memory([item.prefill for item in assignments], "prefill"),
                decode_memory=_memory([item.decode for item in assignments], "decode"),
                classes=_indexed(found),
            )
        )
    return PeerPlan(tuple(sources))


def _check_rows(name: str, sides: Sequence[tuple[Side, Runs]]) -> None:
    """Refuse more rows than a source may have, before they are made."""
    count = sum(runs.length.size * (1 if side.dense else side.units) for side, runs in sides)
    if count > slices.MOST_ROWS:
        message = f"{name}'s KV takes {count:,} rows of descriptors on this rank, more than "
        message += f"{slices.MOST_ROWS:,}: its blocks have very many tokens, which lie apart"
        raise PlanError(Reason.LAYOUT_UNSUPPORTED, message)


def _memory(regions: Sequence[geometry.Region], side: str) -> Memory:
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
    prefill_used = decode_used = 0
    for key, runs in found.items():
        number = np.arange(runs.length.size, dtype=np.int64)
        made.append(
            StrideClass(
                key=key,
                unit_bytes=int(runs.length.sum()),
                prefill_first=prefill_used + number * key.prefill.elements,
                decode_first=decode_used + number * key.decode.elements,
            )
        )
        prefill_used += number.size * key.prefill.elements
        decode_used += number.size * key.decode.elements
    if (used := max(prefill_used, decode_used)) > block_pairs.LIMIT:
        message = f"{used} descriptors are more than NIXL can index"
        raise PlanError(Reason.LAYOUT_UNSUPPORTED, message)
    return tuple(made)


NOTICE_TOKENS = 1000
"""What links report the number of descriptors for."""
MANY = 4096
"""A link says so if they take more: 12 ms of posting for 1,000 tokens."""
POST_MICROSECONDS = 3
"""For one descriptor, by four threads of NIXL on an H100; by one thread 6 to 12."""
LARGE_BLOCK = 64


def descriptors(plan: PeerPlan, tokens: int, groups: Sequence[GroupShape] = ()) -> tuple[int, int]:
    """Return how many descriptors a request of ``tokens`` tokens takes, and how many it would take
    if both engines kept a head's tokens of a block side by side.

    ``groups`` are prefill's, which know their windows; without them, every layer needs all tokens.
    NIXL may join neighbours later; that is not counted. It cannot join parts of blocks.
    """
    taken = least = 0
    for source in plan.sources:
        for item in source.classes:
            key = item.key
            states = key.prefill.block_tokens == 1  # a Mamba group: one slot a request
            units = 1 if states else _units(key, key.unit, tokens, groups)
            count = item.prefill_first.size * units
            taken += count
            least += -(-count // key.unit) if key.by_token else count
    return taken, least


def _units(key: ClassKey, unit: int, tokens: int, groups: Sequence[GroupShape]) -> int:
    """Return how many units of a group's blocks hold its last tokens, or all without a window."""
    window = groups[key.groups[0]].window if groups else None
    return -(-tokens // unit) - (max(0, tokens - window) // unit if window else 0)


def cost_notice(plan: PeerPlan, layout: str | None, groups: Sequence[GroupShape] = ()) -> str:
    """Return why a pair's transfers are slow to post, and the remedy; empty if they are not.

    ``layout`` is vLLM's name of the order in which prefill keeps KV, and ``groups`` are its groups.
    """
    taken, least = descriptors(plan, NOTICE_TOKENS, groups)
    on_prefill = f" on prefill ({layout})" if layout else ""
    if taken > least:
        return (
            f"{NOTICE_TOKENS:,} tokens take {taken:,} descriptors on this rank; {least:,} would be "
            f"enough. KV is laid out token by token{on_prefill}, and "
            "the two engines' tensor-parallel sizes or layouts differ. Set "
            "VLLM_KV_CACHE_LAYOUT=LBHNC on both, with an attention backend that supports it"
        )
    classes = [(number, one) for number, of in enumerate(plan.sources) for one in of.classes]
    blocks = [one for one in classes if one[1].key.prefill.block_tokens > 1]  # no Mamba states
    if taken <= MANY or not blocks:
        return ""
    unit, ways = min(one.key.unit for _, one in blocks), list[str]()
    sides = {(one.key.prefill.block_tokens, one.key.decode.block_tokens) for _, one in blocks}
    size = max(LARGE_BLOCK, *map(max, sides))  # some backends take no smaller one than they have
    whole = all(one.kernel_blocks_per_block == 1 for one in groups)  # or cut for the kernel
    if whole and sides != {(unit, unit)}:
        ways.append(f"--block-size {size}")
    elif whole and unit < size:
        count = sum(
            one.prefill_first.size * _units(one.key, size, NOTICE_TOKENS, groups)
            for _, one in blocks
        )
        ways.append(f"--block-size {size} (then {count:,})")
    of_groups = {(number, one.key.groups): one.key for number, one in blocks}.values()
    count = sum(_units(key, unit, NOTICE_TOKENS, groups) for key in of_groups)
    if sides == {(unit, unit)} and 2 * count < taken:
        ways.append(f"transfer.kvLayout BHLNC if their attention backends have it (then {count:,})")
    if not ways:
        return ""
    return (
        f"{NOTICE_TOKENS:,} tokens take up to {taken:,} descriptors on this rank: "
        f"{taken * POST_MICROSECONDS / 1000:.0f} ms to post at {POST_MICROSECONDS} µs each. "
        f"Layers lie apart{on_prefill}. Set on both engines: {', or '.join(ways)}"
    )
